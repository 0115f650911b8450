"""Torch's private interfaces to a trace in which sizes are open: what the trace has taken for granted of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch


def export_open(module: torch.nn.Module, inputs: Sequence[torch.Tensor], dims: Sequence[Iterable[int]]) -> Any:
    """Export a module whose forward takes `*tensors`, with the sizes of these dims of each left open."""
    specs = tuple({dim: torch.export.Dim.AUTO for dim in found} or None for found in dims)
    return torch.export.export(module, tuple(inputs), dynamic_shapes={"tensors": specs}, strict=False)


@dataclass(frozen=True)
class OpenSizes:
    """A trace with open sizes: the `guards` that it was traced under, the `ranges` that its `symbols` are in, by symbol
    the place of its size among the sizes, and all sizes and `numbers` in it, as expressions; `known`: by place, the
    size for which alone it holds, where torch has taken one for a constant. `is_closed`: it holds for no call."""

    symbols: Mapping[Any, int] = field(default_factory=dict)
    guards: tuple[Any, ...] = ()
    ranges: tuple[tuple[int, Any], ...] = ()
    expressions: tuple[Any, ...] = ()
    known: Mapping[int, int] = field(default_factory=dict)
    is_closed: bool = False

    def holds(self, sizes: Sequence[int]) -> bool:
        """Return whether the trace is that of a call of these sizes."""
        if self.is_closed or any(sizes[place] != size for place, size in self.known.items()):
            return False
        at = self._at(sizes)
        in_range = all(r.lower <= sizes[place] <= r.upper for place, r in self.ranges)
        return in_range and all(guard.subs(at) == True for guard in self.guards)  # noqa: E712

    def numbers(self, sizes: Sequence[int]) -> list[int]:
        """Return all numbers that change with the sizes, at some for which the trace holds."""
        at = self._at(sizes)
        return [int(expression.subs(at)) for expression in self.expressions]

    def without_known(self) -> OpenSizes:
        """Return what the trace says of the other sizes, where those that are known stay as they are."""
        kept = sorted({*self.symbols.values()})
        symbols = {symbol: kept.index(place) for symbol, place in self.symbols.items()}
        ranges = tuple((kept.index(place), found) for place, found in self.ranges)
        return replace(self, symbols=symbols, ranges=ranges, known={})

    def _at(self, sizes: Sequence[int]) -> dict[Any, int]:
        return {symbol: sizes[place] for symbol, place in self.symbols.items()}


def open_sizes(program: Any, dims: Mapping[int, Mapping[int, int]]) -> OpenSizes:
    """Return what an exported program says of the sizes of its open dims, which are given by the position of the tensor
    and the dim, each with the place of its size among the sizes."""
    nodes = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    inputs = [nodes[name] for name in program.graph_signature.user_inputs]
    sizes = [(place, inputs[at].meta["val"].shape[dim]) for at, found in dims.items() for dim, place in found.items()]
    traced: Any = next((size.node.shape_env for _, size in sizes if isinstance(size, torch.SymInt)), None)
    found = [(place, traced.replace(s.node.expr) if isinstance(s, torch.SymInt) else s) for place, s in sizes]
    closed = {(place, int(size)) for place, size in found if isinstance(size, int) or size.is_number}
    symbols = {symbol: place for place, symbol in found if not isinstance(symbol, int) and not symbol.is_number}
    known = dict(closed)
    is_one = len(known) == len(closed) and all(symbol.is_symbol for symbol in symbols)
    if traced is None or not is_one or any(symbols[symbol] != place for place, symbol in found if symbol in symbols):
        return OpenSizes(known=known, is_closed=not is_one or traced is not None)
    guards = [traced.replace(guard.expr) for guard in traced.guards]
    guards += [check.expr for checks in traced.deferred_runtime_asserts.values() for check in checks]
    expressions = {traced.replace(n.node.expr) for node in program.graph.nodes for n in _numbers(node.meta.get("val"))}
    if any(x not in symbols for e in (*guards, *expressions) for x in e.free_symbols):
        return OpenSizes(is_closed=True)  # numbers that depend on values
    ranges = [(place, traced.var_to_range[symbol]) for symbol, place in symbols.items()]
    changing = sorted((e for e in expressions if e.free_symbols), key=str)
    return OpenSizes(symbols, tuple(guards), tuple(ranges), tuple(changing), known)


def _numbers(value: Any) -> Iterable[torch.SymInt]:
    """Return the numbers of a traced value that depend on the open size."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = (size for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,)))
    return (size for size in sizes if isinstance(size, torch.SymInt))
