"""Tests that a rank that called something else than the others is found from what all called."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from autopar.processes import unlike
from autopar.processes.call_log import CallLogs, packed

F, B, O, E = "the forward graph", "the backward graph", "the optimizer's step", "the forward graph without gradients"
STEP = [F, B, O]


def _answers(programs: Sequence[Sequence[str]], pairs: bool = False) -> dict[int, dict]:
    """Return what ranks tell that made these calls, all in one group, or in groups of two that form a ring."""
    found, world = {}, len(programs)
    for rank, program in enumerate(programs):
        logs, calls, step = CallLogs(), [], 0
        ring = [tuple(sorted((r, (r + 1) % world))) for r in ((rank - 1) % world, rank)]
        groups = logs.of("dp", ring if pairs else [tuple(range(world))], is_forward=True)
        for number, what in enumerate(program, 1):
            step += what in (F, E)
            calls.append((number, step, what))
            for log in groups:
                log.add(what.encode())
        found[rank] = {"digests": logs.last_calls()} | packed(calls)
    return found


@pytest.mark.parametrize(("odd", "said"), [
    ([F, O, F], "rank 2 skipped the backward graph"),
    ([F, F], "rank 2 skipped the backward graph, the optimizer's step or called the forward graph once more"),
    ([F, F, B], "rank 2 called the forward graph once more"),
    ([F, F, F], "rank 2 skipped the backward graph, the optimizer's step"),
    ([F, B, F], "rank 2 skipped the optimizer's step"),
    ([F, B, O, E], "rank 2 called the forward graph without gradients once more"),
    ([E, O, F], "rank 2 called the forward graph without gradients instead of the forward graph"),
])  # fmt: skip
def test_one_of_three_is_named_with_what_it_did(odd, said):
    usual = STEP * 2 + [F, B, O, F, F]
    cause = unlike.found(_answers([usual, usual, STEP * 2 + odd]))
    assert (cause.kind, cause.ranks) == ("unlike", [2]) and "on ranks 0, 1" in cause.what, cause
    assert "those before are alike: " in cause.what, cause


@pytest.mark.parametrize(("odd", "said"), [
    ([F, O, F], "call 8 is the backward graph of step 3 on rank 0 and the optimizer's step of step 3 on rank 1; those "
     "before are alike: rank 1 skipped the backward graph, if all goes on as before"),
    ([F, F], "call 8 is the backward graph of step 3 on rank 0 and the forward graph of step 4 on rank 1"),
    ([F, B, F], "call 9 is the optimizer's step of step 3 on rank 0 and the forward graph of step 4 on rank 1"),
    ([E], "call 7 is the forward graph of step 3 on rank 0 and the forward graph without gradients of step 3 on "
     "rank 1"),
])  # fmt: skip
def test_of_two_ranks_both_are_told(odd, said):
    cause = unlike.found(_answers([STEP * 3 + [F, B], STEP * 2 + odd]))
    assert cause.ranks == [0, 1] and cause.what.startswith(said), cause
    assert cause.what == said or "rank 1 " in cause.what[len(said) :], cause


def test_two_against_two_are_all_named():
    cause = unlike.found(_answers([STEP, STEP, [F, O], [F, O]]))
    assert cause.ranks == [0, 1, 2, 3] and "on ranks 0, 1 and" in cause.what, cause


def test_stages_that_call_otherwise_say_nothing_about_each_other():
    """Ranks 0 to 2 are of one stage, the others of another one, which meet in groups of their own."""
    stages = [_answers([STEP, STEP, [F, F]]), _answers([[E, *STEP]] * 4)]
    answers = {3 * i + rank: a for i, stage in enumerate(stages) for rank, a in stage.items()}
    for rank in range(3, 7):
        answers[rank]["digests"] = {f"other {group}": log for group, log in answers[rank]["digests"].items()}
    assert unlike.found(answers).ranks == [2]


def test_what_is_forgotten_is_not_guessed():
    answers = _answers([STEP * 4, [F, *STEP * 4]])
    for answer in answers.values():
        answer["calls"] = answer["calls"][5:]
    cause = unlike.found(answers)
    assert cause.ranks == [0, 1] and "before" not in cause.what, cause
    alike = _answers([[E, F, F, F], [F, F, F, F]])
    for answer in alike.values():
        answer["calls"] = answer["calls"][1:]
    assert "ranks 0, 1 did not call the same, more than 3 calls ago" in unlike.found(alike).what


def test_who_does_not_answer_says_nothing():
    answers = _answers([STEP, STEP]) | {2: "silent", 3: {"cause": None}}
    assert unlike.found(answers) is None


def _deviating(program: list[str], rng: random.Random) -> list[str]:
    """Return a program of which one call is skipped, made twice, replaced, or another one is made before it."""
    at, other = rng.randrange(len(program)), rng.choice([F, B, O, E, "the norm of the gradients"])
    now = {"skip": [], "twice": [program[at]] * 2, "other": [other], "extra": [other, program[at]]}
    return program[:at] + now[rng.choice([*now])] + program[at + 1 :]


@pytest.mark.parametrize("world", [2, 3, 4, 5, 8])
def test_random_programs(world):
    """Each rank has come to some call after the first that is another one on the rank that deviates."""
    rng, deviated = random.Random(world), 0
    while deviated < 100:
        program = [call for _ in range(rng.randrange(1, 12)) for call in rng.choice([STEP, [F, B], [E], [F], STEP])]
        odd = _deviating(program, rng)
        first = next((i for i, (a, b) in enumerate(zip(program, odd)) if a != b), None)
        programs, victim = [program[:] for _ in range(world)], rng.randrange(world)
        assert unlike.found(_answers(programs)) is None
        if first is None:
            continue
        deviated += 1
        programs[victim] = odd
        programs = [p[: rng.randrange(first + 1, len(p) + 1)] for p in programs]
        cause = unlike.found(_answers(programs, pairs=rng.random() < 0.5))
        assert cause.ranks == ([victim] if world > 2 else [0, 1]), (programs, cause)
        assert f"call {first + 1} is" in cause.what, cause
        assert f"{program[first]} of step" in cause.what and f"{odd[first]} of step" in cause.what, cause
