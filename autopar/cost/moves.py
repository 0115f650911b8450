"""Compute the bytes that move between two layouts, and the single moves that lead from one to the other.

What stays in place has no say: dims and partial axes that are the same before and after are left out, and the dims that
move are put in an order of their own, so that few cores serve very many pairs of layouts. All is plain tuples: planning
asks for very many.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from ..ir.layout import ROWS, Layout


class Move(NamedTuple):
    """One step. `axes` has one axis, but several of an all_reduce, of an all_gather that undoes all their cuts of a
    dim, outermost first, or of a reduce_scatter that makes them, in the order of the mesh. `dim` is cut or joined;
    all_to_all joins `dim` and cuts `to_dim`. `parts` of the dim that is cut or joined (see Layout)."""

    kind: str
    axes: tuple[str, ...]
    dim: int | None = None
    to_dim: int | None = None
    reduction: str = "sum"
    parts: int = 1
    to_parts: int = 1

    def __str__(self) -> str:
        where = {"all_to_all": f" S({self.dim})->S({self.to_dim})", "all_reduce": f" {self.reduction}"}
        return f"{self.kind}[{','.join(self.axes)}]" + where.get(self.kind, f" S({self.dim})")


class State(NamedTuple):
    """A layout as tuples: axes by dim, parts by dim, (axis, reduction) of what is partial."""

    dims: tuple[tuple[str, ...], ...]
    parts: tuple[int, ...]
    partial: tuple[tuple[str, str], ...]

    def with_dim(self, d: int, axes: tuple[str, ...], parts: int, partial=None) -> State:
        """Return the state with dim d cut so, and with what is `partial` replaced if that is given."""
        return State(
            (*self.dims[:d], axes, *self.dims[d + 1 :]),
            (*self.parts[:d], parts if axes else 1, *self.parts[d + 1 :]),
            self.partial if partial is None else partial,
        )


class Core(NamedTuple):
    """Say what moves from one state to another. The target's partial axes are those that the source lacks: then nothing
    leads there."""

    source: State
    target: State

    @staticmethod
    def of(source: Layout, target: Layout) -> tuple[Core, tuple[int, ...]]:
        """Return the core of two layouts of one tensor, and which of the tensor's dims its dims are."""
        a, b, m, n = source.dims, target.dims, source.parts, target.parts
        dims = [d for d in range(len(a)) if a[d] != b[d] or m[d] != n[d]]
        if len(dims) > 1:
            dims.sort(key=lambda d: (a[d], b[d], m[d], n[d]))
        before, after = source.partial, target.partial
        if before and dims and any(reduction == ROWS for _, reduction in before):
            after = (("", ROWS),)  # rows by owner stay as they are: nothing leads elsewhere
        core = Core(
            State(
                tuple([a[d] for d in dims]), tuple([m[d] for d in dims]), tuple([p for p in before if p not in after])
            ),
            State(
                tuple([b[d] for d in dims]), tuple([n[d] for d in dims]), tuple([p for p in after if p not in before])
            ),
        )
        return core, tuple(dims)

    def moves(self, state: State) -> Iterator[tuple[Move, State]]:
        """Iterate over single moves that lead from `state` towards the target, and where they lead."""
        yield from self._reductions(state)
        wanted = {axis: d for d, axes in enumerate(self.target.dims) for axis in axes}
        for d, axes in enumerate(state.dims):
            if not axes or self._is_aligned(state, d):
                continue
            axis, parts = axes[-1], state.parts[d]
            gathered = state.with_dim(d, axes[:-1], parts)
            yield Move("all_gather", (axis,), d, parts=parts), gathered
            if parts == 1:  # several at once
                for many in range(2, len(axes) + 1):
                    yield Move("all_gather", axes[-many:], d), state.with_dim(d, axes[:-many], 1)
            e = wanted.get(axis)
            if e is not None and e != d and self._may_append(state, e, axis):
                to_parts = self.target.parts[e]
                after = gathered.with_dim(e, (*gathered.dims[e], axis), to_parts)
                yield Move("all_to_all", (axis,), d, e, parts=parts, to_parts=to_parts), after
        busy = {axis for axes in state.dims for axis in axes} | {axis for axis, _ in state.partial}
        for axis, d in wanted.items():
            if axis not in busy and self._may_append(state, d, axis):
                parts = self.target.parts[d]
                yield Move("slice", (axis,), d, parts=parts), state.with_dim(d, (*state.dims[d], axis), parts)

    def _reductions(self, state: State) -> Iterator[tuple[Move, State]]:
        for axis, reduction in state.partial:
            if reduction == ROWS:
                continue
            rest = tuple([p for p in state.partial if p[0] != axis])
            yield Move("all_reduce", (axis,), reduction=reduction), State(state.dims, state.parts, rest)
            d = next((d for d, axes in enumerate(self.target.dims) if axis in axes), None)
            if d is not None and reduction == "sum" and self._may_append(state, d, axis):
                parts = self.target.parts[d]
                after = state.with_dim(d, (*state.dims[d], axis), parts, rest)
                yield Move("reduce_scatter", (axis,), d, parts=parts), after
        for reduction in ("sum", "max") if len(state.partial) > 1 else ():
            axes = tuple([a for a, r in state.partial if r == reduction])
            if len(axes) > 1:
                rest = tuple([p for p in state.partial if p[0] not in axes])
                yield Move("all_reduce", axes, reduction=reduction), State(state.dims, state.parts, rest)
        if len(state.partial) > 1:
            yield from self._scatters(state)

    def _scatters(self, state: State) -> Iterator[tuple[Move, State]]:
        """Iterate over reduce-scatters over several axes that cut a dim in the order of the mesh. In the other order,
        the closest axis first, one after the other leaves the far links the fewest bytes: layouts say which it is."""
        sums = [axis for axis, reduction in state.partial if reduction == "sum"]  # in the order of the mesh
        for d, (axes, wanted) in enumerate(zip(state.dims, self.target.dims)):
            if self.target.parts[d] > 1 or state.parts[d] > 1 or wanted[: len(axes)] != axes:
                continue
            for many in range(2, len(wanted) - len(axes) + 1):
                added = wanted[len(axes) : len(axes) + many]
                if [*added] == [axis for axis in sums if axis in added]:
                    rest = tuple([p for p in state.partial if p[0] not in added])
                    yield Move("reduce_scatter", added, d), state.with_dim(d, wanted[: len(axes) + many], 1, rest)

    def _is_aligned(self, state: State, d: int) -> bool:
        """Return whether dim d already starts as the target wants it: its axes need not move."""
        axes = state.dims[d]
        return axes == self.target.dims[d][: len(axes)] and state.parts[d] == self.target.parts[d]

    def _may_append(self, state: State, d: int, axis: str) -> bool:
        """Return whether adding `axis` as innermost axis of dim d leads towards the target."""
        if state.dims[d] and state.parts[d] != self.target.parts[d]:
            return False
        longer = (*state.dims[d], axis)
        return self.target.dims[d][: len(longer)] == longer
