"""Measure how exact the search is: against all plans of small random graphs, and HiGHS on models of two layers.

    OMP_NUM_THREADS=1 python benchmarks/exact.py [--graphs 200] [--first 0] [--plans 1000000] [--limits 12]
                                                 [--seconds 120]

Random joint graphs of up to 8 nodes on meshes of 2, 4 and 2 by 2 devices: every plan is priced and the judge asked
about some; the search must be within its gap of the best, its bound not above it, and HiGHS, on the same unfolded
problem, must find it. Then every model of models/ with two layers: the search on the folded graph against HiGHS on the
unfolded one. `loss` is what the search's plan takes more than HiGHS's; `open` is how far below its own plan HiGHS's
bound lies when its time is up. And random graphs of two blocks under limits of memory: every plan, with what it has to
compute again, against the search.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.planner.planning import Instance
from tests.planner.random_graphs import MESHES, WAITING, check
from tests.planner.random_limits import check_limits

MODELS = {
    "mlp": "mlp:hidden=32,layers=2",
    "gpt": "gpt:hidden=32,layers=2,heads=4,vocab=64,seq=16",
    "llama": "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=64,vocab=64,seq=16",
    "moe": "moe:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=64,seq=16,experts=4,active=2",
    "vit": "vit:hidden=32,layers=2,heads=4,image=32,patch=8,classes=10",
    "resnet": "resnet:depth=10,width=8,image=32,classes=10",
}


def graphs(count: int, first: int, most_plans: int) -> int:
    """Prints one line for `count` random graphs, with a line before for each that is wrong; returns how many are."""
    start, right, wrong = time.perf_counter(), [], 0
    for seed in range(first, first + count):
        try:
            right.append(check(seed, most_plans))
        except AssertionError as error:
            wrong += 1
            print(f"seed {seed}: {error}", flush=True)
    plans, optimal = sum(r.plans for r in right), sum(r.found <= r.best * (1 + 1e-9) for r in right)
    print(f"{count} random graphs, {plans:,} plans, {time.perf_counter() - start:.0f} s: {wrong} wrong; the best plan "
          f"found in {optimal}, worst loss {max((r.found / r.best - 1 for r in right), default=0.0):.3%}, widest gap "
          f"{max((1 - r.bound / r.found for r in right), default=0.0):.3%}", flush=True)  # fmt: skip
    return wrong


def limits(count: int, first: int, most_plans: int) -> int:
    """Prints how searches under limits of memory compare with all plans of random graphs of two blocks, each with as
    much computed again as the limit demands; returns how many limits are refused although a plan fits, or give a faster
    plan than a larger limit."""
    start, found = time.perf_counter(), []
    for seed in range(first, first + count):
        found += check_limits(seed, most_plans)
    refused, slower = sum(math.isinf(f.found) for f in found), sum(f.is_slower for f in found)
    losses = [f.found / f.best - 1 for f in found if math.isfinite(f.found)]
    print(f"{count} random graphs, {len(found)} limits that a plan fits, {time.perf_counter() - start:.0f} s: "
          f"{refused} refused, {slower} slower than under less memory; the best plan found under "
          f"{sum(loss <= 1e-6 for loss in losses)}, mean loss {sum(losses) / len(losses):.2%}, worst {max(losses):.2%}",
          flush=True)  # fmt: skip
    return refused + slower


def models(seconds_limit: float) -> int:
    """Prints a row a model and mesh; returns how many plans are cheaper than possible or beyond the search's gap and
    HiGHS's."""
    wrong = 0
    print(
        f"\n{'model':8} {'mesh':8} {'search ms':>10} {'gap':>7} {'s':>6} | {'HiGHS ms':>9} {'open':>7} {'s':>6} | "
        f"{'loss':>7}"
    )
    for name, text in MODELS.items():
        for mesh in MESHES:
            start = time.perf_counter()
            folded = Instance(text, mesh, WAITING)
            found = folded.minimize()
            middle = time.perf_counter()
            exact = Instance(text, mesh, WAITING, folded=False).program().solve(seconds_limit, 1e-4)
            gap = 1 - found.bound / found.objective
            row = f"{name:8} {mesh:8} {found.objective * 1e3:10.4f} {gap:7.3%} {middle - start:6.1f} |"
            if exact is None:
                print(f"{row} nothing found in {seconds_limit:.0f} s", flush=True)
                continue
            lost, left = (
                round(x, 6) + 0.0 for x in (found.objective / exact.objective - 1, 1 - exact.bound / exact.objective)
            )
            wrong += found.objective < exact.bound * (1 - 1e-6)
            print(
                f"{row} {exact.objective * 1e3:9.4f} {left:7.3%} {time.perf_counter() - middle:6.1f} | {lost:7.3%}",
                flush=True,
            )
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--graphs", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="first seed (default 0)")
    parser.add_argument("--plans", type=int, default=1_000_000, help="most plans of one graph (default 1,000,000)")
    parser.add_argument("--seconds", type=float, default=120.0, help="limit for HiGHS on one model (default 120)")
    parser.add_argument("--limits", type=int, default=12, help="graphs under limits of memory (default 12)")
    a = parser.parse_args()
    warnings.simplefilter("ignore")
    wrong = limits(a.limits, a.first, 400) if a.limits else 0
    wrong += graphs(a.graphs, a.first, a.plans) if a.graphs else 0
    return int(wrong + (models(a.seconds) if a.seconds else 0) > 0)


if __name__ == "__main__":
    sys.exit(main())
