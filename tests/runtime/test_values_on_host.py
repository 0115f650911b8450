"""Memory of a step whose saved values wait on the host: what an allocation tracker sees is what the plan says."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import autopar
from autopar.hardware.profile import Host, load
from autopar.models import build

from ..helpers.allocations import training_step

MODEL = "llama:hidden=32,layers=4,heads=2,kv_heads=2,ffn=64,vocab=64,seq=128"
MACHINE = replace(load("cpu-gloo"), host=Host(1e12, 4e9, 10**9))


@pytest.mark.slow
@pytest.mark.parametrize("micro_batches", [1, 2])
def test_peaks_fall_as_predicted(alone, micro_batches):
    options = {
        "hardware": MACHINE,
        "baselines": False,
        "micro_batches": micro_batches,
        "tile": "none",
        "strategy": "ddp",
    }
    peaks, gradients, host_bytes = [], [], []
    for share in (None, 0.55):
        torch.manual_seed(0)
        model, inputs = build(MODEL, batch=4, seq=128, device="cpu")
        memory = None if share is None else share * peaks[0][1]
        plan = autopar.plan(model, "dp=1,tp=1", inputs, memory=memory, offload="activations", **options)
        assert (plan.saved_on_host is None) == (share is None) and (memory is None or plan.peak_bytes <= memory)
        module = autopar.compile(model, alone, inputs, plan=plan)
        module(**inputs).loss.backward()
        gradients.append([p.grad.full_tensor().clone() for p in module.parameters()])
        module.zero_grad()
        seen = training_step(module, inputs, torch.optim.AdamW(module.parameters()), steps=1)
        peaks.append((seen.peak_bytes, plan.peak_bytes))
        host_bytes.append(seen.host_peak_bytes)
    for measured, predicted in peaks:
        assert 0.9 * predicted <= measured <= 1.02 * predicted
    assert host_bytes == [0, plan.saved_on_host.bytes_]
    assert peaks[1][0] < 0.6 * peaks[0][0]
    assert all(torch.allclose(one, other, rtol=1e-4, atol=1e-6) for one, other in zip(*gradients))
