"""An out-of-memory error says what the plan had counted with."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.models import build
from autopar.plans import out_of_memory
from autopar.runtime.gradient_graph import GradientGraph
from autopar.runtime.loaded import LoadedGraph


@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_an_error_in_a_graph_names_the_plans_biggest_items(phase, alone, monkeypatch):
    """It is still torch's own error, for whoever waits for that."""
    model, inputs = build("gpt2-tiny", batch=2, seq=8, device="cpu")
    kind = GradientGraph if phase == "backward" else LoadedGraph

    def full(graph, values):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    module = autopar.compile(model, alone, inputs)
    monkeypatch.setattr(kind, "__call__", full)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate 2.00 GiB") as caught:
        module(**inputs).loss.backward()
    (said,) = caught.value.__notes__
    biggest = max(module.plan.at_peak, key=module.plan.at_peak.__getitem__)
    assert said == out_of_memory.note(module.plan)
    assert f"{biggest}," in said or f"{biggest}." in said
    assert (
        "a device at its peak, of a limit of 8.00 GiB" in said and 'fix: compile with a lower limit (memory="' in said
    )
