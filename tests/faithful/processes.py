"""Many programs on several gloo processes that are started once.

A program that hangs, or that ranks leave in different ways, costs its processes, since their collectives no longer fit
together; the programs after it get new ones.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

from tests.helpers import gloo

from .catalogue import PROGRAMS
from .runner import BARE, HANG, SECONDS, Outcome, judge, merged

PATIENCE = 10  # seconds that other ranks have to answer after the first


class Team:
    """`world` processes that run jobs together: `do(job)` gives the answers of all ranks, None for one that did not
    answer."""

    def __init__(self, world: int, work: Callable):
        """`work(job)` runs in every process; it and the jobs are pickled."""
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([*gloo.PRELOAD, "tests.faithful.catalogue"])
        self.folder = tempfile.TemporaryDirectory()
        self.pipes, self.processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe()
            store = f"file://{self.folder.name}/store"
            process = context.Process(target=_main, args=(rank, world, store, theirs, work), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def do(self, job, seconds: float) -> list:
        for pipe in self.pipes:
            pipe.send(job)
        answers, open_ = [None] * len(self.pipes), dict(zip(self.pipes, range(len(self.pipes))))
        deadline = time.monotonic() + seconds
        while open_ and (ready := wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = open_.pop(pipe)
                try:
                    answers[rank] = pipe.recv()
                except EOFError:
                    self.processes[rank].join(2)
                    answers[rank] = Outcome(
                        BARE, f"rank {rank} ended with exit code {self.processes[rank].exitcode}", "exit"
                    )
            deadline = min(deadline, time.monotonic() + PATIENCE)
        return answers

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
        self.folder.cleanup()


def _main(rank: int, world: int, store: str, pipe, work: Callable) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    gc.freeze()
    logging.disable(logging.WARNING)
    quiet = os.open(os.devnull, os.O_WRONLY)  # what programs print, and torch about graphs that it cannot trace
    os.dup2(quiet, 1)
    os.dup2(quiet, 2)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=SECONDS))
    while True:
        job = pipe.recv()
        try:
            answer = work(job)
        except Exception:
            answer = Outcome(
                BARE, traceback.format_exc().strip().splitlines()[-1] + " (outside of the program)", "tester"
            )
        pipe.send(answer)


def run_all(world: int, work: Callable, jobs: Iterable, seconds: float = SECONDS) -> Iterator[tuple[object, Outcome]]:
    """(job, outcome) of each job, `work(job)` being the outcome on one rank."""
    team = None
    try:
        for job in jobs:
            team = team or Team(world, work)
            answers = team.do(job, seconds)
            known = [a for a in answers if a is not None]
            if len(known) < world:
                late = [i for i, a in enumerate(answers) if a is None]
                others = "; ".join(f"rank {i} {a}" for i, a in enumerate(answers) if a is not None)
                outcome = Outcome(HANG, f"ranks {late} did not answer" + (f"; {others[:600]}" if others else ""))
            else:
                outcome = merged(answers)
            if len({a.kind if a else None for a in answers}) > 1 or outcome.kind in (BARE, HANG):
                team.end()
                team = None
            yield job, outcome
    finally:
        if team is not None:
            team.end()


def judge_named(job: tuple[str, str, float, dict]) -> Outcome:
    """The outcome of (program, mesh, seconds, options) on this rank."""
    name, mesh, seconds, options = job
    return judge(PROGRAMS[name], mesh, seconds, **options)
