"""Find who called something else than the others, from the calls of all ranks.

That two ranks did not call the same is known from the digests of a group in which both meet (call_log.py), whatever the
collectives look like in which they wait or have met. Who of them it was is what most ranks say that called the same as
they until then. Of two ranks alone nobody can say that: both are named, and what each did.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import pairwise

from .call_log import differ, unpacked
from .causes import Cause, named

MOST_IN_A_ROW = 8  # calls skipped or added, or compared with earlier ones

Calls = Mapping[int, tuple[int, str]]  # by number: (step, what)


def disagreeing(answers: Mapping[int, Mapping | str]) -> tuple[int, int] | None:
    """Return two ranks that did not call the same, None if there are none. `answers`: by rank, with "digests" (see
    CallLogs); others say nothing."""
    groups: dict[str, dict[int, Sequence]] = defaultdict(dict)
    for rank, answer in answers.items():
        for group, log in answer.get("digests", {}).items() if not isinstance(answer, str) else ():
            groups[group][rank] = log
    for logs in groups.values():  # who has made most calls first: each then has made all that the next one has
        ranks = sorted(logs, key=lambda rank: (-logs[rank][-1][0], rank))
        for one, other in pairwise(ranks):
            if differ(logs[one], logs[other]):
                return one, other
    return None


def found(answers: Mapping[int, Mapping | str]) -> Cause | None:
    """Return the cause "unlike" if two ranks did not call the same, None else. `answers`: also with the last calls (see
    call_log.packed)."""
    if (pair := disagreeing(answers)) is None:
        return None
    known = {rank: unpacked(a) for rank, a in sorted(answers.items()) if not isinstance(a, str) and "calls" in a}
    return who(known, pair)


def who(calls: Mapping[int, Calls], pair: tuple[int, int]) -> Cause:
    """Return who called something else than most ranks, all of them if no side has the most, given two that did not
    call the same. Ranks that called otherwise than both before, as other stages of a pipeline do, say nothing."""
    one, other = (calls[rank] for rank in pair)
    common = sorted(one.keys() & other.keys())
    first = next((n for n in common if one[n][1] != other[n][1]), None)
    if first is None:
        return Cause(
            "unlike", sorted(pair), f"{named(sorted(pair))} did not call the same, more than {len(common)} calls ago"
        )
    before = [n for n in common if n < first]
    sides: dict[str, list[int]] = defaultdict(list)
    for rank, made in calls.items():
        if first in made and all(made[n][1] == one[n][1] for n in before if n in made):
            sides[made[first][1]].append(rank)
    ordered = sorted(sides.items(), key=lambda side: (len(side[1]), side[1]))
    is_decided = len(ordered[-1][1]) > len(ordered[-2][1])
    odd = [rank for _, ranks in (ordered[:-1] if is_decided else ordered) for rank in ranks]
    texts = [f"{what} of step {calls[ranks[0]][first][0]} on {named(ranks)}" for what, ranks in ordered]
    text = f"call {first} is {' and '.join(texts)}"
    if before:
        text += "; those before are alike" + _guess(calls, ordered, is_decided, first, [one[n][1] for n in before])
    return Cause("unlike", sorted(odd), text)


def _guess(
    calls: Mapping[int, Calls], sides: list[tuple[str, list[int]]], is_decided: bool, first: int, before: list[str]
) -> str:
    """Return what a side did that called otherwise than the other one from the call `first` on. If no side has the
    most, the usual one is the one that goes on as ranks did the last time."""
    usual = sides[-1][0] if is_decided else _next(before)
    if len(sides) != 2 or usual not in dict(sides):
        return ""
    odd = next(ranks for what, ranks in sides if what != usual)
    how = _how(*(max((_from(calls[rank], first) for rank in side), key=len) for side in (odd, dict(sides)[usual])))
    return f": {named(odd)} {how}{'' if is_decided else ', if all goes on as before'}"


def _next(before: list[str]) -> str:
    """Return what came the last time after the calls that were made last, "" if that is not known."""
    for length in range(min(MOST_IN_A_ROW, len(before) - 1), 0, -1):
        for end in range(len(before) - 1, length - 1, -1):
            if before[end - length : end] == before[-length:]:
                return before[end]
    return ""


def _from(calls: Calls, first: int) -> list[str]:
    return [what for number, (_, what) in sorted(calls.items()) if number >= first]


def _how(odd: list[str], usual: list[str]) -> str:
    """Return how the calls of an odd rank came to differ from the usual ones: what the later ones leave possible, with
    the fewest calls."""
    ways = range(1, MOST_IN_A_ROW + 1)
    skipped = next((n for n in ways if n <= len(usual) and _agree(odd, usual[n:])), MOST_IN_A_ROW + 1)
    added = next((n for n in ways if n <= len(odd) and _agree(odd[n:], usual)), MOST_IN_A_ROW + 1)
    said = [f"skipped {', '.join(usual[:skipped])}"] if skipped <= min(added, MOST_IN_A_ROW) else []
    said += [f"called {', '.join(odd[:added])} once more"] if added <= min(skipped, MOST_IN_A_ROW) else []
    return " or ".join(said) or f"called {odd[0]} instead of {usual[0]}"


def _agree(some: list[str], others: list[str]) -> bool:
    return all(a == b for a, b in zip(some, others))
