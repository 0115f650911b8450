"""The schedules by name: `make("1f1b", ranks=4, micro_batches=8)`. `register_schedule` is the one door for them,
autopar's own and a user's.

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

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from ..errors import ScheduleError, StrategyError, check_new, like, said
from . import building_block as blocks
from . import phases
from .actions import Action, Schedule
from .play import check, play
from .row_chunks import in_chunks
from .weights import fill_weights

Orders = Sequence[Sequence[Action | str] | str]
Phases = Callable[[int, int, int, int], list[phases.Phase]]


@dataclass(frozen=True)
class Kind:
    """A recipe for a named schedule: see `register_schedule`."""

    orders: Callable[[list[tuple[int, ...]], int], Orders]
    chunks: int | None  # stages a rank; None: any number
    v_shaped: bool = False
    in_flight: Callable[[int, int, int], int] | None = None
    searched: bool = False
    given: Schedule | None = None  # all that there is of it


KINDS: dict[str, Kind] = {}
ALIASES = {"pipedream_flush": "1f1b", "interleaved1f1b": "interleaved_1f1b",
           "interleavedzerobubble": "interleaved_zero_bubble", "zbvzerobubble": "zbv", "zbh1": "zb_h1", "zbh2": "zb_h2",
           "vhalf": "v_half", "vmin": "v_min"}  # fmt: skip


def register_schedule(
    name: str,
    orders: Schedule | Callable[[list[tuple[int, ...]], int], Orders],
    *,
    stages_per_rank: int | None = 1,
    v_shaped: bool = False,
    in_flight: Callable[[int, int, int], int] | None = None,
    searched: bool = False,
    replace: bool = False,
) -> None:
    """Let `schedule=name` run the stages of a pipeline in these orders, from the next plan on.

    orders: a function from the stages of each rank and the number of micro-batches to the actions of each rank, as
        `Action`s or as text, "0F0 0F1 0B0 0B1"; or a Schedule, for its own ranks and micro-batches alone.
    stages_per_rank: a number, or None if any from 2 on will do; `v_shaped` lays two on each rank as a V (rank r has the
        stages r and 2p - 1 - r), else stage i is on rank i mod p.
    in_flight: orders have F and I, autopar puts the W's in, while a rank holds so many micro-batches of
        (p, stages a rank, m) at most. None: the orders have all actions.
    searched: whether schedule="auto" tries it, if it is a function.

    Raises StrategyError for a name that is taken, unless it is to `replace` that schedule, and ScheduleError for a
    Schedule that cannot run; what a function makes is checked when it is planned with."""
    word = _word(name)
    check_new(StrategyError, "pipeline schedule", word, {*KINDS, *ALIASES, "auto"}, replace and word in KINDS)
    if isinstance(orders, Schedule):
        KINDS[word] = _kind_of(orders)
    else:
        limit = None if in_flight is None else _limit(word, in_flight)
        KINDS[word] = Kind(orders, stages_per_rank, v_shaped, limit, searched)


def _limit(name: str, in_flight: Callable[[int, int, int], int]) -> Callable[[int, int, int], int]:
    """Return `in_flight`, with ScheduleError where it fails or gives no whole number."""

    def limit(p: int, v: int, m: int) -> int:
        try:
            if (found := operator.index(in_flight(p, v, m))) < 1:
                raise ValueError(f"{found} are too few")
            return found
        except Exception as error:
            raise ScheduleError(
                f"schedule {name} has no limit of micro-batches in flight for (p, v, m) = {(p, v, m)}: {said(error)}",
                fix="let its function in_flight return a whole number from 1 on",
            ) from error

    return limit


def _kind_of(schedule: Schedule) -> Kind:
    """Return how the one schedule is made. Raise ScheduleError if it cannot run, or its stages lie otherwise than a
    pipeline's."""
    check(schedule)
    p, v = schedule.ranks, schedule.stages_per_rank
    v_shaped = p > 1 and schedule.rank_of_stage == placed(p, v, True)
    if schedule.rank_of_stage != placed(p, v, v_shaped):
        raise ScheduleError(
            f"schedule {schedule.name} has its stages on ranks {schedule.rank_of_stage}",
            fix=f"lay them as {placed(p, v, False)}, or two a rank as {placed(p, 2, True)}",
        )
    return Kind(lambda stages, m: schedule.orders, v, v_shaped, given=schedule)


