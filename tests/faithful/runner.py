"""Run a program in eager mode and compiled, and say how the two compare.

    judge(PROGRAMS["state/ema_codebook"], "dp=1,tp=1")    # -> Outcome(kind="equal", ...)

Needs a process group with as many processes as the mesh has devices; every one of them calls `judge`.
"""

from __future__ import annotations

import random
import signal
import threading
import time
import traceback
import warnings
from collections.abc import Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

import numpy as np
import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh

from .compare import COARSE, difference
from .program import Program
from .script import Run

EQUAL, AT_COMPILE, AT_CALL = "equal", "refused at compile", "refused at a call"
DIFFERENT, BARE, HANG = "DIFFERENT", "BARE", "HANG"
FAULTS = ("RankFailure", "CollectiveTimeout", "DesyncError", "VerifyError")  # say that something broke, not what to do
BROKEN = (DIFFERENT, BARE, HANG)  # what no program may come to
SECONDS = 120  # of wall time, for a program


@dataclass(frozen=True)
class Outcome:
    """Says what came of a program. `detail`: the difference, or the error's text; `error`: its class."""

    kind: str
    detail: str = ""
    error: str = ""
    seconds: float = 0.0

    def holds(self, program: Program) -> bool:
        """Return whether it is what the program wants: equal, or refused with the word that is wanted and a line of
        the user's."""
        if self.kind == EQUAL:
            return True
        return (
            self.kind in (AT_COMPILE, AT_CALL)
            and program.refused is not None
            and program.refused.lower() in self.detail.lower()
            and "\n  source: " in self.detail
        )

    def __str__(self) -> str:
        first = self.detail.strip().splitlines()[0] if self.detail.strip() else ""
        return self.kind + (f": {self.error}" if self.error else "") + (f": {first}" if first else "")


@dataclass
class Played:
    """`stage` is where `error` was raised: "build", "compile" or "call"."""

    run: Run | None = None
    error: BaseException | None = None
    stage: str = ""


class TooLate(BaseException):
    """The time of a program is over."""


@contextmanager
def limited(seconds: float):
    """Raises TooLate inside after so many seconds, in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ring(*_):
        raise TooLate

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def judge(program: Program, mesh: str, seconds: float = SECONDS, **options) -> Outcome:
    """The outcome on this rank. `options`: arguments of autopar.compile."""
    start = time.monotonic()
    try:
        with warnings.catch_warnings(), limited(seconds):
            warnings.simplefilter("ignore")
            eager = play(program, lambda model, example: model)
            mesh_of = device_mesh(mesh)
            mine = play(program, lambda m, example: autopar.compile(m, mesh_of, example, **program.options | options))
            tolerance = _tolerance(program, options)
            outcome = compared(program, eager, mine, tolerance)
            if outcome.kind == DIFFERENT and program.rounded is not None:
                precision = (program.options | options).get("precision", "fp32")
                others = [play(other, lambda m, example: m) for other in program.rounded(precision)]
                parts = Mesh.parse(mesh).devices * (options.get("micro_batches") or 1)
                outcome = compared(program, eager, mine, tolerance, others, parts)
    except TooLate:
        outcome = Outcome(HANG, f"not done after {seconds:.0f} s")
    return replace(outcome, seconds=time.monotonic() - start)


def play(program: Program, compile_) -> Played:
    """One run; its exception is kept."""
    seed_all(0)
    played = Played(stage="build")
    try:
        model, batch, *rest = program.build()
        script = rest[0] if rest else two_calls
        seed_all(1)
        example = batch(0)
        played.stage = "compile"
        compiled = compile_(model, example)
        played.stage = "call"
        seed_all(2)
        played.run = Run(compiled, model, batch, compile_)
        script(played.run)
    except Exception as error:
        played.error = error
    return played


def two_calls(run: Run) -> None:
    run(1)
    run(2)


def compared(
    program: Program, eager: Played, mine: Played, tolerance: float, rounded: Sequence[Played] = (), parts: int = 1
) -> Outcome:
    """Return what came of a program. `rounded`: eager runs with other rounding; what differs by little more than that,
    for each of the `parts` of sums, is as exact as the eager run."""
    unwanted = program.raises is not None and (eager.error is not None) != program.raises
    if unwanted or (eager.error is not None and eager.stage != "call"):
        raise RuntimeError(f"{program.name} has a mistake of its own: {eager.error!r}") from eager.error
    error, kind = mine.error, type(mine.error).__name__
    if mine.run is not None:
        elsewhere = frozenset(getattr(mine.run.model, "elsewhere", ()))
        again = [played.run.records for played in rounded]
        found = difference(eager.run.records, mine.run.records, tolerance, elsewhere, again, parts)
        if found is not None:
            return Outcome(DIFFERENT, found + (f" (then {kind}: {error})" if error is not None else ""))
    if isinstance(error, AutoparError) and kind not in FAULTS:
        expected = eager.error is not None and len(eager.run.records) == (len(mine.run.records) if mine.run else 1)
        at = AT_COMPILE if mine.stage == "compile" else AT_CALL
        return Outcome(EQUAL, "both raise") if expected else Outcome(at, str(error), kind)
    if eager.error is not None:
        if error is None:
            return Outcome(
                DIFFERENT, f"does what in eager mode raises {type(eager.error).__name__}: {_line(eager.error)}"
            )
        if isinstance(error, type(eager.error)) or isinstance(eager.error, type(error)):
            return Outcome(EQUAL, "both raise")
    if error is not None:
        error = error.__cause__ if kind in FAULTS and error.__cause__ is not None else error
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(
            BARE, f"{_line(error)} ({where.filename.rpartition('/')[2]}:{where.lineno}, at {mine.stage})", kind
        )
    if len(eager.run.records) != len(mine.run.records):
        return Outcome(DIFFERENT, f"{len(mine.run.records)} records instead of {len(eager.run.records)}")
    return Outcome(EQUAL)


def merged(outcomes: list[Outcome]) -> Outcome:
    """That of all ranks: the worst of them, and DIFFERENT where a part of them was refused."""
    worst = max(outcomes, key=lambda o: (EQUAL, AT_COMPILE, AT_CALL, DIFFERENT, BARE, HANG).index(o.kind))
    kinds = [o.kind for o in outcomes]
    if len(set(kinds)) > 1:
        texts = [f"rank {i} {o}" for i, o in enumerate(outcomes)]
        kind = worst.kind if worst.kind in BROKEN else DIFFERENT
        return replace(worst, kind=kind, detail=f"{worst.detail.strip()} [ranks disagree: {'; '.join(texts)[:600]}]")
    return replace(worst, seconds=max(o.seconds for o in outcomes))


def seed_all(seed: int) -> None:
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed)


@cache
def device_mesh(text: str):
    mesh = Mesh.parse(text)
    return init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)


def _tolerance(program: Program, options: dict) -> float:
    precision = (program.options | options).get("precision", "fp32")
    return program.tolerance if precision == "fp32" else max(program.tolerance, COARSE)


def _line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:300] if lines else ""
