"""Quantization-aware training of compiled models, the modes of its observers, and the integers that come out."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.adapt.quantized_weight import pack, unpack
from autopar.errors import AdaptError
from tests.helpers import gloo
from tests.helpers.mixture import Mixture

from . import tiny
from .parity import device_mesh, full, planned, train

pytestmark = pytest.mark.usefixtures("kept")

STATIC = dict(activations="int8", activation_granularity="per_tensor")


def _compiled(model, mesh, batch, *adapt):
    return autopar.compile(model, mesh, batch, adapt=adapt, strategy="ddp")


def _state(model) -> dict[str, torch.Tensor]:
    return {name: full(t).detach().clone() for name, t in model.state_dict().items()}


def _outputs(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return full(model(**batch).logits)


def _fit_and_convert(rank, text, mesh, plan, folder):
    """(losses, state, difference of the converted model's outputs, what of it was read back differently)."""
    config = autopar.FakeQuant.parse(text)
    model, batch = tiny.gpt2(n_layer=1)
    model = autopar.compile(model, device_mesh(mesh), batch, plan=plan, adapt=[config])
    assert any(p.to_local().numel() < p.numel() for p in model.parameters())
    losses = train(model, batch, 3, lr=3e-3)
    expected = _outputs(model.eval(), batch)
    plain = autopar.convert(model, folder)
    difference = (_outputs(plain, batch) - expected).abs().max() / expected.abs().max()
    read = autopar.load_quantized(tiny.gpt2(n_layer=1)[0], folder)
    return losses, _state(model), difference.item(), (_outputs(read, batch) - _outputs(plain, batch)).abs().max().item()


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, text", [
    ("tp=2", "int4,group_size=8,range_learning=true"),
    ("dp=2,tp=2", "int8,activations=int8,activation_granularity=per_tensor,averaging_constant=0.5"),
])  # fmt: skip
def test_processes_train_and_convert(mesh, text, tmp_path):
    model, batch = tiny.gpt2(n_layer=1)
    plan = planned(model, mesh, batch, strategy="megatron", adapt=[autopar.FakeQuant.parse(text)])
    ranks = gloo.run(plan.mesh.devices, _fit_and_convert, text, mesh, plan, tmp_path)
    for losses, state, difference, read in ranks:
        assert losses[-1] < losses[0] and losses == ranks[0][0]
        assert difference < 1e-5 and read == 0
        assert all(torch.equal(value, ranks[0][1][name]) for name, value in state.items())
    assert all(torch.isfinite(value).all() for value in ranks[0][1].values())
    assert sum("fake_quantizer" in name for name in ranks[0][1]) == (4 if "learning" in text else 8)


def test_observers_run_and_rest(alone):
    """Train mode moves the ranges, eval mode and freezing do not; before any range inputs are left as they are."""
    model, batch = tiny.regressor()
    model = _compiled(model, alone, batch, autopar.FakeQuant(**STATIC))

    def moved() -> bool:
        before = _state(model)
        model(**batch)
        return any(not torch.equal(value, before[name]) for name, value in _state(model).items())

    model.eval()
    untouched = _outputs(model, batch)
    assert torch.isfinite(untouched).all() and not moved()
    model.train()
    assert moved()
    model.freeze_observers()
    assert model.train().training and not moved()
    model.freeze_observers(False)
    model.up.weight.data.mul_(4.0)
    assert moved()
    assert not torch.equal(_outputs(model.eval(), batch), untouched) and not moved()
    words = [call.partition("; ")[2] for call in model.captures]
    assert words[0] == "train" and any(word.endswith("activation_fake_quantizer eval") for word in words)


def test_frozen_ranges_come_from_a_state_dict(alone):
    model, batch = tiny.regressor()
    state = _compiled(model, alone, batch, autopar.FakeQuant(**STATIC))
    state(**batch)
    model, batch = tiny.regressor()
    frozen = _compiled(model, alone, batch, autopar.FakeQuant(**STATIC, observer="frozen"))
    frozen.load_state_dict(state.state_dict())
    frozen(**batch)
    assert all(torch.equal(value, _state(state)[name]) for name, value in _state(frozen).items())


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("text", [
    "int8", "int3", "int4,mapping_type=asymmetric,activations=int8", "int4,group_size=8,scale_precision=bfloat16",
])  # fmt: skip
def test_converted_layers(alone, text):
    """Outputs are those of the fake-quantized model; stored values are what the dtype says."""
    model, batch = tiny.llama(num_hidden_layers=1)
    config = autopar.FakeQuant.parse(text)
    model = _compiled(model, alone, batch, config).eval()
    plain = autopar.convert(model)
    expected = _outputs(model, batch)
    assert (_outputs(plain, batch) - expected).abs().max() <= 1e-5 * expected.abs().max()
    layer = plain.model.layers[0].mlp.up_proj
    assert layer.weight.dtype is (torch.int8 if config.dtype == "int8" else torch.uint8)
    assert layer.weight.numel() == 48 * 32 // (1 if config.dtype == "int8" else 2)
    assert not any("quantizer" in name for name in plain.state_dict())