def placed(ranks: int, stages_per_rank: int, v_shaped: bool) -> tuple[int, ...]:
    """Return the rank of each stage: stage i on rank i mod p, or as a V."""
    stages = range(ranks * stages_per_rank)
    return tuple(min(s, 2 * ranks - 1 - s) if v_shaped else s % ranks for s in stages)


def _word(name: object) -> str:
    return str(name).lower().replace("-", "_")


def _phased(make_phases: Phases) -> Callable[..., Orders]:
    """Return a function that makes orders from phases(rank, ranks, micro_batches, stages a rank)."""

    def orders(stages: list[tuple[int, ...]], m: int) -> Orders:
        return [
            phases.actions_of(make_phases(rank, len(stages), m, len(own)), own, m) for rank, own in enumerate(stages)
        ]

    return orders


def _repeated(block: Callable[[int], list[blocks.Times]]) -> Callable[..., Orders]:
    return lambda stages, m: blocks.repeat(block(len(stages)), m)


def _one(warmup: Callable[[int, int], int], backward: str) -> Callable[..., Orders]:
    """Return orders of one stage a rank: `warmup` forwards of (rank, ranks) come before the first backward."""
    return _phased(lambda r, p, m, v: phases.one_stage(warmup(r, p), m, backward))


def _interleaved(backward: str) -> Callable[..., Orders]:
    return _phased(lambda r, p, m, v: phases.interleaved(r, p, m, v, backward))


