"""The plan says what gathering an output sends if it is read: what is counted when a script reads it, and nothing
before."""

from __future__ import annotations

import json
import re

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from autopar import Plan
from autopar.models import registry
from tests.helpers import gloo

from .parity import device_mesh, pair, planned

MODEL = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=8"


class Gathered(TorchDispatchMode):
    """Counts the bytes that a device sends to gather."""

    def __init__(self):
        super().__init__()
        self.bytes_ = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional" and not re.search("wait|wrap", function.name()):
            assert "all_gather" in function.name()
            self.bytes_ += args[0].nbytes * (args[1] - 1)
        return function(*args, **(kwargs or {}))


def built():
    return registry.build(MODEL, batch=8, seq=8, device="cpu", seed=0)


def _read(rank: int, mesh: str, plan: Plan) -> None:
    model, inputs = built()
    parallel, reference = pair(model, device_mesh(mesh), inputs, plan=plan)
    out, whole = parallel(**inputs), reference(**inputs)
    said = {o.name: o for o in plan.outputs}
    assert {name: o.shape for name, o in said.items()} == {"loss": (), "logits": (8, 8, 64)}
    for name, output in said.items():
        with Gathered() as seen:
            torch.testing.assert_close(getattr(out, name).detach(), getattr(whole, name).detach())
        assert seen.bytes_ == output.wire_bytes, name
    with Gathered() as again:
        out.logits.sum()
    assert again.bytes_ == 0  # it is gathered once


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, options",
    [
        ("dp=2", dict(strategy="ddp")),
        ("dp=2,tp=2", dict(strategy="megatron_sp")),
        ("dp=2", dict(strategy="fsdp", micro_batches=2)),
    ],
)
def test_bytes_of_a_read_are_those_of_the_plan(mesh, options):
    plan = planned(*(lambda m, i: (m, mesh, i))(*built()), **options)
    logits = next(o for o in plan.outputs if o.name == "logits")
    assert logits.wire_bytes > 0 < logits.seconds
    assert f"logits (8, 8, 64)  {logits.layout}" in str(plan) and "sent by a device if read" in str(plan)
    gloo.run(plan.mesh.devices, _read, mesh, plan)


def test_stages_and_files(tmp_path):
    """The outputs are those of the whole batch; they are left out of files where none is in parts."""
    model, inputs = built()
    plan = planned(model, "pp=2,dp=2", inputs, micro_batches=2, strategy="ddp")
    (logits,) = [o for o in plan.outputs if o.name == "logits"]
    assert logits.shape == (8, 8, 64) and logits.wire_bytes == 4 * 8 * 8 * 64 / 2
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert json.loads((tmp_path / "plan.json").read_text())["outputs"][1]["layout"] == logits.layout
    whole = planned(model, "tp=1", inputs)
    assert whole.outputs == () and "outputs" not in whole.to_json() and "if read" not in str(whole)
