"""Sharding rules: what each op allows, as factors, and what a device then has to run.

    rule.py      the vocabulary: Rule, Inner, Strategy, and `strategies`, which enumerates the legal ones over a mesh
    register.py  the one door for rules, `register_rule`, and `rule_of(node)`
    table.py     autopar's own: the table op -> rule
    families.py  rule builders of op families: einsum, pointwise, reductions, losses, constructors
    layers.py    attention, norms, convolution
    views.py     merging, splitting, permuting and stretching dims
    indexing.py  split, slice, cat, gather, index and their backwards
    normalize.py what every rule must obey for the sizes and dtypes of its node
    localize.py  global constants in arguments -> one device's: `local_call`
    parts.py     which factors may be sharded inside equal parts (fused weights): `propagate_parts`,
                 `factor_parts`, `cut_inside`
    reading.py   how rules read a node
    numeric_check.py  a rule against its op, in numbers: `check_rule`

A new op is one line in the table and one instance in tests/rules: the property tests do the rest. A user's op comes in
the same way: docs/extending.md.
"""

from . import table  # noqa: F401  registers autopar's own rules
from .localize import local_call
from .lookup import rule_of
from .numeric_check import check_rule
from .parts import cut_inside, factor_parts, propagate_parts
from .register import register_rule
from .rule import Rule, Strategy, strategies, strategy_of

__all__ = [
    "Rule", "Strategy", "check_rule", "cut_inside", "factor_parts", "local_call", "propagate_parts",
    "register_rule", "rule_of", "strategies", "strategy_of",
]  # fmt: skip
