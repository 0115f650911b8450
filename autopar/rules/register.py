"""The door through which every sharding rule comes in, autopar's own (table.py) and a user's."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import fx

from .. import _torch
from ..errors import RuleError, check_new
from ..ir.graph import describe, tensor_arguments, values_of
from .families import Builder, einsum
from .lookup import KNOWN, TABLE
from .normalize import contradiction
from .rule import Rule, rule


def register_rule(
    op: object,
    rule: str | Builder,
    *,
    linear: Sequence[int | Sequence[int]] = (),
    reduction: str = "sum",
    contiguous: str = "",
    replace: bool = False,
) -> None:
    """Say how an op may be sharded, from the next plan on.

    op: torch.ops.mine.matmul.default, what torch.library.custom_op made, or names as table.py writes them.
    rule: factors as in an einsum, "m k, k n -> m n": one word a dim, a comma between tensors, `_` for a dim that stays
        whole, `...` for any number of leading dims that tensors share. A factor that the outputs lack is summed away.
        Arguments that a call leaves out (an optional bias) drop from the end of the left side. Or a function from a
        node to its Rule (autopar/rules/rule.py), None if the call has none.
    linear: arguments in which the op is linear, so that it maps parts of a sum to parts of a sum: (0, 1) for a product,
        [(0, 1)] for a sum, whose arguments are parts together.
    reduction: how parts of a factor that is summed away combine: "sum" or "max".
    contiguous: factors of which a device must hold one range.

    Raises RuleError for text that does not fit the op's schema or, when a call is planned, its shapes; and for an op
    that has a rule already, unless it is to `replace` that one. `check_rule` compares the numbers."""
    if isinstance(rule, str):
        sets = tuple((i,) if isinstance(i, int) else tuple(i) for i in linear)
        _check_text(op, rule, sets, reduction)
        rule = _fitting(rule, einsum(rule, *sets, reduction=reduction, contiguous=contiguous))
    elif not callable(rule):
        raise RuleError(f"the rule of {op} is a {type(rule).__name__}", fix='give text such as "m k, k n -> m n"')
    for name in _names(op):
        check_new(RuleError, "rule of", name, TABLE, replace)
        TABLE[name] = rule
    KNOWN.clear()


def full_name(name: str) -> str:
    """Return the full name of an op: `mm` -> aten.mm.default, `add.Tensor` -> aten.add.Tensor; a name with two dots
    stays."""
    return name if name.count(".") == 2 else f"aten.{name}" if "." in name else f"aten.{name}.default"


def _names(op: object) -> list[str]:
    return [full_name(name) for name in op.split()] if isinstance(op, str) else [str(overload_of(op))]


def overload_of(op: object) -> torch._ops.OpOverload:
    """Return the overload that an op of torch.ops or of torch.library.custom_op stands for. Raise RuleError if it
    stands for none, or for several."""
    found = _torch.overloads_of(op)
    if len(found) != 1:
        known = ", ".join(map(str, found)) or "torch.ops.mine.matmul.default, or what torch.library.custom_op returns"
        raise RuleError(f"{op!r} is not one op", fix=f"use {known}")
    return found[0]


def _check_text(op: object, text: str, linear: tuple[tuple[int, ...], ...], reduction: str) -> None:
    """Raise RuleError for a rule that no call of the op can follow."""
    if text.count("->") != 1 or reduction not in ("sum", "max"):
        raise RuleError(
            f"cannot read {text!r} with reduction {reduction!r} as the rule of {op}",
            fix='write "... -> ..." for an elementwise op, "m k, k n -> m n" for a product; and "sum" or "max"',
        )
    made = rule(text)
    if wrong := [i for positions in linear for i in positions if not 0 <= i < len(made.inputs)]:
        raise RuleError(
            f"the rule {text!r} of {op} has no argument {wrong[0]} to be linear in",
            fix=f"count its {len(made.inputs)} tensors from 0",
        )
    if isinstance(op, str):
        return
    schema = overload_of(op)._schema
    for what, tensors, types in (
        ("arguments", made.inputs, [str(a.type) for a in schema.arguments]),
        ("results", made.outputs, [str(a.type) for a in schema.returns]),
    ):
        least, most = types.count("Tensor"), sum("Tensor" in t for t in types)
        if not any("[]" in t or "List" in t for t in types) and not least <= len(tensors) <= most:
            raise RuleError(
                f"the rule {text!r} has {len(tensors)} tensors as {what}, {schema} has {most}",
                fix="name the dims of every tensor, in the op's own order",
            )


def suggestion(node: fx.Node) -> str:
    """Return how to give the op of a node a rule: that of elementwise ops if all its tensors have one shape, else one
    that keeps all dims whole."""
    if len({value.shape for value in (*(a.meta["val"] for a in tensor_arguments(node)), *values_of(node))}) == 1:
        return f'autopar.register_rule(torch.ops.{node.target}, "{_text_for(node, "...")}") if it is elementwise'
    return f'autopar.register_rule(torch.ops.{node.target}, "{_text_for(node)}"), with a word for what may be cut'


def _text_for(node: fx.Node, dims: str = "") -> str:
    sides = ([a.meta["val"] for a in tensor_arguments(node)], values_of(node))
    return " -> ".join(", ".join(dims or " ".join("_" * value.dim()) for value in side) for side in sides)


def _fitting(text: str, build: Builder) -> Builder:
    """Return a builder that raises RuleError for a call that its text does not fit."""

    def checked(node: fx.Node) -> Rule | None:
        made = build(node)
        if made is not None and (fault := contradiction(node, made)):
            raise RuleError(
                f"the rule {text!r} contradicts {node.target}: {fault}",
                node=describe(node),
                source=node.meta.get("source") or None,
                fix=f'register it again with replace=True and one word a dim, "_" for what stays whole: '
                f'"{_text_for(node)}"',
            )
        return made

    return checked
