"""Makes a rule safe for one node: whatever an op family claims, these hold afterwards.

* a factor has one size wherever it appears (`even` names those that merge or repeat), or it is not shardable
* a factor of size 1 does not exist
* Partial needs a sum that is exact: floating or complex values, or the integers of `aten.sum`
* a tensor known to be zero need not be Partial together with the others
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import fx

from ..ir.graph import tensor_arguments, values_of
from .reading import is_zero
from .rule import Dim, Inner, Rule, entries_of, name_of, names_in

INTEGER_SUMS = ("aten.sum.dim_IntList", "aten.sum.default")


def settle(node: fx.Node, rule: Rule) -> Rule | None:
    """Restrict `rule` to what holds for the sizes and dtypes of `node`; return None if the node has other tensors."""
    arguments, outputs = tensor_arguments(node), values_of(node)
    values = [a.meta["val"] for a in arguments] + outputs
    claimed = rule.inputs + rule.outputs
    if len(rule.inputs) != len(arguments) or [v.dim() for v in values] != [len(dims) for dims in claimed]:
        return None
    rule = without(rule, _inconsistent(rule, [tuple(v.shape) for v in values]) | _inexact(node, rule, outputs))
    return replace(rule, linear=_linear_sets(rule, arguments, outputs))


def without(rule: Rule, factors: set[str]) -> Rule:
    """Return `rule` with some factors made unshardable."""
    if not factors:
        return rule

    def keep(dim: Dim) -> Dim:
        entries = tuple(e for e in entries_of(dim) if name_of(e) not in factors)
        return entries if len(entries) > 1 else entries[0] if entries else None

    inputs, outputs = (tuple(tuple(map(keep, dims)) for dims in side) for side in (rule.inputs, rule.outputs))
    even = {name: size for name, size in rule.even.items() if name not in factors}
    return replace(rule, inputs=inputs, outputs=outputs, even=even)


def _inconsistent(rule: Rule, shapes: list[tuple[int, ...]]) -> set[str]:
    """Return the factors of size 0 or 1, or of several sizes."""
    sizes: dict[str, set[int]] = {}
    for dims, shape in zip(rule.inputs + rule.outputs, shapes):
        for dim, size in zip(dims, shape):
            for entry in entries_of(dim):
                whole = size // entry.parts if isinstance(entry, Inner) else size
                sizes.setdefault(name_of(entry), set()).add(rule.even.get(name_of(entry), whole))
    return {name for name, found in sizes.items() if len(found) > 1 or found & {0, 1}}


def _inexact(node: fx.Node, rule: Rule, outputs: list[torch.Tensor]) -> set[str]:
    """Return the factors whose sharding would leave a Partial value of a type that cannot be added up or compared in
    parts."""
    whole = {name for dims in rule.inputs for name in names_in(dims)}
    found = set()
    for dims, value in zip(rule.outputs, outputs):
        if not (_is_inexact_type(value) or (str(node.target) in INTEGER_SUMS and value.dtype != torch.bool)):
            found |= whole - set(names_in(dims))
    return found


def _linear_sets(rule: Rule, arguments: list[fx.Node], outputs: list[torch.Tensor]) -> tuple[frozenset[int], ...]:
    if not all(map(_is_inexact_type, outputs)):
        return ()
    result = []
    for positions in rule.linear:
        if not all(p < len(arguments) and _is_inexact_type(arguments[p].meta["val"]) for p in positions):
            continue
        needed = frozenset(p for p in positions if not is_zero(arguments[p]))
        if needed and needed not in result:
            result.append(needed)
    return tuple(result)


def _is_inexact_type(value: torch.Tensor) -> bool:
    return value.dtype.is_floating_point or value.dtype.is_complex
