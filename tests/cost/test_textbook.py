"""Formulas of all-reduce algorithms against the same algorithms carried out message by message."""

import numpy as np
import pytest

from autopar.cost.textbook import ALL_REDUCES

from .messages import ALGORITHMS

EXPONENTS = {  # of the number of nodes: steps, bytes of the busiest node, bytes in all
    "parameter_server": (0, 1, 1),
    "sequential": (1, 1, 1),
    "ring": (1, 0, 1),
    "parallel": (0, 1, 2),
}


def carried_out(name: str, n: int, seed: int = 0):
    numel = 48 * n  # divides by n and by every power of two in question
    print(f"seed {seed}")
    vectors = list(np.random.default_rng(seed).integers(-99, 99, (n, numel)).astype(np.float64))
    return vectors, *ALGORITHMS[name](vectors)


@pytest.mark.parametrize("name", ALL_REDUCES)
@pytest.mark.parametrize("n", [2, 3, 4, 5, 6, 7, 8, 16])
def test_formulas_are_those_of_the_messages(name, n):
    vectors, results, network = carried_out(name, n)
    assert len(results) == n and all((r == sum(vectors)).all() for r in results)
    formula, size = ALL_REDUCES[name], vectors[0].nbytes
    assert formula.steps(n) == len(network.steps)
    assert formula.max_node_bytes(n, size) == pytest.approx(network.max_node_bytes)
    assert formula.total_bytes(n, size) == pytest.approx(network.total_bytes)
    assert formula.seconds(n, size, 1e-3, 1e9) == pytest.approx(
        1e-3 * len(network.steps) + network.max_node_bytes / 1e9
    )


@pytest.mark.parametrize("name", EXPONENTS)
def test_growth_with_the_number_of_nodes(name):
    """Slopes over N = 2, 4, 8, 16 with both axes logarithmic round to the exponents of the table."""
    formula, sizes = ALL_REDUCES[name], np.array([2, 4, 8, 16])
    columns = [
        [formula.steps(n) for n in sizes],
        [formula.max_node_bytes(n, 1.0) for n in sizes],
        [formula.total_bytes(n, 1.0) for n in sizes],
    ]
    slopes = [np.polyfit(np.log(sizes), np.log(np.array(c, float)), 1)[0] for c in columns]
    assert tuple(round(slope) for slope in slopes) == EXPONENTS[name], slopes


@pytest.mark.parametrize("n", [2, 4, 8])
def test_a_parameter_server_carries_for_all(n):
    """Twice the gradient for each worker: linear in their number; a worker's own link carries it twice."""
    vectors, _, network = carried_out("parameter_server", n)
    assert network.node_bytes(n) == 2 * n * vectors[0].nbytes
    assert {network.node_bytes(worker) for worker in range(n)} == {2 * vectors[0].nbytes}


def test_recursive_doubling_of_eight():
    vectors, _, network = carried_out("recursive_doubling", 8)
    assert network.offsets == [{1}, {2}, {4}]
    assert {network.node_bytes(node) for node in range(8)} == {3 * vectors[0].nbytes}


@pytest.mark.parametrize("n", [2, 4, 8, 16])
def test_halving_and_doubling_sends_as_little_as_a_ring(n):
    vectors, _, network = carried_out("halving_doubling", n)
    assert len(network.steps) == 2 * np.log2(n)
    assert {network.node_bytes(node) for node in range(n)} == {2 * (n - 1) * vectors[0].nbytes // n}
    assert ALL_REDUCES["ring"].max_node_bytes(n, 1.0) == ALL_REDUCES["halving_doubling"].max_node_bytes(n, 1.0)


def test_one_node_sends_nothing():
    assert all(formula.seconds(1, 100.0, 1.0, 1.0) == 0 for formula in ALL_REDUCES.values())
