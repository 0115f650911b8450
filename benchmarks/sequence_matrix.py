"""Check attention of every kind under every cut of its sequence, all ranks simulated: steps in fp64 against the model.

    OMP_NUM_THREADS=1 AUTOPAR_CACHE=off python benchmarks/sequence_matrix.py [KIND ...] [--minutes 9] [--seed 0]

A cell is a kind of attention (tests/helpers/attention_kinds.py) with as many heads of keys as of queries, fewer or one,
on a mesh under a strategy, in plain blocks or in zigzag (where its blocks divide the length), at a length that the
devices divide or an odd one, with labels shifted either way, adapters, or stages. In zigzag a layer of causal attention
is before the other, as nothing else asks for one. Cells come in random order until the
minutes are over. Prints a line a kind: how many cells were right (1e-10), the worst error, and why others were refused.
Exit code 1 for a wrong number.
"""

from __future__ import annotations

import argparse
import itertools
import logging
import random
import sys
import time
import warnings
from collections import Counter, defaultdict
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.errors import AutoparError
from tests.helpers.attention_kinds import HEADS, KINDS, Model, inputs_of

SCHEMES, TWO_AXES = ("all_gather_kv", "ring", "ulysses"), ("cp=2,up=2", "cp=2,up=4", "cp=4,up=2")
CUTS = [
    *((f"cp={size}", name) for name in SCHEMES for size in (2, 3, 4, 8)),
    *((mesh, f"{name}+ulysses") for name in SCHEMES[:2] for mesh in TWO_AXES),
]
LAYOUTS = {"plain": "cp:S(1)", "zigzag": "cp:Z(1)"}
LENGTHS = (16, 24, 48, 13, 15, 23)
EXTRAS = ("pad", "cut", "lora", "pp")
EXACT = 1e-10


def checked(kind: str, heads: str, cut: tuple[str, str], layout: str, length: int, extra: str) -> float:
    """Return the worst error of a cell. Raises AutoparError where it is refused."""
    mesh, strategy = cut
    many, few = HEADS[heads]
    if mesh == "cp=3":  # which Ulysses shares heads among
        many, few = 3 * many // 4, 3 * few // 4 or 1
    kinds = ("causal", kind) if layout == "zigzag" else (kind, kind) if extra == "pp" else (kind,)
    model = Model(kinds, many, few, shift="cut" if extra == "cut" else "pad", lora=extra == "lora")
    report = autopar.verify(
        model,
        f"pp=2,{mesh}" if extra == "pp" else mesh,
        inputs_of(kind, length, 4 if extra == "pp" else 2),
        strategy=strategy,
        micro_batches=2 if extra == "pp" else 1,
        pin={"input_ids": LAYOUTS[layout]},
    )
    return max(report.errors.values())


def cells_of(kinds: list[str]) -> list[tuple]:
    """Return all cells of these kinds; a zigzag needs two equal blocks for each of its devices."""
    found = itertools.product(kinds, HEADS, CUTS, LAYOUTS, LENGTHS, EXTRAS)
    return [cell for cell in found if cell[3] == "plain" or cell[4] % (2 * _rows(*cell[2])) == 0]


def _rows(mesh: str, strategy: str) -> int:
    """Return among how many devices a cut shares rows in attention."""
    return int(mesh.removeprefix("cp=").partition(",")[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("kinds", nargs="*", default=KINDS)
    parser.add_argument("--minutes", type=float, default=9.0)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    cells = cells_of(args.kinds)
    random.Random(args.seed).shuffle(cells)
    errors, refused = defaultdict(list), defaultdict(Counter)
    end = time.monotonic() + 60 * args.minutes
    for kind, heads, cut, layout, length, extra in cells:
        if time.monotonic() > end:
            break
        cell = f"{kind} {heads} {cut[1]} on {cut[0]} {layout} {length} {extra}"
        try:
            error = checked(kind, heads, cut, layout, length, extra)
        except AutoparError as refusal:
            refused[kind][cut[1], refusal.message.splitlines()[0]] += 1
            continue
        except Exception as fault:
            error = float("nan")
            print(f"{cell}: {type(fault).__name__} {fault}"[:300], flush=True)
        errors[kind].append(error)
        if not error <= EXACT:
            print(f"{cell}: {error:.1e}", flush=True)
    wrong = sum(not e <= EXACT for found in errors.values() for e in found)
    total, closed = sum(map(len, errors.values())), sum(sum(reasons.values()) for reasons in refused.values())
    print(f"seed {args.seed}: {total - wrong} of {total} cells right to {EXACT:g}, {closed} refused, of {len(cells)}")
    print(f"{'kind':8s} {'right':>5s} {'worst':>8s} refused")
    for kind in args.kinds:
        right, worst = sum(e <= EXACT for e in errors[kind]), max(errors[kind], default=0.0)
        print(f"{kind:8s} {right:5d} {worst:8.0e} {sum(refused[kind].values())}")
    reasons = Counter()
    for found in refused.values():
        reasons.update(found)
    for (strategy, reason), count in sorted(reasons.items(), key=lambda item: (-item[1], item[0])):
        print(f"  refused {count}: {strategy}, {reason}"[:200])
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
