"""Programs as users write them, and random ones: does the compiled call do what the eager one does?

    OMP_NUM_THREADS=1 python benchmarks/faithful.py --programs                       # all of tests/faithful, on one process
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --programs state/ hooks/ --mesh dp=2,tp=2 --strategy fsdp
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --programs --list
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --count 5000 [--seed 0]          # random programs

Prints what came of each program that is not equal, and a table. The exit code is 1 if any differs in silence, raises a bare
exception or hangs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.mesh import Mesh
from tests.faithful.catalogue import PROGRAMS, chosen
from tests.faithful.processes import judge_named, run_all
from tests.faithful.runner import BROKEN, EQUAL, SECONDS


def programs(args) -> int:
    """How many programs came to something that none may come to."""
    mesh, counts, broken, unmet = args.mesh, Counter(), 0, []
    world = Mesh.parse(mesh).devices
    options = {"strategy": args.strategy, "precision": args.precision}
    found = [p for p in chosen(args.programs) if not (p.alone and world > 1)]
    jobs = [(p.name, mesh, args.seconds, options) for p in found]
    for (name, *_), outcome in run_all(world, judge_named, jobs, args.seconds + 15):
        program = PROGRAMS[name]
        counts[outcome.kind + (f" ({outcome.error})" if outcome.error else "")] += 1
        broken += outcome.kind in BROKEN
        if not outcome.holds(program):
            unmet.append(name)
        if outcome.kind != EQUAL or args.verbose:
            mark = " " if outcome.holds(program) else "!" if outcome.kind not in BROKEN else "#"
            print(f"{mark} {name} ({program.source}), {outcome.seconds:.1f} s: {outcome}", flush=True)
            if args.verbose and outcome.detail:
                print("".join(f"      {line}\n" for line in outcome.detail.splitlines()), end="", flush=True)
    how = f"{mesh}, strategy {args.strategy}, {args.precision}"
    print(f"{len(jobs)} programs on {how}: {len(unmet)} are not as wanted, {broken} of them broken")
    for kind, count in counts.most_common():
        print(f"{count:6d} {kind}")
    return broken


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--programs", nargs="*", metavar="PART", help="of tests/faithful, those with a part in their names, or all"
    )
    parser.add_argument("--list", action="store_true", help="names the programs and stops")
    parser.add_argument("--mesh", default="dp=1,tp=1")
    parser.add_argument("--strategy")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a program")
    parser.add_argument("--verbose", action="store_true", help="prints equal programs too, and whole errors")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{p.name:50} {p.source}" for p in chosen(args.programs or [])))
        return 0
    return min(1, programs(args))


if __name__ == "__main__":
    sys.exit(main())
