"""Find what keeps a rank waiting from what the others answer about where they are.

A rank that is gone or stands still keeps others waiting. Where nobody does and all wait, they do not wait for the same:
one of them called what the others did not. One that cannot be asked is not said to have died.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass

from .peers import CUT_OFF, GONE, SILENT, UNKNOWN


@dataclass(frozen=True)
class Progress:
    """The position of a rank: in the call number `call` of a graph (or of an agreement of all ranks) and at `position`
    in it, 2k after k collectives, 2k + 1 in the next one. All ranks run through the same collectives in the same
    order. `doing`: what the call is, in the same words on all ranks that make it; `what`: the place in it."""

    call: int
    position: int
    step: int
    what: str
    doing: str = ""


@dataclass(frozen=True)
class Cause:
    """The first thing that went wrong. `kind`: "gone", "failed" (`what` says how), "late", "behind" (they wait too, for
    others perhaps), "apart" (they wait elsewhere), "unlike" (see unlike.py) or "unknown"."""

    kind: str
    ranks: list[int]
    what: str


def found(
    answers: Mapping[int, dict | str], me: int, here: Progress, machines: Sequence[int], waited: bool
) -> Cause | None:
    """Return why `me` waits, if the answers say it. `machines`: by rank, the number of its machine; `waited`: long
    enough that those who are behind are late."""
    if (cause := found_by_another(answers)) is not None:
        return cause
    if gone := [rank for rank, answer in answers.items() if answer == GONE]:
        return Cause("gone", gone, f"{named(gone)} died: no process answers any more")
    if not waited:
        return None
    places = {rank: a for rank, a in answers.items() if isinstance(a, dict)}
    behind = {rank: a for rank, a in places.items() if (a["call"], a["position"]) < (here.call, here.position)}
    late = {rank: f"is at {a['what']}, step {a['step']}" for rank, a in behind.items() if not a["position"] % 2}
    late |= {rank: "does not answer: it is stopped" for rank, a in answers.items() if a == SILENT}
    cut_off = [rank for rank, answer in answers.items() if answer == CUT_OFF]
    if late or cut_off:
        texts = [f"rank {rank} {text}" for rank, text in sorted(late.items())]
        if cut_off:
            texts.append(f"{_on_machines(cut_off, machines)} cannot be reached: cut off, or its machine is down")
        return Cause("late", sorted([*late, *cut_off]), "; ".join(texts))
    if apart := _apart({me: asdict(here)} | places):
        return apart
    if behind:
        return Cause("behind", sorted(behind), "; ".join(f"rank {r} is at {a['what']}" for r, a in behind.items()))
    return None


def found_by_another(answers: Mapping[int, dict | str]) -> Cause | None:
    """Return the cause that another rank has found."""
    return next((Cause(**a["cause"]) for a in answers.values() if isinstance(a, dict) and a.get("cause")), None)


def unknown(answers: Mapping[int, dict | str]) -> Cause:
    """Return what is said when no answer tells why a collective failed."""
    silent = sorted(rank for rank, answer in answers.items() if answer == UNKNOWN)
    if silent:
        return Cause("unknown", [], f"a collective failed, and {named(silent)} cannot be asked why")
    return Cause("unknown", [], "a collective failed though every rank that was asked answers")


def _apart(places: Mapping[int, Mapping]) -> Cause | None:
    """Return who waits at something else than most do; all, if no side has the most."""
    sides: dict[tuple, list[int]] = defaultdict(list)
    for rank, a in sorted(places.items()):
        if a["position"] % 2:
            sides[a["doing"], a["step"]].append(rank)
    if len(sides) < 2:
        return None
    largest = max(len(ranks) for ranks in sides.values())
    others = [ranks for ranks in sides.values() if len(ranks) < largest]
    if sum(len(ranks) == largest for ranks in sides.values()) > 1:
        others = list(sides.values())
    where = "; ".join(
        f"{named(ranks)} {'waits' if len(ranks) == 1 else 'wait'} at {_place(places[ranks[0]])}, step {step}"
        for (_, step), ranks in sorted(sides.items(), key=lambda side: len(side[1]))
    )
    return Cause("apart", sorted(rank for ranks in others for rank in ranks), where)


def _place(answer: Mapping) -> str:
    return answer["what"] if answer["what"] == answer["doing"] else f"{answer['what']}, in {answer['doing']}"


def _on_machines(ranks: Collection[int], machines: Sequence[int]) -> str:
    """Return the ranks, by their machines where these are all of a machine's."""
    texts, rest = [], sorted(ranks)
    for machine in sorted({machines[rank] for rank in ranks}):
        members = [rank for rank, number in enumerate(machines) if number == machine]
        if {*members} <= {*ranks}:
            texts.append(f"machine {machine} ({named(members)})")
            rest = [rank for rank in rest if rank not in members]
    return " and ".join([*texts, *([named(rest)] if rest else [])])


def named(ranks: Collection[int]) -> str:
    """Return "rank 1" or "ranks 1, 2"."""
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {', '.join(map(str, ranks))}"
