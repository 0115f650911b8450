"""Memory over the step: what the planner charges is there when the backward begins, and nothing is left at the end."""

from __future__ import annotations

import numpy as np
import pytest

from autopar.planner.blocks import Blocks
from autopar.planner.live_bytes import AGAIN, GATHERED, GRADIENTS, KEPT, PASSING, SAVED, STAYING, ends_of, live_bytes

from .test_timeline import TWO_BLOCKS, planned


@pytest.mark.parametrize("strategy", [None, "ddp", "zero1", "zero2", "fsdp", "megatron", "megatron_sp"])
def test_what_is_charged_is_alive_between_forward_and_backward(strategy):
    found = planned(TWO_BLOCKS, "dp=2,tp=2", strategy)
    live, e = found.live_bytes, found.evaluation
    last = max(i for i, run in enumerate(live.order.runs) if run.phase == "forward")
    saved = sum(live.kinds.get(kind, np.zeros(last + 1))[last] for kind in (SAVED, KEPT))
    assert saved == pytest.approx(e.saved_bytes)
    assert sum(live.most.get(kind, 0.0) for kind in (*STAYING, GRADIENTS)) == pytest.approx(
        e.resident_bytes + e.gradient_bytes + e.whole_gradient_bytes)  # fmt: skip
    assert live.peak_bytes == pytest.approx(e.bytes_) and live.total[live.peak_at] == live.peak_bytes
    for kind in (SAVED, KEPT, GATHERED, PASSING):
        if kind in live.kinds:
            assert (live.kinds[kind] >= 0).all() and live.kinds[kind][-1] < live.kinds[kind].max() / 2
    ends = ends_of(live.order, found.timeline)
    assert ends == sorted(ends) and len(ends) == len(live.order.runs)


def test_gathered_parameters_are_those_of_two_blocks_at_most():
    live = planned(TWO_BLOCKS.replace("layers=2", "layers=4"), "dp=4", "fsdp").live_bytes
    block = 4 * (12 * 32 * 32 + 13 * 32)
    assert block / 2 < live.kinds[GATHERED].max() <= 2.2 * block


def test_a_recomputed_block_is_alive_again_in_the_backward():
    found = planned(TWO_BLOCKS, "dp=2,tp=2", "megatron")
    blocks = Blocks(found.problem)
    e, _ = blocks.fit(found.evaluation, blocks.least_bytes(found.evaluation) + 1)
    live = live_bytes(found.problem, e, found.pricer)
    backward = min(i for i, run in enumerate(live.order.runs) if run.phase == "backward")
    assert live.kinds[AGAIN][:backward].max() == 0 < live.kinds[AGAIN][backward:].max()
    assert live.kinds[SAVED].max() < found.live_bytes.kinds[SAVED].max() / 2
