"""Family x strategy x mesh x precision: every pair of values meets in a cell. The whole product is benchmarks/matrix.py."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from tests.matrix import FAMILIES, STRATEGIES, check, covering

FACTORS = {
    "family": FAMILIES, "strategy": STRATEGIES, "mesh": ("dp=2", "tp=3", "dp=4", "dp=2,tp=2", "tp=2,dp=2"),
    "precision": ("fp32", "fp64", "bf16"),
}  # fmt: skip
CELLS = covering(FACTORS)
ROWS = defaultdict(list)  # cells of one family and precision share a graph
for _cell in CELLS:
    ROWS[_cell["family"], _cell["precision"]].append((_cell["strategy"], _cell["mesh"]))


def test_every_pair_is_met():
    for (a, first), (b, second) in itertools.combinations(FACTORS.items(), 2):
        met = {(cell[a], cell[b]) for cell in CELLS}
        assert met == set(itertools.product(first, second))
    assert len(CELLS) < 1.3 * len(FAMILIES) * len(STRATEGIES)


@pytest.mark.parametrize("row", ROWS, ids="-".join)
def test_cells(row):
    family, precision = row
    for strategy, mesh in ROWS[row]:
        cell = check(family, strategy, mesh, precision)
        if strategy == "hsdp" and "," not in mesh:
            assert cell.kind == "refused" and "hsdp" in cell.note, (strategy, mesh, cell)
        elif row == ("mixtral", "fp64"):  # torch's grouped product has no fp64 kernel
            assert cell.kind == "refused" and "the model itself fails" in cell.note, (strategy, mesh, cell)
        else:
            assert cell.kind == "right", (strategy, mesh, cell)
