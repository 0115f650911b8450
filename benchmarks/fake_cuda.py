"""Architectures of transformers lowered for CUDA without a GPU: each rank's graphs run on fake CUDA tensors.

    OMP_NUM_THREADS=1 python benchmarks/fake_cuda.py [NAME ...] [--mesh dp=2,tp=2] [--precisions fp32,bf16]

Prints a line for each family that is not "ok" in both, and how many are. An op that gives another type or shape than
the graph says, that CUDA has not, or that reads a number of the device, is a fault; what a CPU refuses is told apart.
Exit code 1 for a fault.
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.families import FAMILIES
from tests.helpers.fake_cuda import lowered_on_fakes


def found(name: str, precision: str, mesh: str) -> tuple[str, str]:
    """Return (ok, refused or WRONG, and why)."""
    try:
        refusal = lowered_on_fakes(name, precision, mesh)
    except Exception as error:  # other families are still to be run
        return "WRONG", f"{type(error).__name__}: {error}".splitlines()[0][:160]
    return ("refused", refusal.splitlines()[0][:110]) if refusal else ("ok", "")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {len(FAMILIES)} (default all)")
    parser.add_argument("--mesh", default="dp=2,tp=2")
    parser.add_argument("--precisions", default="fp32,bf16")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    counts: dict[str, Counter] = {precision: Counter() for precision in args.precisions.split(",")}
    for name in args.names or sorted(FAMILIES):
        for precision, count in counts.items():
            kind, why = found(name, precision, args.mesh)
            count[kind] += 1
            if kind != "ok":
                print(f"{name:32} {precision}: {kind}: {why}", flush=True)
    for precision, count in counts.items():
        print(f"{precision} on {args.mesh}: {', '.join(f'{n} {kind}' for kind, n in sorted(count.items()))}")
    return int(any(count["WRONG"] for count in counts.values()))


if __name__ == "__main__":
    sys.exit(main())
