"""Programs as users write them, and random ones: does the compiled call do what the eager one does?

    OMP_NUM_THREADS=1 python benchmarks/faithful.py --programs                       # tests/faithful, on one process
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --programs state/ hooks/ --mesh dp=2,tp=2 --strategy fsdp
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --programs --list
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --count 5000 [--seed 0]          # random ones, of seeds from 0 on
    OMP_NUM_THREADS=1 python benchmarks/faithful.py --seed 1234 --count 1 --verbose  # one of them again

Prints what came of each program that is not equal, and a table. With --log FILE seeds that are in the file are not run
again, and its table counts them too. The exit code is 1 if any differs in silence, raises a bare
exception or hangs.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.ir.mesh import Mesh
from tests.faithful.catalogue import PROGRAMS, chosen
from tests.faithful.processes import judge_named, run_all
from tests.faithful.random_programs import KINDS, judge_random, kind_of
from tests.faithful.runner import BROKEN, EQUAL, SECONDS


def programs(args) -> int:
    """Run programs, print a table and return how many came to something that none may come to."""
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


def random_programs(args) -> int:
    """Run random programs and return how many came to something that none may come to. Those of one number of processes
    run together."""
    seeds, known = range(args.seed, args.seed + args.count), _logged(args.log)
    counts = Counter(known[seed] for seed in seeds if seed in known)
    log = open(args.log, "a") if args.log else None
    for kind in args.kinds:
        jobs = [(kind, seed, args.seconds) for seed in seeds if kind_of(seed) == kind and seed not in known]
        for (_, seed, _), outcome in run_all(
            1 if kind == "simulated" else int(kind), judge_random, jobs, args.seconds + 15
        ):
            text = outcome.kind + (f" ({outcome.error})" if outcome.error else "")
            counts[f"{kind:9} {text}"] += 1
            if log is not None:
                print(json.dumps({"seed": seed, "outcome": f"{kind:9} {text}"}), file=log, flush=True)
            if outcome.kind in BROKEN or args.verbose:
                where = outcome.detail.strip().splitlines()[-1] if outcome.detail else ""
                print(f"seed {seed} ({kind}), {outcome.seconds:.1f} s: {outcome}; {where.strip()}", flush=True)
    print(f"{sum(counts.values())} random programs, seeds {args.seed} to {args.seed + args.count - 1}")
    for text, count in sorted(counts.items()):
        print(f"{count:6d} {text}")
    return sum(count for text, count in counts.items() if any(kind in text for kind in BROKEN))


def _logged(path: str | None) -> dict[int, str]:
    if path is None or not Path(path).exists():
        return {}
    lines = [json.loads(line) for line in Path(path).read_text().splitlines()]
    return {line["seed"]: line["outcome"] for line in lines}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "--programs", nargs="*", metavar="PART", help="of tests/faithful, those with a part in their names, or all"
    )
    parser.add_argument("--list", action="store_true", help="names the programs and stops")
    parser.add_argument("--count", type=int, default=300, help="of random programs")
    parser.add_argument("--seed", type=int, default=0, help="of the first random program")
    parser.add_argument(
        "--kinds", nargs="+", default=KINDS, choices=KINDS, help="of random programs: processes, or simulated"
    )
    parser.add_argument("--log", metavar="FILE", help="of random programs that were run, one line each")
    parser.add_argument("--mesh", default="dp=1,tp=1")
    parser.add_argument("--strategy")
    parser.add_argument("--precision", default="fp32")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="of a program")
    parser.add_argument("--verbose", action="store_true", help="prints equal programs too, and whole errors")
    args = parser.parse_args()
    if args.list:
        print("\n".join(f"{p.name:50} {p.source}" for p in chosen(args.programs or [])))
        return 0
    return min(1, random_programs(args) if args.programs is None else programs(args))


if __name__ == "__main__":
    sys.exit(main())