V: dict[str, Any] = dict(stages_per_rank=2, v_shaped=True)
register_schedule("naive", _one(lambda r, p: 0, "B"))
register_schedule("gpipe", _phased(lambda r, p, m, v: phases.gpipe(m)))
register_schedule("1f1b", _one(lambda r, p: p - 1 - r, "B"), searched=True)
register_schedule("interleaved_1f1b", _interleaved("B"), stages_per_rank=None, searched=True)
register_schedule("zb_h1", _one(lambda r, p: p - 1 - r, "I"), in_flight=lambda p, v, m: p, searched=True)
register_schedule("zb_h2", _one(lambda r, p: 2 * (p - 1 - r), "I"), in_flight=lambda p, v, m: 2 * p - 1)
register_schedule(
    "interleaved_zero_bubble",
    _interleaved("I"),
    stages_per_rank=None,
    searched=True,
    in_flight=lambda p, v, m: (v - 1) * max(p, phases.round_size(p, m)) + p,
)
register_schedule(
    "zbv", _phased(lambda r, p, m, v: phases.zbv(r, p, m)), in_flight=lambda p, v, m: 2 * p, searched=True, **V
)
register_schedule("dualpipev", _phased(lambda r, p, m, v: phases.dualpipev(r, p, m)), **V)
register_schedule("v_half", _repeated(blocks.v_half), in_flight=lambda p, v, m: 2 * (p // 2 + 1), **V)
register_schedule("v_min", _repeated(blocks.v_min), in_flight=lambda p, v, m: 2 * -(-(p + 2) // 3), **V)


def canonical(name: str | Schedule) -> str:
    """Return the name in `KINDS`: no matter the case, `-` for `_`, or torch's spelling. A Schedule is registered by its
    own. Raise StrategyError for a name not known, and what `register_schedule` raises."""
    word = _word(name.name if isinstance(name, Schedule) else name)
    if isinstance(name, Schedule) and (word not in KINDS or KINDS[word].given != name):
        register_schedule(word, name)
    word = ALIASES.get(word, word)
    if word not in KINDS:
        close, every = ", ".join(like(word, {*KINDS, *ALIASES})), ", ".join(KINDS)
        fix = f"use {close}; there are {every}" if close else f"use one of {every}"
        raise StrategyError(f"there is no pipeline schedule {name!r}", fix=fix)
    return word


def checked(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None) -> tuple[str, Kind, int]:
    """Return the name in `KINDS`, how the schedule is made, and its stages a rank. Raise StrategyError for one that
    there is not, or not with such numbers."""
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
        raise StrategyError(
            f"schedule {name} has {kind.chunks} stage{'s' * (kind.chunks > 1)} a rank, not {v}",
            fix=f"with {v}: {', '.join(others)}",
        )
    own = (kind.given.ranks, kind.given.micro_batches) if kind.given else (ranks, micro_batches)
    if own != (ranks, micro_batches):
        raise StrategyError(
            f"schedule {name} is for {own[0]} ranks and {own[1]} micro-batches, not {ranks} and {micro_batches}",
            fix="register a function, which makes it for any",
        )
    return name, kind, v


def make(
    name: str,
    ranks: int,
    micro_batches: int,
    stages_per_rank: int | None = None,
    seconds: tuple[float, float, float] | None = None,
    row_chunks: int = 1,
) -> Schedule:
    """Make the schedule of this name. `stages_per_rank`: 2 for the interleaved ones unless given; the others have no
    choice. `row_chunks`: how many micro-batches that follow one another are chunks of one row's tokens, for schedules
    of one stage a rank (row_chunks.py).

    Any number of micro-batches from 1 on gives a schedule that is right; with few of them the idle time is longer.
    `seconds`: of F, I and W of a stage, where they are known to differ; the zero-bubble schedules are then filled for
    these as well, and the shorter order is taken.
    """
    name, kind, v = checked(name, ranks, micro_batches, stages_per_rank)
    try:
        return _made(name, kind, ranks, micro_batches, v, seconds, row_chunks)
    except Exception as error:  # its function is a user's
        raise ScheduleError(
            f"schedule {name} cannot be made for {ranks} ranks and {micro_batches} micro-batches: {said(error)}",
            fix=getattr(error, "fix", None)
            or 'let its function return the actions of each rank, such as ["0F0 0B0", "1F0 1B0"]',
        ) from error


def _made(
    name: str,
    kind: Kind,
    ranks: int,
    micro_batches: int,
    v: int,
    seconds: tuple[float, float, float] | None,
    row_chunks: int,
) -> Schedule:
    rank_of_stage = placed(ranks, v, kind.v_shaped)
    stages = [tuple(s for s, r in enumerate(rank_of_stage) if r == rank) for rank in range(ranks)]
    orders = [list(map(_action, _split(order))) for order in kind.orders(stages, micro_batches)]
    if row_chunks > 1:
        orders = in_chunks(orders, row_chunks)
    if kind.in_flight is None:
        return Schedule(name, ranks, micro_batches, rank_of_stage, tuple(map(tuple, orders)))
    limit, units = kind.in_flight(ranks, v, micro_batches) + row_chunks - 1, (1.0, 1.0, 1.0)
    known = seconds or units
    filled = [
        Schedule(
            name, ranks, micro_batches, rank_of_stage, tuple(map(tuple, fill_weights(orders, ranks * v, limit, costs)))
        )
        for costs in dict.fromkeys((units, known))
    ]
    return filled[0] if len(filled) == 1 else min(filled, key=lambda schedule: play(schedule, *known).seconds)


def _split(order: Sequence[Action | str] | str) -> Sequence[Action | str]:
    return order.split() if isinstance(order, str) else order


def _action(one: Action | str) -> Action:
    return one if isinstance(one, Action) else Action.parse(one)
