"""Random programs against eager mode, on one process, on several, and on simulated devices (see random_programs.py).

python benchmarks/faithful.py --count 5000
"""

from __future__ import annotations

import pytest

from .processes import run_all
from .random_programs import drawn, judge_random, kind_of, simulated
from .runner import BROKEN, judge

FIRST = 20_000  # of the seeds of these tests


def _seeds(kind: str, count: int) -> list[int]:
    return [seed for seed in range(FIRST, FIRST + 100 * count) if kind_of(seed) == kind][:count]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", _seeds("simulated", 2))
def test_simulated(seed):
    print(f"seed {seed}")
    outcome = simulated(seed)
    assert outcome.kind not in BROKEN, f"seed {seed}: {outcome.detail}"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", _seeds("1", 2))
def test_alone(alone, seed):
    print(f"seed {seed}")
    program, mesh, options = drawn(seed, 1)
    outcome = judge(program, mesh, **options)
    assert outcome.kind not in BROKEN, f"seed {seed}: {outcome.detail}"


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", ["simulated", "2", "4"])
def test_many(kind):
    jobs = [(kind, seed, 120) for seed in _seeds(kind, 30)]
    outcomes = run_all(1 if kind == "simulated" else int(kind), judge_random, jobs, 150)
    wrong = [
        f"seed {seed}: {outcome.kind} {outcome.detail}" for (_, seed, _), outcome in outcomes if outcome.kind in BROKEN
    ]
    assert not wrong, "\n".join(wrong)
