"""Record when each action of a schedule began and ended, predicted (`play.play`) or measured, and what follows: idle
time and memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from .actions import Action, Schedule

Times = tuple[tuple[float, ...], ...]  # by rank, then in the order of the rank's actions


@dataclass(frozen=True)
class Played:
    """`starts` and `ends` are in seconds, from any zero. `activation`: what one micro-batch keeps in each stage, in any
    unit.

    Two bubbles, both idle time over total time as a mean over ranks:

    `bubble`            of the whole makespan, from the first action of any rank to the last one of any.
    `bubble_in_window`  of each rank's own window, from its first action to its last, the longest window being the
                        total. Where the optimizer step needs no barrier of all ranks, a rank that ended early begins
                        the next step early, and the windows of successive steps close up: the cost of arXiv
                        2401.10241, sections 4 and 5.
    """

    schedule: Schedule
    starts: Times
    ends: Times
    activation: tuple[float, ...] = ()

    def __iter__(self) -> Iterator[tuple[int, Action, float, float]]:
        """Iterate over (rank, action, start, end), in the order of each rank."""
        for rank, order in enumerate(self.schedule.orders):
            for action, start, end in zip(order, self.starts[rank], self.ends[rank], strict=True):
                yield rank, action, start, end

    @property
    def first(self) -> float:
        """Return when the first action of any rank starts."""
        return min((times[0] for times in self.starts if times), default=0.0)

    @cached_property
    def seconds(self) -> float:
        """Return the makespan, from the first action of any rank to the last one of any."""
        return max((times[-1] for times in self.ends if times), default=0.0) - self.first

    @cached_property
    def busy(self) -> tuple[float, ...]:
        """Return the seconds that each rank computes; both of a pair have the same ones."""
        found = []
        for starts, ends in zip(self.starts, self.ends):
            before = (starts[0], *ends) if starts else ()
            found.append(sum(end - max(start, last) for start, end, last in zip(starts, ends, before)))
        return tuple(found)

    @cached_property
    def windows(self) -> tuple[float, ...]:
        """Return the seconds from each rank's first action to its last."""
        return tuple(ends[-1] - starts[0] if ends else 0.0 for starts, ends in zip(self.starts, self.ends))

    @property
    def utilization(self) -> float:
        """Return the share of the makespan in which the mean rank computes."""
        return self._busy_share(self.seconds)

    @property
    def bubble(self) -> float:
        """Return the share of the makespan in which the mean rank waits."""
        return 1.0 - self.utilization

    @property
    def bubble_in_window(self) -> float:
        """Return the same share of the longest time from a first action to a last."""
        return 1.0 - self._busy_share(max(self.windows))

    def _busy_share(self, total: float) -> float:
        return sum(self.busy) / (self.schedule.ranks * total) if total else 1.0

    def peak(self, rank: int, until_input: bool = False) -> float:
        """Return the most that a rank holds at once: a micro-batch from the start of its F to the end of its B.

        Where the backward is split, it is held to the end of its W, which still reads the inputs of the matrix
        products. With `until_input` it is held to the end of its I: what remains after it is then not counted.
        """
        return self._peak(self.schedule.orders[rank], until_input)

    def peak_of_stage(self, stage: int, until_input: bool = False) -> float:
        """Return the same for one stage alone."""
        order = self.schedule.orders[self.schedule.rank_of_stage[stage]]
        return self._peak([action for action in order if action.stage == stage], until_input)

    def _peak(self, order: Sequence[Action], until_input: bool) -> float:
        last, held, most = (
            "BI" if until_input else "BW",
            0.0,
            0.0,
        )  # a rank's actions follow each other: their order says all
        for kind, stage, _ in order:
            size = self.activation[stage] if self.activation else 1.0
            held += size if kind == "F" else -size if kind in last else 0.0
            most = max(most, held)
        return most

    @property
    def peaks(self) -> tuple[float, ...]:
        """Return the most that each rank holds of micro-batches in flight."""
        return tuple(self.peak(rank) for rank in range(self.schedule.ranks))
