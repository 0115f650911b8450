"""Plays a schedule: when each action begins and ends, given the seconds of each stage, and whether the orders end at
all.

The rules. A rank does its actions in its order, one at a time, each as early as it can:

    F(stage, i)       after F(stage-1, i) and the transfer of its output
    B or I(stage, i)  after F(stage, i), and after B or I(stage+1, i) and the transfer of its gradient
    W(stage, i)       after I(stage, i)
    a pair            after what both of it need; both end when the pair does

Sends are buffered and take no time of the rank; a rank posts the receive of a message when it comes to the action that
needs it. Between two stages of one rank nothing is transferred.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence

from ..errors import ScheduleError
from .actions import KINDS, Action, Schedule
from .played import Played

Seconds = float | Sequence[float]


def needs(action: Action, stages: int) -> list[Action]:
    """Return the actions that must have ended before; "I" stands for B too, whose gradient is there at the same
    time."""
    kind, stage, i = action
    if kind == "F":
        return [Action("F", stage - 1, i)] if stage else []
    if kind == "W":
        return [Action("I", stage, i)]
    return [Action("F", stage, i), *([Action("I", stage + 1, i)] if stage + 1 < stages else [])]


def play(
    schedule: Schedule,
    forward_seconds: Seconds = 1.0,
    input_seconds: Seconds = 1.0,
    weight_seconds: Seconds = 1.0,
    transfer_seconds: Seconds = 0.0,
    activation: Seconds = 1.0,
    shares: Sequence[float] = (),
    gained_seconds: Seconds = 0.0,
) -> Played:
    """Return the times of every action. Each argument is a number or one a stage; `transfer_seconds` one for each
    border of two stages; `shares`: by micro-batch, what it takes of these seconds, all of them unless given;
    `gained_seconds`: by which a pair of one stage is shorter than its forward and its backward, of two stages the
    smaller number counts.

    Raise ScheduleError on what `check` finds.
    """
    _count(schedule)
    stages, rank_of = schedule.stages, schedule.rank_of_stage
    seconds = {kind: _per(what, stages) for kind, what in zip("FIW", (forward_seconds, input_seconds, weight_seconds))}
    seconds["B"] = [i + w for i, w in zip(seconds["I"], seconds["W"])]
    shares = shares or (1.0,) * schedule.micro_batches
    gained = _per(gained_seconds, stages)
    transfer = _per(transfer_seconds, max(0, stages - 1))
    transfer = [0.0 if rank_of[s] == rank_of[s + 1] else t for s, t in enumerate(transfer)]

    ended: dict[Action, float] = {}
    starts: list[list[float]] = [[] for _ in schedule.orders]
    ends: list[list[float]] = [[] for _ in schedule.orders]
    waiting: dict[Action, int] = {}  # the rank that waits for an action; a second one does so only in a deadlock
    ready = list(range(schedule.ranks))
    together = [deque(schedule.together(rank)) for rank in range(schedule.ranks)]
    while ready:
        rank = ready.pop()
        left, clock = together[rank], ends[rank]
        while left:
            start = clock[-1] if clock else 0.0
            for action, need in ((one, need) for one in left[0] for need in needs(one, stages)):
                if need not in ended:
                    waiting[need] = rank
                    break
                late = transfer[min(need.stage, action.stage)] if need.stage != action.stage else 0.0
                start = max(start, ended[need] + late * shares[action.micro_batch])
            else:
                both = left.popleft()
                end = start + sum(seconds[action.kind][action.stage] * shares[action.micro_batch] for action in both)
                if len(both) > 1:
                    end -= min(gained[a.stage] for a in both) * min(shares[a.micro_batch] for a in both)
                for action in both:
                    starts[rank].append(start)
                    clock.append(end)
                    done = action._replace(kind="I") if action.kind == "B" else action
                    ended[done] = end
                    if done in waiting:
                        ready.append(waiting.pop(done))
                continue
            break
    stands = {r: left[0] for r, left in enumerate(together) if left}
    if stands:
        stuck = {r: next(a for a in both if not ended.keys() >= {*needs(a, stages)}) for r, both in stands.items()}
        everything = {action for order in schedule.orders for action in order}
        needed = {r: next(need for need in needs(a, stages) if need not in ended) for r, a in stuck.items()}
        needed = {r: need if need in everything else need._replace(kind="B") for r, need in needed.items()}
        waits = "; ".join(f"rank {r} stands at {a} and waits for {needed[r]}" for r, a in list(stuck.items())[:8])
        raise ScheduleError(
            f"schedule {schedule.name} deadlocks: {waits}",
            stuck={r: str(a) for r, a in stuck.items()},
            fix="put the actions of each rank into an order that the others' orders allow",
        )
    return Played(schedule, tuple(map(tuple, starts)), tuple(map(tuple, ends)), tuple(_per(activation, stages)))


def check(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage does F and either B or I and W once a micro-batch and all ranks come to
    their end."""
    play(schedule)


def _count(schedule: Schedule) -> None:
    """Raise ScheduleError unless every stage is on a rank, and each of its micro-batches is there once, on that
    rank."""
    if len(schedule.orders) != schedule.ranks or not all(0 <= r < schedule.ranks for r in schedule.rank_of_stage):
        raise ScheduleError(
            f"schedule {schedule.name} has {len(schedule.orders)} orders and stages on ranks "
            f"{sorted(set(schedule.rank_of_stage))}, but {schedule.ranks} ranks",
            fix="give each rank one order, and each stage a rank",
        )
    found = Counter(action for order in schedule.orders for action in order)
    faults: dict[str, list[str]] = {"twice": [str(action) for action, count in found.items() if count > 1]}
    faults["of no kind"] = [str(action) for action in found if action.kind not in KINDS]
    faults["where its stage or micro-batch is not"] = [
        f"{action} on rank {rank}"
        for rank, order in enumerate(schedule.orders)
        for action in order
        if not (
            action.stage < schedule.stages
            and action.micro_batch < schedule.micro_batches
            and schedule.rank_of_stage[action.stage] == rank
        )
    ]
    for stage in range(schedule.stages):
        for i in range(schedule.micro_batches):
            kinds = "".join(kind for kind in "FBIW" if (kind, stage, i) in found)
            if kinds not in ("FB", "FIW"):
                mixed = "B" in kinds and len(kinds) > 2
                lacking = (
                    kinds
                    if mixed
                    else "".join(k for k in ("FIW" if set(kinds) & set("IW") else "FB") if k not in kinds)
                )
                faults.setdefault("both whole and in parts" if mixed else "missing", []).append(f"{stage}{lacking}{i}")
    for fault, names in faults.items():
        if names:
            more = f" and {len(names) - 8} more" if len(names) > 8 else ""
            raise ScheduleError(
                f"schedule {schedule.name} has actions {fault}: {', '.join(names[:8])}{more}",
                fix="each stage needs F and B, or F, I and W, once a micro-batch, on its own rank",
            )


def _per(value: Seconds, count: int) -> list[float]:
    """Return one number for each of `count` stages or borders. Raise ScheduleError for another number of them."""
    values = [float(value)] * count if isinstance(value, int | float) else [float(v) for v in value]
    if len(values) != count:
        raise ScheduleError(
            f"got {len(values)} numbers for {count} stages or borders", fix="give one number, or one for each"
        )
    return values
