"""Messages of a hyperedge in the dual: the minimum over all layouts of its ends, found by trying every one."""

from __future__ import annotations

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from autopar.planner.objective.modes import BACKWARD, BOTH, FORWARD
from autopar.planner.solver.factor import End, Factor
from autopar.planner.solver.hyperedges import PricedMode


def random_factor(rng: np.random.Generator) -> Factor:
    """A factor with two or three consumers, each of which wants some of the columns; producer and consumers may run
    again."""
    consumers, sources, width = int(rng.integers(2, 4)), int(rng.integers(1, 4)), int(rng.integers(1, 5))
    twice = rng.random(consumers + 1) < 0.3
    wanted = [np.sort(rng.choice(width, int(rng.integers(1, width + 1)), replace=False)) for _ in range(consumers)]
    width = len(universe := np.unique(np.concatenate(wanted)))
    wanted = [np.searchsorted(universe, one) for one in wanted]
    tail = End(0, None, rng.random(sources * (1 + int(twice[0]))), bool(twice[0]), np.arange(sources))
    heads = [
        End(i + 1, None, rng.random(len(own) * (1 + int(again))), bool(again), own, own, int(rng.integers(1, 3)))
        for i, (own, again) in enumerate(zip(wanted, twice[1:]))
    ]
    hyperedge = SimpleNamespace(hyperedge=SimpleNamespace(consumers=heads))
    factor = Factor(hyperedge, np.arange(sources), np.arange(width), 1.0, tail, heads)
    factor.price([_mode(rng, sources, width) for _ in range(int(rng.integers(1, 3)))])
    return factor


def _mode(rng: np.random.Generator, sources: int, width: int) -> PricedMode:
    """A mode in which two phases pay no less than one and no more than each for itself."""
    early, late, share = rng.random((3, sources, width))
    both = np.maximum(early, late) + share * np.minimum(early, late)
    return PricedMode(rng.random((2, sources)), {FORWARD: early, BACKWARD: late, BOTH: both})


def by_trying(factor: Factor, of: End) -> np.ndarray:
    """Return the least cost by what one end takes, with the messages of the others."""
    shares = factor.shares
    rows, sources = factor.tail.rows, shares.modes[0].base.shape[1]
    ends = [range(sources * len(rows)), *(range(len(head.message)) for head in factor.heads)]
    found = np.full(len(of.message), np.inf)
    for taken in itertools.product(*ends):
        rerun, p = divmod(taken[0], sources)
        block: dict[int, int] = {}
        cost = 0.0 if of is factor.tail else -rows[rerun, p]
        for head, k in zip(factor.heads, taken[1:]):
            late, column = divmod(k, len(head.layouts))
            q = int(head.columns[column])
            block[q] = block.get(q, 0) | head.phase | (BACKWARD if late else 0)
            cost -= 0.0 if head is of else head.message[k]
        cost += min(m.base[rerun, p] + sum(m.block[x][p, q] for q, x in block.items()) for m in shares.modes)
        mine = taken[0] if of is factor.tail else taken[1 + factor.heads.index(of)]
        found[mine] = min(found[mine], cost)
    return found


@pytest.mark.parametrize("seed", range(40))
def test_messages_are_those_of_trying_all(seed):
    """Also after messages are sent anew, one at a time: what is kept of the others is of their own messages."""
    print(f"seed {seed}")
    rng = np.random.default_rng(seed)
    factor = random_factor(rng)
    ends = [factor.tail, *factor.heads]
    for _ in range(8):
        end = ends[int(rng.integers(len(ends)))]
        message = factor.to_tail() if end is factor.tail else factor.to_head(end)
        np.testing.assert_allclose(message, by_trying(factor, end), rtol=0, atol=1e-12)
        if end is not factor.tail and factor.is_once:
            factor.is_once = False  # the way that also knows consumers that run again
            np.testing.assert_array_equal(message, factor.to_head(end))
            factor.is_once = True
        other = ends[int(rng.integers(len(ends)))]
        other.message = rng.random(len(other.message)) if rng.random() < 0.5 else other.message - 0.1
