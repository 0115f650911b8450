"""Find the cheapest moves to one target, from every state that is asked for.

No way comes back to a state: an axis leaves its place, or comes to where it is wanted and stays. So the cheapest way
from a state is the cheapest of its moves with the cheapest way from where that leads, and all sources of one target
share most of their ways.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ..ir.mesh import Mesh
from .moves import Move, State, Towards

REFERENCE_BYTES = 16 * 2**20  # global bytes at which the order of moves is chosen, for every tensor alike
TIE = 1e-12  # share of the seconds within which two ways are as cheap: sums differ by how they are rounded

Step = tuple[Move, State, float]  # the move, the state after it, the share of the elements held before it


class Ways:
    """The cheapest ways to `target`. `price` gives (wire fraction, latency in seconds, seconds a global byte) of a
    move's kind and axes that finds a share of the elements on each device."""

    def __init__(
        self,
        mesh: Mesh,
        price: Callable[[str, tuple[str, ...], float], tuple[float, float, float]],
        target: State,
    ):
        self.mesh, self.price, self.target, self.towards = mesh, price, target, Towards(target)
        # seconds, how many moves, and the first of them
        self._found: dict[State, tuple[float, int, Step | None]] = {target: (0.0, 0, None)}

    def path(self, source: State) -> tuple[Step, ...] | None:
        """Return the steps from a source, None if nothing leads to the target."""
        order = {axis: i for i, axis in enumerate(self.mesh.names)}
        state = source._replace(partial=tuple(sorted(source.partial, key=lambda p: order[p[0]])))
        path = []
        while state != self.target:
            step = self._onward(state)[-1]
            if step is None:
                return None
            path.append(step)
            state = step[1]
        return tuple(path)

    def _onward(self, state: State) -> tuple[float, int, Step | None]:
        """Return the seconds from a state to the target, inf where nothing leads there, how many moves that takes, and
        the first of them; of ways that cost the same that with the fewest moves, then that whose first costs least."""
        found = self._found.get(state)
        if found is None:
            held, best, least, first = self._held(state), math.inf, (0, 0.0), None
            for move, after in self.towards.moves(state):
                _, latency, per_byte = self.price(move.kind, move.axes, held)
                step = latency + per_byte * REFERENCE_BYTES
                onward, moves, _ = self._onward(after)
                seconds, rank = step + onward, (moves + 1, step)
                if seconds < best * (1 - TIE) or seconds <= best * (1 + TIE) and rank < least:
                    best, least, first = seconds, rank, (move, after, held)
            found = self._found[state] = (best, least[0], first)
        return found

    def _held(self, state: State) -> float:
        return 1.0 / math.prod([self.mesh.size(axis) for axes in state.dims for axis in axes])
