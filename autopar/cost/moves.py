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


class Towards:
    """The single moves that lead towards one state, from any state of the same tensor."""

    def __init__(self, target: State):
        self.dims, self.parts = target.dims, target.parts
        self.wanted = {axis: d for d, axes in enumerate(target.dims) for axis in axes}

    def moves(self, state: State) -> list[tuple[Move, State]]:
        """Return the moves from `state`, and where they lead."""
        found = self._reductions(state) if state.partial else []
        for d, axes in enumerate(state.dims):
            if not axes or self._is_aligned(state, d):
                continue
            axis, parts = axes[-1], state.parts[d]
            gathered = state.with_dim(d, axes[:-1], parts)
            found.append((Move("all_gather", (axis,), d, None, "sum", parts), gathered))
            if parts == 1:  # several at once
                for many in range(2, len(axes) + 1):
                    found.append((Move("all_gather", axes[-many:], d), state.with_dim(d, axes[:-many], 1)))
            e = self.wanted.get(axis)
            if e is not None and e != d and self._may_append(state, e, axis):
                to_parts = self.parts[e]
                after = gathered.with_dim(e, (*gathered.dims[e], axis), to_parts)
                found.append((Move("all_to_all", (axis,), d, e, "sum", parts, to_parts), after))
        busy = {axis for axes in state.dims for axis in axes}
        busy.update([axis for axis, _ in state.partial])
        for axis, d in self.wanted.items():
            if axis not in busy and self._may_append(state, d, axis):
                parts = self.parts[d]
                after = state.with_dim(d, (*state.dims[d], axis), parts)
                found.append((Move("slice", (axis,), d, None, "sum", parts), after))
        return found

    def _reductions(self, state: State) -> list[tuple[Move, State]]:
        found = []
        for axis, reduction in state.partial:
            if reduction == ROWS:
                continue
            rest = tuple([p for p in state.partial if p[0] != axis])
            found.append((Move("all_reduce", (axis,), reduction=reduction), State(state.dims, state.parts, rest)))
            d = self.wanted.get(axis)
            if d is not None and reduction == "sum" and self._may_append(state, d, axis):
                parts = self.parts[d]
                after = state.with_dim(d, (*state.dims[d], axis), parts, rest)
                found.append((Move("reduce_scatter", (axis,), d, parts=parts), after))
        if len(state.partial) > 1:
            for reduction in ("sum", "max"):
                axes = tuple([a for a, r in state.partial if r == reduction])
                if len(axes) > 1:
                    rest = tuple([p for p in state.partial if p[0] not in axes])
                    found.append((Move("all_reduce", axes, reduction=reduction), State(state.dims, state.parts, rest)))
            found += self._scatters(state)
        return found

    def _scatters(self, state: State) -> Iterator[tuple[Move, State]]:
        """Iterate over reduce-scatters over several axes that cut a dim in the order of the mesh. In the other order,
        the closest axis first, one after the other leaves the far links the fewest bytes: layouts say which it is."""
        sums = [axis for axis, reduction in state.partial if reduction == "sum"]  # in the order of the mesh
        for d, (axes, wanted) in enumerate(zip(state.dims, self.dims)):
            if self.parts[d] > 1 or state.parts[d] > 1 or wanted[: len(axes)] != axes:
                continue
            for many in range(2, len(wanted) - len(axes) + 1):
                added = wanted[len(axes) : len(axes) + many]
                if [*added] == [axis for axis in sums if axis in added]:
                    rest = tuple([p for p in state.partial if p[0] not in added])
                    yield Move("reduce_scatter", added, d), state.with_dim(d, wanted[: len(axes) + many], 1, rest)

    def _is_aligned(self, state: State, d: int) -> bool:
        """Return whether dim d already starts as the target wants it: its axes need not move."""
        axes = state.dims[d]
        return axes == self.dims[d][: len(axes)] and state.parts[d] == self.parts[d]

    def _may_append(self, state: State, d: int, axis: str) -> bool:
        """Return whether adding `axis` as innermost axis of dim d leads towards the target."""
        axes = state.dims[d]
        if axes and state.parts[d] != self.parts[d]:
            return False
        return self.dims[d][: len(axes) + 1] == (*axes, axis)
