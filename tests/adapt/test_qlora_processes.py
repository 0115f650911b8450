"""QLoRA on real processes: compiled from values and from a folder, trained, saved and resumed."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

import autopar
from autopar import AdaptError
from autopar.models import build
from tests.helpers import gloo
from tests.runtime.parity import device_mesh, train


def llama(device: str):
    torch.manual_seed(0)
    return build("llama:hidden=512,layers=1,heads=8,kv_heads=4,ffn=1024,vocab=96,seq=16", batch=4, seq=8, device=device)


def bytes_of(parameters) -> int:
    return sum(p.to_local().numel() * p.element_size() for p in parameters)


def trained_saved_and_resumed(rank: int, folder: str):
    (model, batch), (empty, _), mesh = llama("cpu"), llama("meta"), device_mesh("dp=2")
    options = dict(adapt=[autopar.QLoRA(r=4, target_modules=["q_proj", "down_proj"])], strategy="fsdp")
    compiled = autopar.compile(model, mesh, batch, **options)
    names = {name for name, _ in compiled.named_parameters()}
    assert "layers.0.mlp.up_proj.weight_packed" in names and "layers.0.mlp.up_proj.weight" not in names
    read = autopar.compile(empty, mesh, batch, weights=f"{folder}/base", plan=compiled.plan, **options)
    for name, parameter in compiled.named_parameters():
        assert torch.equal(parameter.to_local(), read.get_parameter(name).to_local()), name

    trained = [p for p in compiled.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01)
    losses = train(compiled, batch, 2, optimizer=optimizer)
    autopar.save_checkpoint(f"{folder}/steps", compiled, optimizer, step=2)
    losses += train(compiled, batch, 2, optimizer=optimizer)
    after = {n: p.to_local().clone() for n, p in compiled.named_parameters()}
    autopar.load_checkpoint(f"{folder}/steps", compiled, optimizer)
    assert train(compiled, batch, 2, optimizer=optimizer) == losses[2:]
    assert all(torch.equal(after[n], p.to_local()) for n, p in compiled.named_parameters())

    with compiled.disable_adapter(), torch.no_grad():
        assert compiled(**batch).loss.item() == pytest.approx(losses[0])
    for refused in (compiled.merge_adapter, lambda: compiled.save_pretrained(f"{folder}/merged")):
        with pytest.raises(AdaptError, match="quantized"):
            refused()
    compiled.save_adapter(f"{folder}/adapter")
    packed = [p for n, p in compiled.named_parameters() if "weight_" in n]
    return losses, bytes_of(packed), bytes_of(compiled.parameters()), compiled.plan.memory["parameters"]


@pytest.mark.slow
def test_training_on_two_processes(tmp_path):
    model, _ = llama("cpu")
    (tmp_path / "base").mkdir()
    save_file(model.state_dict(), tmp_path / "base" / "model.safetensors")
    results = gloo.run(2, trained_saved_and_resumed, str(tmp_path))
    losses, packed, held, planned = results[0]
    assert all(other == losses for other, *_ in results) and losses[-1] < losses[0]
    assert held == planned and all(h <= planned for _, _, h, _ in results)
    weights = sum(
        m.weight.numel() for n, m in model.named_modules() if isinstance(m, torch.nn.Linear) and n != "lm_head"
    )
    assert 4.125 < 8 * packed / (weights / 2) <= 4.13
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert config["peft_type"] == "LORA" and "quant_type" not in config
