"""Keep what a rank called, for each group of ranks that must call the same.

Ranks that meet in the collectives of graphs must run these graphs in the same order, or they meet in collectives of
different calls: where those look alike, in numbers that are wrong and no error. So a rank keeps, for each group that
its graphs meet in, a digest of all calls up to each of the last ones. A call adds to it and nothing is sent; ranks
compare beside the steps (comparison.py) and when a collective fails.
"""

from __future__ import annotations

import zlib
from collections import defaultdict, deque
from collections.abc import Container, Iterable, Mapping, Sequence

KEPT = 64  # calls of a group: ranks of one are never that far from each other
ALL_KEPT = 1000  # calls of a rank: those of two seconds, where a step takes ten milliseconds
STEP, IDLE_STEP = "the optimizer's step", b"the optimizer's step without gradients"
DIGESTS, ALL = {"digests": True}, {"digests": True, "calls": True}  # messages that ask a rank for them


class GroupLog:
    """The (number, digest up to it) of the last calls in which a group of ranks meets."""

    def __init__(self, ranks: tuple[int, ...]):
        self.ranks, self.last = ranks, deque([(0, 0)], maxlen=KEPT)

    def add(self, what: bytes) -> None:
        """Add a call."""
        number, digest = self.last[-1]
        self.last.append((number + 1, zlib.crc32(what, digest)))

    def take_back(self) -> None:
        """Remove the last call, which did not come to its first collective."""
        self.last.pop()


class CallLogs:
    """The logs of a rank, by mesh and group. What a rank calls on one mesh says nothing of groups that only another
    mesh has: ranks of two pipeline stages run other graphs, and share groups of the mesh of a model beside."""

    def __init__(self) -> None:
        self.groups: dict[tuple[str, tuple[int, ...]], GroupLog] = {}
        self.of_forwards: dict[str, dict[tuple[int, ...], GroupLog]] = defaultdict(dict)

    def of(self, mesh: str, groups: Iterable[tuple[int, ...]], is_forward: bool) -> list[GroupLog]:
        """Return the logs of the groups of a mesh that a graph meets in. `is_forward`: of a whole forward, not of a
        stage's."""
        found = {ranks: self.groups.setdefault((mesh, ranks), GroupLog(ranks)) for ranks in groups}
        if is_forward:
            self.of_forwards[mesh] |= found
        return [*found.values()]

    def of_backward(self, mesh: str, own: Sequence[GroupLog]) -> list[GroupLog]:
        """Return the logs that a whole backward counts in: those of its own graph, and of the mesh's forwards. Who
        skips it met in its forward, also where the backward has no collectives."""
        return [*dict.fromkeys((*own, *self.of_forwards[mesh].values()))]

    def step(self, meshes: Container[str], has_gradients: bool) -> None:
        """Add a step of an optimizer of parameters on these meshes to their logs: a rank that skips one has other
        parameters then, and one that skips a backward may have nothing to step with."""
        for (mesh, _), log in self.groups.items():
            if mesh in meshes:
                log.add(STEP.encode() if has_gradients else IDLE_STEP)

    def last_calls(self) -> dict[str, list[tuple[int, int]]]:
        """Return the last calls by group, as plain data that other ranks are sent."""
        return {f"{zlib.crc32(repr(group).encode()):x}": [*log.last] for group, log in self.groups.copy().items()}


def differ(one: Sequence[tuple[int, int]], other: Sequence[tuple[int, int]]) -> bool:
    """Return whether two ranks, by what they tell of a group, came otherwise to the last call that both made in it."""
    mine, theirs = dict(one), dict(other)
    common = mine.keys() & theirs.keys()
    return bool(common) and mine[max(common)] != theirs[max(common)]


def packed(calls: Sequence[tuple[int, int, str]]) -> dict[str, list]:
    """Return calls as (number, step, what) in plain data of few bytes: "names" of what is called, and "calls" with the
    place of a name instead of it."""
    names = [*dict.fromkeys(what for _, _, what in calls)]
    places = {name: place for place, name in enumerate(names)}
    return {"names": names, "calls": [(number, step, places[what]) for number, step, what in calls]}


def unpacked(answer: Mapping) -> dict[int, tuple[int, str]]:
    """Return the (step, what) of each call by its number, from what `packed` made."""
    return {number: (step, answer["names"][place]) for number, step, place in answer["calls"]}
