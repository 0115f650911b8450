"""Torch's private interfaces to a trace in which a size is open: what the trace has taken for granted of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch


def export_open(module: torch.nn.Module, inputs: Sequence[torch.Tensor], dims: Sequence[Sequence[int]]) -> Any:
    """Export a module whose forward takes `*tensors`, with the sizes of these dims of each left open."""
    specs = tuple({dim: torch.export.Dim.AUTO for dim in found} or None for found in dims)
    return torch.export.export(module, tuple(inputs), dynamic_shapes={"tensors": specs}, strict=False)


@dataclass(frozen=True)
class OpenSize:
    """A trace with an open size: the `guards` that it was traced under, ranges that its `symbols` are
    in, and all sizes and `numbers` in it, as expressions; `known`: the sizes that it holds for, where torch has taken
    them for constants."""

    symbols: tuple[Any, ...]
    guards: tuple[Any, ...] = ()
    ranges: tuple[Any, ...] = ()
    expressions: tuple[Any, ...] = ()
    known: frozenset[int] | None = None

    def holds(self, size: int) -> bool:
        """Return whether the trace is that of a call of this size."""
        if self.known is not None:
            return self.known == {size}
        at = dict.fromkeys(self.symbols, size)
        in_range = all(r.lower <= size <= r.upper for r in self.ranges)
        return in_range and all(guard.subs(at) == True for guard in self.guards)  # noqa: E712

    def numbers(self, size: int) -> list[int]:
        """Return all numbers that change with the size, at one for which the trace holds."""
        at = dict.fromkeys(self.symbols, size)
        return [int(expression.subs(at)) for expression in self.expressions]


def open_size(program: Any, dims: Mapping[int, Sequence[int]]) -> OpenSize:
    """Return what an exported program says of the size of its open dims, which are given by the position of the tensor,
    and are all of one size."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [nodes[name] for name in program.graph_signature.user_inputs]
    sizes = [inputs[at].meta["val"].shape[dim] for at, found in dims.items() for dim in found]
    traced: Any = next((size.node.shape_env for size in sizes if isinstance(size, torch.SymInt)), None)
    found = [traced.replace(s.node.expr) if isinstance(s, torch.SymInt) else s for s in sizes]
    if known := {int(size) for size in found if isinstance(size, int) or size.is_number}:
        return OpenSize((), known=frozenset(known))
    symbols = dict.fromkeys(found)  # several where torch does not know that they are one size
    guards = [traced.replace(guard.expr) for guard in traced.guards]
    guards += [check.expr for checks in traced.deferred_runtime_asserts.values() for check in checks]
    expressions = {traced.replace(n.node.expr) for node in program.graph.nodes for n in _numbers(node.meta.get("val"))}
    others = {x for e in (*guards, *expressions) for x in e.free_symbols if x not in symbols}
    if others or not all(symbol.is_symbol for symbol in symbols):  # numbers that depend on values
        return OpenSize((), known=frozenset())
    ranges = [traced.var_to_range[symbol] for symbol in symbols]
    changing = sorted((e for e in expressions if e.free_symbols), key=str)
    return OpenSize(tuple(symbols), tuple(guards), tuple(ranges), tuple(changing))


def _numbers(value: Any) -> Iterable[torch.SymInt]:
    """Return the numbers of a traced value that depend on the open size."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = (size for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,)))
    return (size for size in sizes if isinstance(size, torch.SymInt))
