"""Families x strategies x meshes: every cell is right, or refused with a reason. Small meshes run on gloo processes,
large ones with all ranks simulated in this process.

    OMP_NUM_THREADS=1 python benchmarks/matrix.py [--families gpt2,t5] [--strategies auto,fsdp] [--meshes dp=2,tp=2
    dp=8] [--write]

Cells that were found before are kept in benchmarks/results/matrix.json, so the whole matrix may be run in slices;
`--write` makes the table benchmarks/results/matrix.md of all of them. Exit code 1 for a wrong number.
"""

from __future__ import annotations

import argparse
import copy
import json
import logging
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.ir.mesh import Mesh
from tests.families import FAMILIES as ZOO
from tests.helpers import gloo
from tests.helpers.matrix import FAMILIES, GLOO_MESHES, SIMULATED_MESHES, STRATEGIES, Cell, check

KEPT, TABLE = (Path(__file__).parent / "results" / f"matrix.{end}" for end in ("json", "md"))
TOLERANCE = 1e-5


def on_gloo(rank: int, family: str, strategies: list[str], mesh_text: str) -> dict[str, Cell]:
    """The cells of one family and mesh; every rank compares the loss and the gradients that it has."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    mesh = Mesh.parse(mesh_text)
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    torch.manual_seed(0)
    model, inputs = ZOO[family](4, 16)
    reference = copy.deepcopy(model)
    expected = reference(**inputs).loss
    expected.backward()
    gradients = {n: p.grad for n, p in reference.named_parameters() if p.grad is not None}
    floor = 1e-4 * max(float(g.norm()) for g in gradients.values())  # some gradients are zero but for rounding
    cells = {}
    for strategy in strategies:
        try:
            parallel = autopar.compile(
                copy.deepcopy(model), device_mesh, inputs, strategy=None if strategy == "auto" else strategy
            )
        except autopar.AutoparError as error:
            cells[strategy] = Cell("refused", f"{type(error).__name__}: {error.message}")
            continue
        loss = parallel(**inputs).loss
        loss.backward()
        errors = {"loss": abs(float(loss) - float(expected)) / abs(float(expected))}
        for name, parameter in parallel.named_parameters():
            if name in gradients:
                whole = gradients[name]
                if parameter.grad is None:
                    errors[name] = float("inf")
                    continue
                errors[name] = float((parameter.grad.full_tensor() - whole).norm() / whole.norm().clamp_min(floor))
        worst = max(errors, key=errors.get)
        flag = torch.tensor(float(all(e <= TOLERANCE for e in errors.values())))
        dist.all_reduce(flag, op=dist.ReduceOp.MIN)
        cells[strategy] = Cell("right" if flag else "wrong", f"{errors[worst]:.0e} {worst}")
    return cells


def run(family: str, mesh: str, strategies: list[str]) -> dict[str, Cell]:
    if mesh in SIMULATED_MESHES:
        return {strategy: _checked(family, strategy, mesh) for strategy in strategies}
    try:
        return gloo.run(Mesh.parse(mesh).devices, on_gloo, family, strategies, mesh, seconds=1200)[0]
    except (gloo.RemoteError, TimeoutError) as error:
        return dict.fromkeys(strategies, Cell("wrong", str(error).strip().splitlines()[-1]))


def _checked(family: str, strategy: str, mesh: str) -> Cell:
    try:
        return check(family, strategy, mesh)
    except Exception as error:  # a crash is a wrong cell too, and the others are still to be run
        return Cell("wrong", f"{type(error).__name__}: {error}".splitlines()[0][:200])


def table(kept: dict[str, list[str]]) -> str:
    """Markdown: a row a family, strategies as columns, meshes in the cells by what was found."""
    meshes = [*GLOO_MESHES, *SIMULATED_MESHES]
    signs = {"right": "✓", "refused": "–", "wrong": "✗"}
    lines = [
        "One step against the unsharded model: ✓ loss and every gradient within 1e-5, – refused with a typed error, ✗ "
        "wrong, · not",
        f"run. In each cell the meshes {', '.join(meshes[:4])} (gloo processes) and {', '.join(meshes[4:])} (simulated "
        f"ranks).", "",
        f"| family | {' | '.join(STRATEGIES)} |", f"|---|{'---|' * len(STRATEGIES)}",
    ]  # fmt: skip
    reasons: dict[str, set[str]] = {}
    for family in FAMILIES:
        row = []
        for strategy in STRATEGIES:
            found = [kept.get(f"{family} {mesh} {strategy}") for mesh in meshes]
            row.append(" ".join("".join(signs[f[0]] if f else "·" for f in half) for half in (found[:4], found[4:])))
            for mesh, f in zip(meshes, found):
                if f and f[0] != "right":
                    reasons.setdefault(f"{f[0]}: {f[1]}", set()).add(f"{family} {strategy} {mesh}")
        lines.append(f"| {family} | {' | '.join(row)} |")
    lines += [
        "",
        *(f"- {reason} ({len(where)} cells, such as {min(where)})" for reason, where in sorted(reasons.items())),
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES))
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--meshes", nargs="*", default=[*GLOO_MESHES, *SIMULATED_MESHES])
    parser.add_argument("--write", action="store_true", help="write the table of all kept cells")
    parser.add_argument("--again", action="store_true", help="run cells that are kept already too")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    kept = json.loads(KEPT.read_text()) if KEPT.exists() else {}
    wrong = 0
    for mesh in a.meshes:
        for family in a.families.split(","):
            todo = [s for s in a.strategies.split(",") if a.again or f"{family} {mesh} {s}" not in kept]
            if not todo:
                continue
            start = time.monotonic()
            for strategy, cell in run(family, mesh, todo).items():
                kept[f"{family} {mesh} {strategy}"] = [cell.kind, cell.note]
                wrong += cell.kind == "wrong"
                print(f"{family:8} {mesh:15} {strategy:12} {cell.kind:8} {cell.note}", flush=True)
            print(f"{family:8} {mesh:15} {time.monotonic() - start:.0f} s", flush=True)
            KEPT.write_text(json.dumps(kept, indent=0, sort_keys=True) + "\n")
    if a.write:
        TABLE.write_text(table(kept))
        print(table(kept))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
