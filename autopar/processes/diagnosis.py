"""Say who did what, from what ranks left of a failure: records, and last words in logs."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from .causes import named
from .last_words import Frame, LastWords
from .records import Record

ELSEWHERE = re.compile(r"/(site-packages|dist-packages|autopar|passes)/|/lib/python3|^<")  # no line of the user's
NO_RANK = "a process of which nothing says the rank"


def of_all(records: Sequence[Record], words: Sequence[LastWords]) -> list[list[str]]:
    """Return what records and last words say, a list of sentences a run. Last words that name no run are those of the
    one rank that left nothing else, if there is one run and one such rank."""
    by_run = runs(records)
    named_runs = {of_run[0].run for of_run in by_run}
    if len(by_run) == 1:
        words = _by_elimination(by_run[0], words)
    said = [sentences(of_run, [w for w in words if w.run == of_run[0].run]) for of_run in by_run]
    for run, world in dict.fromkeys((w.run, w.world) for w in words if w.run not in named_runs):
        mine = [w for w in words if (w.run, w.world) == (run, world)]
        said.append([f"run {run}, {world} ranks: no records" if run else "no records", *_aborted(mine)])
    return said


def sentences(records: Sequence[Record], words: Sequence[LastWords] = ()) -> list[str]:
    """Return what the records of one run, and the last words in its logs, say together, the first cause first."""
    known = {record.rank: record for record in sorted(records, key=lambda record: record.rank)}
    here, world = [*known.values()], records[0].world
    missing = sorted({*range(world)} - {*known})
    said = [
        f"run {here[0].run}, {world} ranks, {min(r.when for r in here)}: records of {named([*known])}"
        + (f", none of {named(missing)}" if missing else "")
    ]
    said += [f"{what} ({named(ranks)} {_verb(ranks, 'say')} so)" for what, ranks in _by(here, lambda r: r.cause.what)]
    blamed = {rank for record in here for rank in record.cause.ranks}
    said += _aborted(words)
    if unheard := sorted(blamed & {*missing} - {w.rank for w in words}):
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


def _by_elimination(records: Sequence[Record], words: Sequence[LastWords]) -> list[LastWords]:
    """Return the last words, those without a rank as of the one that left nothing else."""
    heard = {record.rank for record in records} | {w.rank for w in words}
    missing, unsigned = [r for r in range(records[0].world) if r not in heard], [w for w in words if w.rank is None]
    if len(missing) != 1 or len(unsigned) != 1:
        return [*words]
    mine = replace(unsigned[0], rank=missing[0], world=records[0].world, run=records[0].run)
    return [mine if w is unsigned[0] else w for w in words]


def _aborted(words: Iterable[LastWords]) -> list[str]:
    """Return what last words say of processes, and of their threads."""
    said = []
    for w in sorted(words, key=lambda w: -1 if w.rank is None else w.rank):
        who = NO_RANK if w.rank is None else f"rank {w.rank}"
        said.append(
            f"{who} was ended by a fault in a library: {w.error}" + (f", after {w.reason!r}" if w.reason else "")
        )
        threads = [frames for frames in w.others if frames]
        if w.current:
            said.append(f"the thread of {who} that failed was at {_where(w.current)}")
        elif threads:  # faulthandler prints the first thread last
            said.append(f"the thread of {who} that failed runs no Python; its program was at {_where(threads.pop())}")
        for where, count in Counter(map(_where, threads)).items():
            said.append(f"{'another thread' if count == 1 else f'{count} other threads'} of {who} at {where}")
    return said


def _where(frames: Sequence[Frame]) -> str:
    """Return the innermost place of a stack, and the line of the user's program that led to it."""
    inner, *outer = [f"{place} in {name}" for place, name in frames]
    users = next((f"{place} in {name}" for place, name in frames if not ELSEWHERE.search(place)), inner)
    return inner if users == inner or not outer else f"{inner}, called from {users}"


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
