"""Every script gives on many devices what it gives in one process: what it logs, gradients at each step, final values.

pytest tests/everyday -m ""                            # all scripts on all meshes
python -m tests.everyday.run --mesh dp=2 gan vae       # two of them, many on one start of the processes
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faithful.runner import AT_CALL, EQUAL

from .catalogue import SCRIPTS
from .not_yet import NOT_YET
from .run import outcomes

QUICK = (
    "tasks_weighted_by_their_uncertainty", "gan", "distillation_from_a_parallel_teacher",
    "momentum_encoder_with_a_queue", "frozen_encoder_thawed_later", "distributed_sampler", "lengths_by_rank",
)  # fmt: skip


def _check(mesh: str, names, **options) -> None:
    wrong = [f"{name}: {outcome}" for name, outcome in outcomes(mesh, names, **options) if outcome.kind != EQUAL]
    assert not wrong, "\n".join(wrong)


@pytest.mark.gloo
def test_two_processes():
    _check("dp=2", QUICK)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(
    "mesh, strategy", [("dp=2", None), ("dp=2", "fsdp"), ("dp=2,tp=2", None), ("dp=2,tp=2", "megatron")]
)
def test_all(mesh, strategy):
    _check(mesh, [name for name in SCRIPTS if name not in NOT_YET], strategy=strategy)


@pytest.mark.gloo
def test_not_yet():
    """A script that does not run is refused with a remedy, and docs/trainers.md says so."""
    listed = (Path(__file__).parents[2] / "docs/trainers.md").read_text()
    for name, outcome in outcomes("dp=2", NOT_YET):
        assert outcome.kind == AT_CALL, f"{name}: {outcome}; what is equal now is taken out of not_yet.py"
        assert "fix: " in outcome.detail and f"`{name}`" in listed, f"{name}: {outcome}"
    assert len(SCRIPTS) - len(NOT_YET) >= 68
