"""Family x strategy x mesh: every pair of values meets in a cell, and every family in fp64 and bf16, strategy and mesh
in all precisions. The whole product is benchmarks/matrix.py."""

from __future__ import annotations

import itertools

import pytest

from tests.helpers.matrix import FAMILIES, STRATEGIES, check, covering

FACTORS = {"family": FAMILIES, "strategy": STRATEGIES, "mesh": ("dp=2", "tp=3", "dp=4", "dp=2,tp=2", "tp=2,dp=2")}
CELLS = covering(FACTORS)
# fp64 leaves the least room for a mistake to hide in; torch's grouped product has no fp64 kernel
PRECISION = dict.fromkeys(FAMILIES, "fp64") | {"mixtral": "fp32", "resnet": "bf16"}
OTHERS = [
    ("gpt2", "fsdp", "dp=2", "bf16"), ("llama", "megatron_sp", "tp=2", "bf16"),
    ("mixtral", "megatron_sp", "tp=2", "bf16"), ("bert", "auto", "dp=2", "bf16"), ("vit", "zero1", "dp=2", "bf16"),
    ("t5", "megatron", "tp=2", "bf16"), ("resnet", "ddp", "dp=2", "fp64"),
]  # fmt: skip


def test_every_pair_is_met():
    for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2):
        met = {(cell[a], cell[b]) for cell in CELLS}
        assert met == set(itertools.product(first, second))
    for factor in ("strategy", "mesh"):
        met = {(cell[factor], PRECISION[cell["family"]]) for cell in CELLS}
        assert met == set(itertools.product(FACTORS[factor], ("fp32", "fp64", "bf16")))
    assert {f for f, *_, precision in OTHERS if precision == "bf16"} | {"resnet"} == set(FAMILIES)
    assert len(CELLS) < 1.3 * len(FAMILIES) * len(STRATEGIES)


@pytest.mark.parametrize(
    "family, every", [("gpt2", 8), *[pytest.param(f, 1, marks=pytest.mark.slow) for f in FAMILIES]]
)
def test_cells(family, every):
    for cell in [c for c in CELLS if c["family"] == family][::every]:  # in one test, since they share a graph
        found = check(**cell, precision=PRECISION[family])
        if cell["strategy"] == "hsdp" and "," not in cell["mesh"]:
            assert found.kind == "refused" and "hsdp" in found.note, (cell, found)
        else:
            assert found.kind == "right", (cell, found)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("family", "strategy", "mesh", "precision"), OTHERS)
def test_other_precisions(family, strategy, mesh, precision):
    found = check(family, strategy, mesh, precision)
    assert found.kind == "right", found


def test_a_model_that_fails_by_itself():
    found = check("mixtral", "auto", "tp=2", "fp64")
    assert found.kind == "refused" and "the model itself fails" in found.note, found
