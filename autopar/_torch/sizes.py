"""Torch's private interfaces to a trace in which sizes are open: what the trace has taken for granted of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
from torch.utils._python_dispatch import TorchDispatchMode

LEAST = 2  # sizes of 0 and 1 are special: of empty tensors, and of those that are broadcast


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
    return _said_of(sizes, {n.node.expr for node in program.graph.nodes for n in _numbers(node.meta.get("val"))})


def open_mode() -> Any:
    """Return a mode in which tensors have no storage, and sizes may be open."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    mode.cache_enabled = False  # a result with open sizes takes as long to make from its form as anew
    return mode


def run_open(
    mode: Any,
    run: Callable[[list[torch.Tensor]], object],
    inputs: Sequence[torch.Tensor],
    dims: Sequence[Mapping[int, int]],
) -> OpenSizes:
    """Run something on tensors of an open mode with the sizes of these dims of each left open, each with the place of
    its size among the sizes, and return what that says of them: what an export says, in less time."""
    from torch._dispatch.python import enable_python_dispatcher

    places = {place: x.shape[dim] for x, of in zip(inputs, dims) for dim, place in of.items()}
    sizes = {place: _open_size(mode.shape_env, place, size) for place, size in places.items()}
    with mode:
        opened = [
            torch.empty([sizes[of[d]] if d in of else n for d, n in enumerate(x.shape)], dtype=x.dtype, device=x.device)
            for x, of in zip(inputs, dims)
        ]
    seen = _SeenNumbers()
    with enable_python_dispatcher(), mode, seen:  # as an export has it
        run([x.requires_grad_(like.requires_grad) for x, like in zip(opened, inputs)])
    found = _said_of([*sizes.items()], seen.numbers)
    here = {symbol: places[place] for symbol, place in found.symbols.items()}
    least = (number >= LEAST for number in found.expressions if number.subs(here) >= LEAST)
    return replace(found, guards=(*found.guards, *least))


def plain_size(size: Any) -> Any:
    """Return a size as what can be compared and hashed: the expression of one that is open."""
    return size if type(size) is int else size.node.expr


def size_of(mode: Any, size: Any) -> Any:
    """Return the size in a mode that `plain_size` has told."""
    return size if type(size) is int else mode.shape_env.create_symintnode(size, hint=None)


def _open_size(env: Any, place: int, size: int) -> torch.SymInt:
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import DimDynamic

    source = ConstantSource(f"size_{place}")
    symbol = env.create_symbol(size, source, DimDynamic.DYNAMIC, None)
    return env.create_symintnode(symbol, hint=size, source=source)


class _SeenNumbers(TorchDispatchMode):
    """Inside, the open numbers are noted that ops take or that the shapes of their results have."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: set[Any] = set()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        result = op(*args, **(kwargs or {}))
        for value in torch.utils._pytree.tree_leaves((args, kwargs, result)):
            self.numbers.update(n.node.expr for n in _numbers(value))
            if isinstance(value, torch.SymFloat):
                self.numbers.update(_whole_numbers(value.node.expr))
        return result


def _said_of(sizes: Sequence[tuple[int, Any]], numbers: Iterable[Any]) -> OpenSizes:
    """Return what a trace says of `sizes`, which are given with their places, and in which there were `numbers`."""
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
    expressions = {traced.replace(number) for number in numbers}
    if any(x not in symbols for e in (*guards, *expressions) for x in e.free_symbols):
        return OpenSizes(is_closed=True)  # numbers that depend on values
    ranges = [(place, traced.var_to_range[symbol]) for symbol, place in symbols.items()]
    changing = sorted((e for e in expressions if e.free_symbols), key=str)
    return OpenSizes(symbols, tuple(guards), tuple(ranges), tuple(changing), known)


def _whole_numbers(expression: Any) -> Iterator[Any]:
    """Return the largest parts of a float that are whole numbers."""
    if expression.is_integer:
        yield expression
    else:
        for part in expression.args:
            yield from _whole_numbers(part)


def _numbers(value: Any) -> Iterable[torch.SymInt]:
    """Return the numbers of a traced value that depend on the open size."""
    values = value if isinstance(value, (tuple, list)) else (value,)
    sizes = (size for v in values for size in (v.shape if isinstance(v, torch.Tensor) else (v,)))
    return (size for size in sizes if isinstance(size, torch.SymInt))


def traced_number(expected: int) -> int:
    """Return the number of rows that a custom op makes where only run time knows it: a symbol where a graph is traced
    whose sizes may be symbols, else how many are expected. Call it in the fake kernel of the op."""
    from torch._subclasses.fake_tensor import DynamicOutputShapeException

    try:
        return cast(int, torch.library.get_ctx().new_dynamic_size())
    except DynamicOutputShapeException:
        return expected