@pytest.mark.slow
def test_converted_embeddings_and_merged_adapters(alone):
    model, batch = tiny.gpt2(n_layer=1)
    lora = autopar.LoRA(r=2, target_modules=["c_attn"], init_lora_weights=False)
    quant = autopar.FakeQuant("int4", target_modules=["wte", "c_attn"])
    model = _compiled(model, alone, batch, lora, quant).eval()
    with pytest.raises(AdaptError, match="merge_adapter"):
        autopar.convert(model)
    model.merge_adapter()
    plain = autopar.convert(model)
    expected = _outputs(model, batch)
    assert (_outputs(plain, batch) - expected).abs().max() <= 1e-5 * expected.abs().max()
    assert plain.transformer.wte.weight.dtype is torch.uint8 and plain.lm_head.weight.dtype is torch.float32
    assert not any("lora" in name for name, _ in plain.named_modules())


def test_what_cannot_be_converted(alone, tmp_path):
    model, batch = tiny.regressor()
    compiled = _compiled(model, alone, batch, autopar.FakeQuant(**STATIC))
    with pytest.raises(AdaptError, match="were never observed"):
        autopar.convert(compiled)
    with pytest.raises(AdaptError, match="compiled without FakeQuant"):
        autopar.convert(tiny.regressor()[0])
    compiled(**batch)
    autopar.convert(compiled, tmp_path)
    with pytest.raises(AdaptError, match="of another model"):
        autopar.load_quantized(tiny.gpt2(n_layer=1)[0], tmp_path)
    with pytest.raises(AdaptError, match="cannot read"):
        autopar.load_quantized(tiny.regressor()[0], tmp_path / "none")


@pytest.mark.parametrize("count", [1, 6, 7])
def test_two_values_a_byte(count):
    q = torch.randint(-8, 8, (5, count), dtype=torch.int8)
    assert pack(q).shape == (5, (count + 1) // 2) and torch.equal(unpack(pack(q), count), q)


def _stacks(kind: str, text: str):
    """A compiled layer of experts whose stacks are quantized, and a batch."""
    config = autopar.FakeQuant.parse(f"{text},target_parameters=gate_up_proj+down_proj,target_modules=router")
    return Mixture(kind).float(), dict(x=torch.randn(4, 5, 16)), config


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gpt_oss", "mixtral"])
@pytest.mark.parametrize("text", ["int4,group_size=4,range_learning=true", "int8", "int3,mapping_type=asymmetric"])
def test_converted_stacks_of_experts(alone, tmp_path, kind, text):
    """The module of the experts reads integers where it read its parameters, also when they are loaded from a folder;
    other modules of its class do not."""
    source, batch, config = _stacks(kind, text)
    model = autopar.compile(source, alone, batch, adapt=[config], strategy="ddp").eval()
    plain = autopar.convert(model, tmp_path)
    with torch.no_grad():
        expected, found = full(model(**batch)["y"]), plain(**batch)["y"]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()
    stored = plain.experts.gate_up_proj_quantized.weight
    assert stored.dtype is (torch.int8 if config.dtype == "int8" else torch.uint8)
    assert stored.numel() == 4 * 16 * 16 // (1 if config.dtype == "int8" else 2)
    assert "gate_up_proj" not in dict(plain.experts.named_parameters())
    read = autopar.load_quantized(Mixture(kind).float(), tmp_path)
    assert torch.equal(read(**batch)["y"], found) and "4, 16, 16" in str(read)
    assert Mixture(kind).experts.gate_up_proj.requires_grad
    with pytest.raises(AdaptError, match="of another model"):
        autopar.load_quantized(tiny.regressor()[0], tmp_path)


def _train_and_convert(rank, kind, text, mesh):
    """(losses, difference of the converted layer's outputs, share of the stacks' elements on this rank)."""
    source, batch, config = _stacks(kind, text)
    model = autopar.compile(source, device_mesh(mesh), batch, adapt=[config], strategy="expert", hardware="cpu-gloo")
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(4):
        loss = model(**batch)["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    stack = model.get_parameter("experts.gate_up_proj")
    with torch.no_grad():
        expected, found = full(model.eval()(**batch)["y"]), autopar.convert(model)(**batch)["y"]
    return (
        losses,
        ((found - expected).abs().max() / expected.abs().max()).item(),
        stack.to_local().numel() / stack.numel(),
    )


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("kind, text", [("mixtral", "int4,group_size=4"), ("gpt_oss", "int4,range_learning=true")])
def test_processes_train_and_convert_stacks_of_experts(kind, text):
    for losses, difference, share in gloo.run(2, _train_and_convert, kind, text, "ep=2"):
        assert losses[-1] < losses[0] and difference < 1e-5 and share == 0.5
