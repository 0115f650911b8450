"""The schedules by name: `make("1f1b", ranks=4, micro_batches=8)`.

| name                    | stages a rank | what it is                                                              |
|-------------------------|---------------|-------------------------------------------------------------------------|
| naive                   | 1             | one rank at a time                                                      |
| gpipe                   | 1             | all forwards, then all backwards                                        |
| 1f1b                    | 1             | PipeDream-flush: the same idle time, p micro-batches in flight, not m   |
| interleaved_1f1b        | 2 or more     | Megatron: 1/v of the idle time, a little more memory, v times the sends |
| zb_h1                   | 1             | backward in two parts: 1/3 of the idle time, 1F1B's memory              |
| zb_h2                   | 1             | no idle time in a rank's window, twice the memory                       |
| interleaved_zero_bubble | 2 or more     | both                                                                    |
| zbv                     | 2, as a V     | no idle time in a rank's window, 1F1B's memory                          |
| dualpipev               | 2, as a V     | pairs of forward and backward to overlap                                |
| v_half, v_min           | 2, as a V     | a half, a third of 1F1B's memory                                        |
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import StrategyError, nearest
from . import building_block as blocks
from . import phases
from .actions import Action, Schedule
from .play import play
from .weights import fill_weights

Orders = list[list[Action]]
Phases = Callable[[int, int, int, int], list[phases.Phase]]


@dataclass(frozen=True)
class Kind:
    """How a named schedule is made."""

    orders: Callable[
        [list[tuple[int, ...]], int], Orders
    ]  # from the stages of each rank and the number of micro-batches
    chunks: int | None = 1  # stages a rank; None: any number
    v_shaped: bool = False
    in_flight: Callable[[int, int, int], int] | None = None  # at most, of (p, v, m), while W's are put in; None: no W


def _phased(make_phases: Phases) -> Callable[..., Orders]:
    """Return a function that makes orders from phases(rank, ranks, micro_batches, stages a rank)."""

    def orders(stages: list[tuple[int, ...]], m: int) -> Orders:
        return [
            phases.actions_of(make_phases(rank, len(stages), m, len(own)), own, m) for rank, own in enumerate(stages)
        ]

    return orders


def _repeated(block: Callable[[int], list[blocks.Times]]) -> Callable[..., Orders]:
    return lambda stages, m: blocks.repeat(block(len(stages)), m)


KINDS = {
    "naive": Kind(_phased(lambda r, p, m, v: phases.one_stage(0, m, "B"))),
    "gpipe": Kind(_phased(lambda r, p, m, v: phases.gpipe(m))),
    "1f1b": Kind(_phased(lambda r, p, m, v: phases.one_stage(p - 1 - r, m, "B"))),
    "interleaved_1f1b": Kind(_phased(lambda r, p, m, v: phases.interleaved(r, p, m, v, "B")), chunks=None),
    "zb_h1": Kind(_phased(lambda r, p, m, v: phases.one_stage(p - 1 - r, m, "I")), in_flight=lambda p, v, m: p),
    "zb_h2": Kind(_phased(lambda r, p, m, v: phases.one_stage(2 * (p - 1 - r), m, "I")), in_flight=lambda p, v,
                  m: 2 * p - 1),
    "interleaved_zero_bubble": Kind(_phased(lambda r, p, m, v: phases.interleaved(r, p, m, v, "I")), chunks=None,
                                    in_flight=lambda p, v, m: (v - 1) * max(p, phases.round_size(p, m)) + p),
    "zbv": Kind(_phased(lambda r, p, m, v: phases.zbv(r, p, m)), 2, True, lambda p, v, m: 2 * p),
    "dualpipev": Kind(_phased(lambda r, p, m, v: phases.dualpipev(r, p, m)), 2, True),
    "v_half": Kind(_repeated(blocks.v_half), 2, True, lambda p, v, m: 2 * (p // 2 + 1)),
    "v_min": Kind(_repeated(blocks.v_min), 2, True, lambda p, v, m: 2 * -(-(p + 2) // 3)),
}  # fmt: skip
ALIASES = {"pipedream_flush": "1f1b", "interleaved1f1b": "interleaved_1f1b",
           "interleavedzerobubble": "interleaved_zero_bubble", "zbvzerobubble": "zbv", "zbh1": "zb_h1", "zbh2": "zb_h2",
           "vhalf": "v_half", "vmin": "v_min"}  # fmt: skip


def canonical(name: str) -> str:
    """Return the name in `KINDS`: no matter the case, `-` for `_`, or torch's spelling. Raise StrategyError for a name
    not known."""
    word = str(name).lower().replace("-", "_")
    word = ALIASES.get(word, word)
    if word not in KINDS:
        raise StrategyError(f"there is no pipeline schedule {name!r}", fix=nearest(word, [*KINDS, *ALIASES]))
    return word


def make(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None,
         seconds: tuple[float, float, float] | None = None) -> Schedule:  # fmt: skip
    """Make the schedule of this name. `stages_per_rank`: 2 for the interleaved ones unless given; the others have no
    choice.

    Any number of micro-batches from 1 on gives a schedule that is right; with few of them the idle time is longer.
    `seconds`: of F, I and W of a stage, where they are known to differ; the zero-bubble schedules are then filled for
    these as well, and the shorter order is taken.
    """
    name = canonical(name)
    kind = KINDS[name]
    for what, value in (("ranks", ranks), ("micro-batches", micro_batches), ("stages a rank", stages_per_rank)):
        if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
            raise StrategyError(
                f"schedule {name} cannot have {value!r} {what}", fix=f"give a whole number of {what} from 1 on"
            )
    v = stages_per_rank or kind.chunks or 2
    if kind.chunks is not None and v != kind.chunks:
        others = [other for other, k in KINDS.items() if k.chunks in (v, None) and v > 1 or k.chunks == v]
        raise StrategyError(f"schedule {name} has {kind.chunks} stage{'s' * (kind.chunks > 1)} a rank, not {v}",
                            fix=f"with {v}: {', '.join(others)}")  # fmt: skip
    rank_of_stage = tuple(min(s, 2 * ranks - 1 - s) if kind.v_shaped else s % ranks for s in range(ranks * v))
    stages = [tuple(s for s, r in enumerate(rank_of_stage) if r == rank) for rank in range(ranks)]
    orders = kind.orders(stages, micro_batches)
    if kind.in_flight is None:
        return Schedule(name, ranks, micro_batches, rank_of_stage, tuple(map(tuple, orders)))
    limit, units = kind.in_flight(ranks, v, micro_batches), (1.0, 1.0, 1.0)
    known = seconds or units
    filled = [Schedule(name, ranks, micro_batches, rank_of_stage,
                       tuple(map(tuple, fill_weights(orders, ranks * v, limit, costs))))
              for costs in dict.fromkeys((units, known))]  # fmt: skip
    return filled[0] if len(filled) == 1 else min(filled, key=lambda schedule: play(schedule, *known).seconds)
