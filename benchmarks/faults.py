"""Processes that die, fail or stand still at random moments of training: how long until all others ended, and what they
said.

    OMP_NUM_THREADS=1 python benchmarks/faults.py [--runs 200] [--devices 2,4,8] [--faults kill,exit,raise,stop,sleep]
    [--seed 0]

"named right": every survivor raised RankFailure (of a hang CollectiveTimeout) with the rank that failed. Hangs count
from the moment that a rank stands still; the timeout is 3 s.
"""

from __future__ import annotations

import argparse
import random
import sys
import warnings
from collections import defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from tests.helpers import faults

MESHES = {2: ("dp=2", "fsdp"), 4: ("dp=2,tp=2", "megatron_sp"), 8: ("dp=4,tp=2", "megatron_sp")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--devices", default="2,4,8")
    parser.add_argument("--faults", default=",".join(faults.FAULTS))
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    rng, plans, rows = random.Random(args.seed), {}, defaultdict(list)
    kinds, sizes = args.faults.split(","), [int(n) for n in args.devices.split(",")]
    for number in range(args.runs):
        fault, devices = kinds[number % len(kinds)], rng.choice(sizes)
        mesh, strategy = MESHES[devices]
        if devices not in plans:
            model, batch = faults.inputs()
            plans[devices] = autopar.plan(model, mesh, batch, hardware="cpu-gloo", strategy=strategy, baselines=False)
        victim = rng.randrange(devices)
        outcome = faults.run(fault, mesh, plans[devices], victim, rng.uniform(0, 0.3))
        good = outcome.named_right(fault, victim) and not outcome.silent and set(outcome.codes) == {3}
        if not good:
            print(f"run {number}: {fault} of rank {victim} on {mesh}: {outcome}", flush=True)
        rows[fault].append((outcome.seconds, good))
    print("fault  runs  named right  last survivor ended after at most")
    for fault in kinds:
        if found := rows[fault]:
            print(f"{fault:5s} {len(found):5d} {sum(good for _, good in found):12d}  {max(s for s, _ in found):.2f} s")


if __name__ == "__main__":
    main()
