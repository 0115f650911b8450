"""Plans for GPUs, and only they, count what an op allocates while it runs, at local sizes."""

from __future__ import annotations

import pytest
import torch

from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.ops.workspace import workspace_bytes
from autopar.planner.objective.memory_timeline import WORKSPACE
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions

from .planning import captured

BATCH, SEQ, HEADS, WIDTH, VOCAB = 8, 512, 4, 64, 1024
MODEL = f"llama:hidden={HEADS * WIDTH},layers=1,heads={HEADS},kv_heads=2,ffn=64,vocab={VOCAB},seq={SEQ}"


def on(hardware: str, mesh: str, strategy: str):
    options = PlanOptions(load(hardware), strategy=strategy, precision="fp32", baselines=False)
    return search(captured(MODEL, BATCH, SEQ), Mesh.parse(mesh), options).live_bytes


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh, strategy, dp, tp", [("dp=2", "ddp", 2, 1), ("dp=2,tp=2", "megatron", 2, 2)])
def test_of_a_local_op(mesh, strategy, dp, tp):
    """The backward of attention needs most, and then that of the loss."""

    def tensor(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    q = tensor(BATCH // dp, HEADS // tp, SEQ, WIDTH)
    kv = tensor(BATCH // dp, 2 // tp, SEQ, WIDTH)
    attention = workspace_bytes(autopar.attention_bw.default, q, q, kv, kv, q, tensor(*q.shape[:3]), None, True, None)
    logits, row = tensor(BATCH // dp * SEQ, VOCAB // tp), tensor(BATCH // dp * SEQ)
    loss = workspace_bytes(autopar.vocab_loss_bw.default, row, row, logits, row, row, 0)
    held = on("h100", mesh, strategy).kinds[WORKSPACE]
    assert held.max() == max(attention, loss) and attention in held and loss in held


def test_of_a_cpu():
    assert WORKSPACE not in on("cpu-gloo", "dp=2", "ddp").kinds
