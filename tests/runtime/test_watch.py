"""A rank that dies, fails or stands still: every other one says which, where and in what step, and ends."""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import torch
from torch import fx

import autopar
from autopar._torch import c10d
from autopar.processes.watch import Guarded
from tests.helpers import faults

from .parity import planned

MESH, VICTIM = "dp=2,tp=2", 3


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned(faults.inputs()[0], MESH, faults.inputs()[1], strategy="megatron_sp")


WORDS = {
    "kill": "rank 3 died",
    "raise": "rank 3 failed in step .* with ValueError: a bad batch",
    "stop": "rank 3 does not answer",
    "sleep": r"rank 3 is at faults.py:\d+ in _main",
}


@pytest.mark.sampled(2)
@pytest.mark.gloo
@pytest.mark.parametrize("fault", WORDS)
def test_survivors_name_the_rank(fault, plan):
    """Also rank 0, which shares no group with rank 3."""
    outcome = faults.run(fault, MESH, plan, VICTIM, after=0.1)
    assert sorted(outcome.errors) == [0, 1, 2] and not outcome.silent and set(outcome.codes) == {3}, outcome
    assert outcome.named_right(fault, VICTIM), outcome
    for *_, text in outcome.errors.values():
        assert re.search(WORDS[fault], text), text
        assert "all_" in text or "reduce_scatter" in text, text
        assert "node: " in text and "source: mlp.py:" in text and "fix: " in text, text
    assert outcome.seconds < (faults.TIMEOUT_SECONDS if fault in faults.HANGS else 0) + 5, outcome


@pytest.mark.slow
@pytest.mark.gloo
def test_graphs_through_torch_compile(plan, fault="kill"):
    """They have no lines that tell which collective it was."""
    outcome = faults.run(fault, MESH, plan, VICTIM, after=0.1, seconds=120, backend="aot_eager")
    assert outcome.named_right(fault, VICTIM) and not outcome.silent, outcome
    for *_, text in outcome.errors.values():
        assert re.search(WORDS[fault], text) and re.search("the compiled (forward|backward) graph, step", text), text


def test_out_of_memory_is_told_as_that():
    """Also where a collective's result is allocated: no rank is asked, and none is blamed."""
    graph = fx.Graph()
    started = graph.call_function(c10d.all_reduce.default, (graph.placeholder("x"), "sum", "dp"))
    graph.output(graph.call_function(c10d.wait_tensor.default, (started,)))

    def fails(*values):
        raise torch.OutOfMemoryError("CUDA out of memory")

    watch = SimpleNamespace(calls=0, step=1, running=None, verdict=None)
    guarded = Guarded(watch, fx.GraphModule(torch.nn.Module(), graph), "backward", fails)
    guarded.code, guarded.at = fails.__code__, lambda line: (1, "all_reduce", started)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        guarded(torch.ones(2))
    assert watch.running is None
