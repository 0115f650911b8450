"""Rows by rounds: each goes once, no pair has more than the limit in a round, and however rows are found, they are the
same ones."""

from __future__ import annotations

from random import Random

import pytest
import torch

from autopar.ir.layout import chunk
from autopar.ops import autopar
from autopar.ops.capped_rows import limit_of, rounds_of


@pytest.mark.parametrize("seed", range(8))
def test_rounds_of_all_devices(seed):
    print(f"seed {seed}")
    random, _ = Random(seed), torch.manual_seed(seed)
    ways, experts, rows = random.choice([2, 3, 4]), random.choice([4, 7, 8]), random.choice([1, 5, 24])
    capacity = random.choice([1.0, 1.3, 2.0])
    group = torch.randint(0, random.choice([1, experts]), (ways * rows,))
    firsts = [chunk(experts, ways, i)[0] for i in range(1, ways)]
    routes = [autopar.route(mine, firsts) for mine in group.view(ways, rows)]
    sent = [autopar.with_largest(counts) for _, _, counts in routes]
    tables = [
        autopar.counts_in_rounds(sent[i], torch.stack([other[i] for other in sent]), rows, capacity)
        for i in range(ways)
    ]
    made, limit = {rounds_of(table) for table in tables}, limit_of(rows, ways, capacity)
    (made,) = made  # the same everywhere
    assert made == max(1, -(-max(int(counts.max()) for _, _, counts in routes) // limit))
    picked = [
        autopar.own_rows_by_block(group, firsts, i, [rows * j for j in range(1, ways)], rows, capacity, 0)
        for i in range(ways)
    ]
    seen = []
    for number in range(made):
        goes = [autopar.round_rows(order, table, number, 0) for (order, _, _), table in zip(routes, tables)]
        counts = [autopar.round_counts(table, number) for table in tables]
        assert all(int(one.max()) <= limit for one in counts)
        for i in range(ways):
            assert counts[i][0].sum() == len(goes[i])
            parts = [goes[j].split(counts[j][0].tolist())[i] + rows * j for j in range(ways)]
            assert [len(part) for part in parts] == counts[i][1].tolist()
            torch.testing.assert_close(torch.cat(parts), autopar.round_rows(*picked[i], number, 0))
            seen += torch.cat(parts).tolist()
    assert sorted(seen) == list(range(ways * rows))


def test_rows_between_zeros():
    y = autopar.place_rows(torch.ones(2, 3), torch.tensor([3, 1]), 4)
    assert y.sum(1).tolist() == [0, 3, 0, 3]


def test_no_rows_at_all():
    counts = autopar.with_largest(torch.zeros(2, dtype=torch.int64))
    table = autopar.counts_in_rounds(counts, counts, 0, 1.0)
    assert rounds_of(table) == 1 and not len(autopar.round_rows(torch.empty(0, dtype=torch.int64), table, 0, 0))
