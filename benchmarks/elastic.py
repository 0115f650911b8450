"""Kill ranks of `autopar train --elastic` at random moments and compare the run with one that nobody disturbed.

    OMP_NUM_THREADS=1 python benchmarks/elastic.py [--trials 50] [--seed 0] [--overhead]

Each trial draws a mesh and strategy, how many of the eight processes are killed (1 to 4) and when. Every loss has to be
that of the undisturbed run, and so has the loss of the model at the end, on one batch in fp64. A row says what the run
went on from, how many steps were taken again, how long it took from the kill to the next step that was new, and how
much of that went from the start of planning, or of taking a plan that was made before, to the end of compile.
--overhead: seconds of a step with copies of what each process holds after every tenth one, and without.
"""

from __future__ import annotations

import argparse
import os
import random
import re
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import load_file

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import models
from tests.cli.command import ranks_of

MODEL, STEPS, EVERY = "gpt2-tiny", 40, 15
CASES = [("dp=8", "ddp"), ("dp=4,tp=2", "megatron"), ("inter=2,dp=4", "hsdp"), ("dp=8", "zero1"), ("pp=2,dp=4", None)]
WORDS = ["--model", MODEL, "--batch", "8", "--seq", "16", "--steps", str(STEPS)]
SECONDS = 400


@dataclass
class Run:
    """One run of the command. `times`: when a line of each step came, in seconds, the last one of a step counts."""

    losses: dict[int, float] = field(default_factory=dict)
    times: list[tuple[int, float]] = field(default_factory=list)
    planned: list[tuple[float, float]] = field(default_factory=list)  # begin and end of each planning
    killed: float = 0.0
    said: str = ""


def train(mesh: str, strategy: str | None, folder: Path, kill: int = 0, at: int = 0, seed: int = 0) -> Run:
    """Train, and kill so many processes behind step `at`."""
    words = [*WORDS, "--mesh", mesh, *(["--strategy", strategy] if strategy else []), "--checkpoint", str(folder)]
    words += ["--elastic", "--every", str(EVERY)] if kill else []
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(
            ["autopar", "train", *words], stdout=subprocess.PIPE, stderr=errors, text=True, start_new_session=True
        )
        run, generator, end = Run(), random.Random(seed), time.monotonic() + SECONDS
        try:
            assert process.stdout is not None
            for line in process.stdout:
                now = time.monotonic()
                if now > end:
                    raise TimeoutError(f"{mesh} {strategy}: {SECONDS} s")
                if line.startswith(("planning", "taking the plan")):
                    run.planned.append((now, now))
                elif line.startswith("plan of"):
                    run.planned[-1] = run.planned[-1][0], now
                elif found := re.match(r"step +(\d+)  loss ([\d.]+)", line):
                    run.losses[int(found[1])] = float(found[2])
                    run.times.append((int(found[1]), now))
                    if kill and not run.killed and int(found[1]) == at:
                        time.sleep(generator.random() * 0.1)
                        run.killed = time.monotonic()
                        for pid in generator.sample(ranks_of(process), kill):
                            os.kill(pid, signal.SIGKILL)
            process.wait(30)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        errors.seek(0)
        run.said = errors.read()
    if process.returncode:
        raise RuntimeError(f"{mesh} {strategy} ended with {process.returncode}: {run.said[-2000:]}")
    return run


def loss_of(folder: Path) -> float:
    """Return the loss of the model that a run has saved at its end, on one batch."""
    model, batch = models.build(MODEL, batch=8, seq=16, device="cpu", seed=3)
    parts = [load_file(file) for file in (folder / f"step-{STEPS:08d}" / "model").glob("*.safetensors")]
    model.load_state_dict({name: tensor for part in parts for name, tensor in part.items()}, strict=False)
    with torch.no_grad():
        return model.double()(**batch).loss.item()


def overhead(rounds: int = 3) -> None:
    """Train a GPT of 13 million parameters with and without copies, in turns, and print what they cost."""
    words = ["--model", "gpt:hidden=512,layers=4,heads=8,vocab=1024,seq=64", "--mesh", "dp=2", "--strategy", "zero1"]
    words += ["--batch", "8", "--seq", "64", "--steps", "52", "--elastic"]
    found: dict[int, list[float]] = {10: [], 1000: []}
    for every in [*found] * rounds:
        with tempfile.TemporaryDirectory() as folder:
            more = ["--checkpoint", folder, "--copy-every", str(every)]
            said = subprocess.run(["autopar", "train", *words, *more], capture_output=True, text=True, timeout=SECONDS)
        rates = [float(rate.replace(",", "")) for rate in re.findall(r"loss [\d.]+  ([\d,]+) tokens/s", said.stdout)]
        found[every].append(statistics.mean(8 * 64 / rate for rate in rates[2:]))  # the first ones warm up
    with_copies, without = (min(found[every]) for every in (10, 1000))
    print(f"a step takes {with_copies:.4f} s with a copy after every tenth, {without:.4f} s without, "
          f"{with_copies / without - 1:+.1%}")  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--trials", type=int, default=50)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--overhead", action="store_true")
    args = parser.parse_args()
    if args.overhead:
        return overhead()
    generator, undisturbed, memory, differ, planning = random.Random(args.seed), {}, 0, [], []
    cache = tempfile.TemporaryDirectory()
    os.environ["AUTOPAR_CACHE"] = cache.name  # as users have one
    print(f"seed {args.seed}, torch {torch.__version__}, {os.cpu_count()} cores\n")
    print(f"{'mesh':13} {'strategy':9} {'killed':6} {'after':5}  {'went on from':12} {'again':>5} {'seconds':>7} "
          f"{'planning':>8} {'loss':>8} {'model':>8}", flush=True)  # fmt: skip
    for _ in range(args.trials):
        mesh, strategy = generator.choice(CASES)
        kill, at = generator.randint(1, 4), generator.randint(2, STEPS - 5)
        with tempfile.TemporaryDirectory() as folder:
            whole, cut = Path(folder, "whole"), Path(folder, "cut")
            if (mesh, strategy) not in undisturbed:
                undisturbed[mesh, strategy] = train(mesh, strategy, whole).losses, loss_of(whole)
            losses, final = undisturbed[mesh, strategy]
            run = train(mesh, strategy, cut, kill, at, generator.randrange(1 << 30))
            assert run.losses.keys() == losses.keys(), sorted({*losses} - {*run.losses})
            far, of_model = max(abs(run.losses[s] - losses[s]) for s in losses), abs(loss_of(cut) - final)
        before = [step for step, when in run.times if when <= run.killed]
        later = [(step, when) for step, when in run.times if when > run.planned[-1][0]]
        again, new = sum(step <= max(before) for step, _ in later), next(w for s, w in later if s > max(before))
        is_memory = "from what those that remain hold" in run.said
        memory, planning = memory + is_memory, [*planning, run.planned[-1][1] - run.planned[-1][0]]
        differ.append(of_model)
        source = "memory" if is_memory else "checkpoint"
        print(f"{mesh:13} {strategy or 'auto':9} {kill:6} {at:5}  {source:12} {again:5} {new - run.killed:7.1f} "
              f"{planning[-1]:8.1f} {far:8.1e} {of_model:8.1e}", flush=True)  # fmt: skip
    print(f"\n{args.trials} trials: {memory} went on from memory; losses of the models at the end differ by at most "
          f"{max(differ):.1e}; planning took {statistics.median(planning):.1f} s in the middle, "
          f"{max(planning):.1f} at most")  # fmt: skip


if __name__ == "__main__":
    main()
