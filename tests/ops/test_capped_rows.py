"""Rows by rounds: each goes once, no pair has more than the limit in a round, and however rows are found, they are the
same ones."""

from __future__ import annotations

from random import Random

import pytest
import torch

from autopar.ir.layout import chunk
from autopar.ops import autopar
from autopar.ops.capped_rows import limit_of, rounds_of
from autopar.ops.expert_rows import told_sizes


@pytest.mark.parametrize("seed", range(8))
def test_rounds_of_all_devices(seed):
    print(f"seed {seed}")
    random, _ = Random(seed), torch.manual_seed(seed)
    ways, experts, rows = random.choice([2, 3, 4]), random.choice([4, 7, 8]), random.choice([1, 5, 24])
    capacity = random.choice([1.0, 1.3, 2.0])
    group = torch.randint(0, random.choice([1, experts]), (ways * rows,))
    firsts = [chunk(experts, ways, i)[0] for i in range(1, ways)]
    blocks = group.view(ways, rows)
    orders = [autopar.route(mine, experts, firsts)[0] for mine in blocks]
    told, sizes = [autopar.told_in_rounds(mine, experts, firsts) for mine in blocks], told_sizes(experts, firsts)
    heard = [torch.cat([other.split(sizes)[i] for other in told]) for i in range(ways)]
    tables = [autopar.counts_in_rounds(told[i], heard[i], sizes, rows, capacity) for i in range(ways)]
    made, limit = {rounds_of(table) for table in tables}, limit_of(rows, ways, capacity)
    (made,) = made  # the same everywhere
    assert made == max(1, -(-max(int(table[0].max()) for table in tables) // limit))
    picked = [
        autopar.own_rows_by_block(group, experts, firsts, [rows * j for j in range(1, ways)], i, rows, capacity, 0)
        for i in range(ways)
    ]
    seen = []
    for number in range(made):
        goes = [autopar.round_rows(order, table, number, 0) for order, table in zip(orders, tables)]
        counts = [autopar.round_counts(table, number) for table in tables]
        assert all(int(one.max()) <= limit for one in counts)
        for i in range(ways):
            assert counts[i][0].sum() == len(goes[i])
            parts = [goes[j].split(counts[j][0].tolist())[i] + rows * j for j in range(ways)]
            assert [len(part) for part in parts] == counts[i][1].tolist()
            torch.testing.assert_close(torch.cat(parts), autopar.round_rows(*picked[i], number, 0))
            every = autopar.groups_received(heard[i], tables[i], [-1, *firsts][i], 0, torch.int64)
            assert torch.equal(autopar.round_groups(every, tables[i], number, 0), group[torch.cat(parts)])
            seen += torch.cat(parts).tolist()
    assert sorted(seen) == list(range(ways * rows))


def test_rows_between_zeros():
    y = autopar.place_rows(torch.ones(2, 3), torch.tensor([3, 1]), 4)
    assert y.sum(1).tolist() == [0, 3, 0, 3]


def test_no_rows_at_all():
    told, sizes = autopar.told_in_rounds(torch.empty(0, dtype=torch.int64), 4, [2]), told_sizes(4, [2])
    table = autopar.counts_in_rounds(told, told, sizes, 0, 1.0)
    assert rounds_of(table) == 1 and not len(autopar.round_rows(torch.empty(0, dtype=torch.int64), table, 0, 0))
