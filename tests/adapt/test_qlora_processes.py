"""QLoRA on real processes: compiled from values and from a folder, trained, saved and resumed, its adapter loaded by PEFT."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar import AdaptError
from tests import gloo
from tests.runtime.parity import device_mesh

from .quantized_base import language_model


def take_steps(model, optimizer, batch, count: int) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def bytes_of(parameters) -> int:
    return sum(p.to_local().numel() * p.element_size() for p in parameters)


def trained_saved_and_resumed(rank: int, folder: str):
    model, batch = language_model("llama")
    options = dict(adapt=[autopar.QLoRA(r=4, block_size=32, target_modules=["q_proj", "down_proj"])], strategy="fsdp")
    with torch.device("meta"):
        empty = language_model("llama")[0]
    compiled = autopar.compile(model, device_mesh("dp=4"), batch, **options)
    read = autopar.compile(empty, device_mesh("dp=2,x=2"), batch, weights=f"{folder}/base", **options)
    names = {name for name, _ in compiled.named_parameters()}
    assert "model.layers.0.mlp.up_proj.weight_packed" in names and "model.layers.0.mlp.up_proj.weight" not in names
    for name, parameter in compiled.named_parameters():
        if "weight_" in name:
            assert torch.equal(parameter.full_tensor(), read.get_parameter(name).full_tensor()), name

    trained = [p for p in compiled.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = take_steps(compiled, optimizer, batch, 2)
    autopar.save_checkpoint(f"{folder}/steps", compiled, optimizer, step=2)
    losses += take_steps(compiled, optimizer, batch, 2)
    after = {n: p.to_local().clone() for n, p in compiled.named_parameters()}
    autopar.load_checkpoint(f"{folder}/steps", compiled, optimizer)
    assert take_steps(compiled, optimizer, batch, 2) == losses[2:]
    assert all(torch.equal(after[n], p.to_local()) for n, p in compiled.named_parameters())
    autopar.load_checkpoint(f"{folder}/steps", read)  # on another mesh
    torch.testing.assert_close(read(**batch).loss.item(), losses[2])

    with compiled.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(compiled(**batch).loss.item(), losses[0])
    for refused in (compiled.merge_adapter, lambda: compiled.save_pretrained(f"{folder}/merged")):
        with pytest.raises(AdaptError, match="quantized"):
            refused()
    compiled.save_adapter(f"{folder}/adapter")
    frozen = [p for p in compiled.parameters() if not p.requires_grad]
    packed = [p for n, p in compiled.named_parameters() if "weight_" in n]
    return losses, bytes_of(packed), bytes_of(frozen) + bytes_of(trained), compiled.plan.memory["parameters"]


def test_training_on_four_processes(tmp_path):
    peft = pytest.importorskip("peft")
    model, _ = language_model("llama")
    model.save_pretrained(tmp_path / "base")
    results = gloo.run(4, trained_saved_and_resumed, str(tmp_path))
    losses, packed, held, planned = results[0]
    assert all(other == losses for other, *_ in results) and losses[-1] < losses[0]
    assert held == planned and all(h <= planned for _, _, h, _ in results)
    weights = sum(m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head")
    bits = 8 * packed / (weights / 4)
    assert 4.25 < bits <= 4.35  # blocks of 32, and steps that four devices cannot share evenly
    adapter = peft.PeftModel.from_pretrained(model, str(tmp_path / "adapter"))
    assert any(p.any() for n, p in adapter.named_parameters() if "lora_B" in n)
