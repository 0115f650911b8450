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
from .rule import Dim, Inner, Rows, Rule, entries_of, name_of, names_in

INTEGER_SUMS = ("aten.sum.dim_IntList", "aten.sum.default")


def normalize(node: fx.Node, rule: Rule) -> Rule | None:
    """Restrict `rule` to what holds for the sizes and dtypes of `node`; return None if the node has other tensors."""
    if _other_tensors(node, rule):
        return None
    arguments, outputs = tensor_arguments(node), values_of(node)
    unclear = {name for name, found in _sizes(node, rule).items() if len(found) > 1 or found & {0, 1}}
    rule = without(rule, unclear | _inexact(node, rule, outputs))
    return replace(rule, linear=_linear_sets(rule, arguments, outputs))


def contradiction(node: fx.Node, rule: Rule) -> str:
    """Return what `rule` says of the tensors of `node` that is not so, "" if all of it is. A dim of size 1 may stand
    for a factor of any size: it broadcasts."""
    several = {name: found - {1} for name, found in _sizes(node, rule).items() if len(found - {1}) > 1}
    sizes = (f"factor {name} has sizes {' and '.join(map(str, sorted(found)))}" for name, found in several.items())
    return _other_tensors(node, rule) or next(sizes, "")


def _other_tensors(node: fx.Node, rule: Rule) -> str:
    """Return in what the number of tensors, or of the dims of one, differs between a rule and its node, "" if it does
    not."""
    arguments = [argument.meta["val"] for argument in tensor_arguments(node)]
    for what, values, claimed in (("argument", arguments, rule.inputs), ("result", values_of(node), rule.outputs)):
        if len(values) != len(claimed):
            return f"it has {len(values)} tensors as {what}s, the rule {len(claimed)}"
        for i, (value, dims) in enumerate(zip(values, claimed)):
            if value.dim() != len(dims):
                return f"{what} {i} has {value.dim()} dims, in the rule {len(dims)}"
    return ""


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


def _sizes(node: fx.Node, rule: Rule) -> dict[str, set[int]]:
    """Return the sizes that each factor has where it appears."""
    sizes: dict[str, set[int]] = {}
    values = [argument.meta["val"] for argument in tensor_arguments(node)] + values_of(node)
    for dims, value in zip(rule.inputs + rule.outputs, values):
        for dim, size in zip(dims, value.shape):
            for entry in entries_of(dim):
                if isinstance(entry, Rows) and entry.by_owner:
                    continue  # of experts, not of rows
                whole = size // entry.parts if isinstance(entry, Inner) else size
                sizes.setdefault(name_of(entry), set()).add(rule.even.get(name_of(entry), whole))
    return sizes


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
