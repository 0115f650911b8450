"""The matrix of what must work together, and a small selection of it in which every pair of values meets.

Pairwise selection: most faults need two of the factors at once (Kuhn, Wallace, Gallo, "Software fault interactions",
IEEE TSE 30(6), 2004), so a run for each pair finds them at a fraction of the whole product.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch

from autopar import AutoparError, Mesh, compiler
from autopar.hardware.profile import load
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.compare import verify_plan
from tests.families import FAMILIES as ZOO

FAMILIES = ("gpt2", "llama", "mixtral", "bert", "vit", "t5", "resnet")
STRATEGIES = ("auto", "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp")
GLOO_MESHES = ("dp=2", "tp=3", "dp=4", "dp=2,tp=2")
SIMULATED_MESHES = ("dp=8", "dp=2,tp=4", "dp=4,tp=4", "dp=2,cp=2,tp=2")


def covering(factors: Mapping[str, Sequence[str]]) -> list[dict[str, str]]:
    """Cells of the product of `factors` such that every pair of values of two factors is in one of them; the same cells
    every time. Greedy: a cell starts with a pair that was not met, and takes of each other factor the value that meets
    most."""
    names = list(factors)
    missing = {
        ((a, x), (b, y)): None for a, b in itertools.combinations(names, 2) for x in factors[a] for y in factors[b]
    }
    uses = {(name, value): 0 for name in names for value in factors[name]}
    cells = []
    while missing:
        cell = dict(next(iter(missing)))
        for name in names:
            if name not in cell:
                cell[name] = max(
                    factors[name],
                    key=lambda value, name=name: (
                        sum(_pair(names, (name, value), item) in missing for item in cell.items()), -uses[name, value]
                    ),
                )  # fmt: skip
        for pair in itertools.combinations([(name, cell[name]) for name in names], 2):
            missing.pop(pair, None)
        for item in cell.items():
            uses[item] += 1
        cells.append({name: cell[name] for name in names})
    return cells


def _pair(names: list[str], one: tuple[str, str], other: tuple[str, str]) -> tuple:
    return tuple(sorted((one, other), key=lambda item: names.index(item[0])))


@dataclass(frozen=True)
class Cell:
    """Says what a run found: `kind` is "right", "wrong" or "refused" (by an AutoparError), `note` the largest error or
    the reason."""

    kind: str
    note: str


def check(family: str, strategy: str, mesh: str, precision: str = "fp32") -> Cell:
    """One step of a family with all ranks simulated, its loss, gradients and buffers against the unsharded model.
    "fp64" is the model in that type, the other precisions are those of `autopar.compile`."""
    model, inputs, captured = _traced(family, precision)
    policy = "bf16" if precision == "bf16" else "fp32"
    try:
        options = PlanOptions(load("cpu-gloo"), strategy=strategy, precision=policy, baselines=False)
        report = verify_plan(captured, make_plan(captured, Mesh.parse(mesh), options, family), model, inputs)
    except AutoparError as error:
        return Cell("refused", f"{type(error).__name__}: {error.message}")
    worst = max(report.errors, key=report.errors.get)
    right = report.match
    if precision == "fp64":
        right = all(error <= 1e-6 for error in report.errors.values())  # transformers takes losses in fp32 of any model
    return Cell("right" if right else "wrong", f"{report.errors[worst]:.0e} {worst}")


@lru_cache(maxsize=1)
def _traced(family: str, precision: str):
    torch.manual_seed(0)
    model, inputs = ZOO[family](4, 16)
    if precision == "fp64":
        model = model.double()
        inputs = {k: v.double() if v.is_floating_point() else v for k, v in inputs.items()}
    return model, inputs, compiler.trace(model, inputs, precision="bf16" if precision == "bf16" else "fp32")
