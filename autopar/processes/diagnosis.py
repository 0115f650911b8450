"""Say who did what, from the records that ranks left of a failure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import partial

from .causes import named
from .records import Record


def sentences(records: Sequence[Record]) -> list[str]:
    """Return what the records of one run say together, the first cause first."""
    known = {record.rank: record for record in sorted(records, key=lambda record: record.rank)}
    here, world = [*known.values()], records[0].world
    missing = sorted({*range(world)} - {*known})
    said = [
        f"run {here[0].run}, {world} ranks, {min(r.when for r in here)}: records of {named([*known])}"
        + (f", none of {named(missing)}" if missing else "")
    ]
    said += [f"{what} ({named(ranks)} {_verb(ranks, 'say')} so)" for what, ranks in _by(here, lambda r: r.cause.what)]
    blamed = {rank for record in here for rank in record.cause.ranks}
    if unheard := sorted(blamed & {*missing}):
        said.append(f"{named(unheard)} left no record: killed, stopped, out of reach, or the file was not given")
    for (what, step, waits), ranks in _by(here, lambda r: (_place(r), r.place.step, r.place.position % 2)):
        verb = _verb(ranks, "wait") if waits else ("is" if len(ranks) == 1 else "are")
        said.append(f"{named(ranks)} {verb} at {what}, step {step}")
    said += [f"rank {r.rank}'s program is at {r.stack[-1]}" for r in here if r.rank in blamed and r.stack]
    said += _calls(here)
    said += _unlike(here, "plan", lambda r: ", ".join(plan[:12] for plan in sorted(r.plans)) or "none")
    said += _unlike(here, "torch", lambda r: r.torch)
    return said


def runs(records: Iterable[Record]) -> list[list[Record]]:
    """Return the records by run, the oldest run first."""
    found: dict[str, list[Record]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.when):
        found[record.run].append(record)
    return [*found.values()]


def _calls(records: Sequence[Record]) -> list[str]:
    """Return the first call that is another one on some ranks, or that some have not made. Stages of a pipeline make
    calls of their own."""
    if any(stages > 1 for record in records for stages in record.plans.values()):
        return []
    made = {r.rank: {number: f"{what} of step {step}" for number, step, what in r.calls} for r in records}
    first = max((min(calls) for calls in made.values() if calls), default=0)
    for number in sorted({number for calls in made.values() for number in calls if number >= first}):
        texts = [f"{what} on {named(ranks)}" for what, ranks in _by(records, partial(_call, made, number))]
        if len(texts) > 1:
            return [f"call {number} is {', '.join(texts)}" + ("; those before are alike" if number > first else "")]
    return []


def _call(made: dict[int, dict[int, str]], number: int, record: Record) -> str:
    return made[record.rank].get(number, "not made")


def _unlike(records: Sequence[Record], what: str, of: Callable[[Record], str]) -> list[str]:
    """Return what ranks should have alike and do not."""
    sides = _by(records, of)
    return [f"{what} {'; '.join(f'{name} on {named(ranks)}' for name, ranks in sides)}"] if len(sides) > 1 else []


def _place(record: Record) -> str:
    what, doing = record.place.what, record.place.doing
    return f"{what}, in {doing}" if doing and doing != what else what


def _by(records: Iterable[Record], key: Callable[[Record], Hashable]) -> list[tuple]:
    """Return the ranks by what they have, those with most ranks first."""
    found: dict[Hashable, list[int]] = defaultdict(list)
    for record in records:
        found[key(record)].append(record.rank)
    return sorted(found.items(), key=lambda side: (-len(side[1]), side[1]))


def _verb(ranks: Sequence[int], verb: str) -> str:
    return f"{verb}s" if len(ranks) == 1 else verb
