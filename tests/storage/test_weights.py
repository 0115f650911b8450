"""weights=: a safetensors folder into the shards of a model on the meta device, and back into a folder."""

from __future__ import annotations

import json
import random

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import autopar
from autopar.errors import AutoparError, InputError, WeightsError
from autopar.ir.layout import Layout, local_part
from autopar.ir.mesh import Mesh
from autopar.storage.weights import Weights, shapes_of
from tests.helpers import gloo
from tests.helpers.random_layouts import random_layout
from tests.runtime import tiny
from tests.runtime.parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, full, planned

SMALL = dict(hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4)


def build(name: str):
    """(class, config) of a small model of transformers."""
    import transformers as t

    words = dict(SMALL, vocab_size=96, num_key_value_heads=2, head_dim=8)
    return {
        "llama": (t.LlamaForCausalLM, t.LlamaConfig(**words)),
        "gpt2": (t.GPT2LMHeadModel, t.GPT2Config(vocab_size=96, n_embd=24, n_layer=1, n_head=4)),
        "bert": (t.BertForSequenceClassification, t.BertConfig(vocab_size=96, **SMALL)),  # position ids
        "t5": (
            t.T5ForConditionalGeneration,
            t.T5Config(vocab_size=96, d_model=32, d_ff=48, num_layers=1, num_heads=4, d_kv=8),
        ),
        "gemma3": (t.Gemma3ForCausalLM, t.Gemma3TextConfig(**words)),  # a scale and two rotary tables as buffers
        "mixtral": (
            t.MixtralForCausalLM,
            t.MixtralConfig(**words, num_local_experts=4),
        ),  # files have a tensor an expert
        "vit": (
            t.ViTForImageClassification,
            t.ViTConfig(**SMALL, image_size=32, patch_size=8),
        ),  # files have other names
        "resnet": (
            t.ResNetForImageClassification,
            t.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1]),
        ),
    }[name]


def on_meta(cls, config) -> nn.Module:
    with torch.device("meta"):
        return cls(config)


@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "t5", "gemma3", "mixtral", "vit", "resnet"])
def test_every_part_of_every_tensor(name, tmp_path):
    """Random layouts, of each tensor the parts of all ranks; buffers that no file has."""
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, mesh = random.Random(seed), Mesh.parse("dp=2,tp=3")
    cls, config = build(name)
    source = cls(config)
    source.save_pretrained(tmp_path)
    model = on_meta(cls, config)
    weights, state = Weights(model, tmp_path), source.state_dict()
    for tensor, shape in shapes_of(model).items():
        layout = random_layout(rng, shape, mesh)
        for rank in range(mesh.devices):
            expected = local_part(state[tensor], layout, mesh, mesh.coordinate(rank))
            found = weights.part(tensor, state[tensor].dtype, layout, mesh, mesh.coordinate(rank))
            assert torch.equal(found, expected) and found.is_contiguous(), (tensor, str(layout))
    buffers = dict(source.named_buffers())
    for tensor, buffer in model.named_buffers():
        assert tensor in state or torch.equal(buffer, buffers[tensor]), tensor


def test_one_file_beside_shards(tmp_path):
    """The one file counts, as transformers resolves it."""
    cls, config = build("gpt2")
    cls(config).save_pretrained(tmp_path, max_shard_size="20KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    cls(config).save_pretrained(tmp_path / "other")
    (tmp_path / "other" / "model.safetensors").rename(tmp_path / "model.safetensors")
    wanted, mesh = cls.from_pretrained(tmp_path).state_dict(), Mesh.parse("dp=1")
    weights = Weights(on_meta(cls, config), tmp_path)
    for name in ("transformer.wte.weight", "transformer.h.0.attn.c_attn.weight"):
        found = weights.part(name, torch.float32, Layout.replicated(2), mesh, mesh.coordinate(0))
        assert torch.equal(found, wanted[name]), name


def test_prefixes(tmp_path):
    """A model with a head from the folder of one without, and the other way round."""
    from transformers import GPT2Model

    cls, config = build("gpt2")
    whole = cls(config)
    whole.save_pretrained(tmp_path / "head")
    whole.transformer.save_pretrained(tmp_path / "bare")
    layout, mesh = Layout.replicated(2), Mesh.parse("dp=1")
    for folder, kind, name in (("bare", cls, "lm_head.weight"), ("head", GPT2Model, "wte.weight")):
        weights = Weights(on_meta(kind, config), tmp_path / folder)
        assert torch.equal(weights.part(name, torch.float32, layout, mesh, {"dp": 0}), whole.lm_head.weight)


def test_another_model_is_described(tmp_path):
    model = tiny.Regressor(hidden=16)
    state = model.state_dict()
    state["extra"], state["down.weight"] = torch.ones(1), torch.ones(4, 15)
    del state["up.bias"]
    save_file(state, tmp_path / "model.safetensors")
    message = r"missing: up.bias; unexpected: extra; of another shape: down.weight \(4, 15\), not \(4, 16\)"
    with pytest.raises(WeightsError, match=message):
        Weights(model, tmp_path)


@pytest.mark.parametrize(
    "index, message",
    [
        (None, "neither model.safetensors nor"), ("[]", "not an index"), ('{"weight_map": {"a": 3}}', "outside"),
        ('{"weight_map": {"a": "../b.safetensors"}}', "outside"), ('{"weight_map": {"a": "b.safetensors"}}',
                                                                   "cannot read"),
    ],
)  # fmt: skip
def test_bad_folders(tmp_path, index, message):
    if index is not None:
        (tmp_path / "model.safetensors.index.json").write_text(index)
    with pytest.raises(WeightsError, match=message):
        Weights(tiny.Regressor(), tmp_path)


class Positions(nn.Module):
    """A buffer that nothing can compute but the constructor."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 4)
        self.register_buffer("scale", torch.arange(6.0), persistent=False)

    def forward(self, x):
        return self.linear(x * self.scale).sum()


def test_buffers_without_values(tmp_path, alone):
    source, (x, _) = Positions(), tiny.Regressor.batch()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    with torch.device("meta"):
        model = Positions()
    with pytest.raises(InputError, match="linear.weight is on the meta device"):
        autopar.compile(model, alone, (x,))
    with pytest.raises(WeightsError, match="meta device: scale"):
        autopar.compile(model, alone, (x,), weights=tmp_path)
    model.scale = source.scale
    assert_close(autopar.compile(model, alone, (x,), weights=tmp_path)(x), source(x))


def test_a_lower_precision_becomes_masters(tmp_path):
    cls, config = build("llama")
    source = cls(config).to(torch.bfloat16)
    source.save_pretrained(tmp_path)
    weights, layout, mesh = Weights(on_meta(cls, config), tmp_path), Layout(((), ("tp",))), Mesh.parse("tp=2")
    found = weights.part("lm_head.weight", torch.float32, layout, mesh, {"tp": 1})
    assert torch.equal(found, source.lm_head.weight[:, 16:].float())


def test_at_the_first_call(tmp_path, alone):
    source, (x, _) = tiny.Regressor(), tiny.Regressor.batch()
    save_file(source.state_dict(), tmp_path / "model.safetensors")
    model = autopar.compile(tiny.Regressor().to("meta"), alone, weights=tmp_path)
    assert_close(model(x), source(x))
    state = {name: value / 2 for name, value in model.state_dict().items()}
    model.load_state_dict(state)
    assert_close(full(model(x)), _halved(source)(x))
    assert model.load_state_dict(
        {"up.bias": torch.zeros(16), "other": torch.zeros(1)}, strict=False
    ).unexpected_keys == ["other"]
    with pytest.raises(RuntimeError, match="size mismatch for up.bias"):
        model.load_state_dict({"up.bias": torch.zeros(15)}, strict=False)


def _halved(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.div_(2)
    return model


class Generator(tiny.Regressor):
    config = {"hidden": 16}

    def generate(self, x):
        return self(x)

    def norms(self):
        return [p.norm() for p in self.parameters()]


def test_what_passes_through(alone):
    """Plain attributes do, and methods that call the model; not those that compute with parameters."""
    x, _ = tiny.Regressor.batch()
    source = Generator()
    source.words = ["a"]
    model = autopar.compile(source, alone, (x,))
    assert model.config is Generator.config and model.words is source.words
    assert torch.equal(model.generate(x), model(x))
    with pytest.raises(AutoparError, match="Generator.norms is a method of the source") as caught:
        model.norms()
    assert isinstance(caught.value, AttributeError) and "save_pretrained" in caught.value.fix


# between processes
# -----------------------------------------------------------------------------------------------------


def _there_and_back(rank, plan, inputs, config, folder):
    """From a folder, state dicts, to a folder; a fused weight is cut inside its parts."""
    from transformers import GPT2LMHeadModel

    mesh = device_mesh(str(plan.mesh))
    reference = GPT2LMHeadModel.from_pretrained(f"{folder}/in")
    reference.tie_weights()
    model = autopar.compile(on_meta(GPT2LMHeadModel, config), mesh, inputs, plan=plan, weights=f"{folder}/in")
    assert_same_values(model, reference, tolerance=0.0)
    for m in (model, reference):
        m(**inputs).loss.backward()
    assert_same_gradients(model, reference)

    state = model.state_dict()
    assert list(state) == list(reference.state_dict())
    strided = [name for name, value in state.items() if any("Strided" in repr(p) for p in value.placements)]
    assert not strided and any("Strided" in repr(p.placements) for p in model.parameters())
    for name, value in reference.state_dict().items():
        assert state[name].to_local().is_contiguous() and torch.equal(state[name].full_tensor(), value), name
    halves = {name: value.detach() / 2 for name, value in state.items()}
    model.load_state_dict(halves)
    assert all(torch.equal(p.full_tensor(), reference.get_parameter(n) / 2) for n, p in model.named_parameters())
    model.load_state_dict({name: value.detach() for name, value in reference.state_dict().items()})
    assert_same_values(model, reference, tolerance=0.0)

    model.save_pretrained(f"{folder}/out")
    again = GPT2LMHeadModel.from_pretrained(f"{folder}/out")
    assert torch.equal(again(**inputs).logits, reference(**inputs).logits)
    assert again.lm_head.weight is again.transformer.wte.weight


@pytest.mark.gloo
def test_there_and_back(tmp_path):
    source, inputs = tiny.gpt2(n_layer=1)
    source.save_pretrained(tmp_path / "in", max_shard_size="20KB")
    assert (tmp_path / "in" / "model.safetensors.index.json").exists()
    pins = {"*.c_attn.weight": "tp:S(1/3)", "*.c_attn.bias": "tp:S(0/3)"}
    plan = planned(source, "tp=2", inputs, pin=pins)
    (tmp_path / "out").mkdir()
    save_file(
        {"old": torch.ones(1)}, tmp_path / "out" / "model.safetensors"
    )  # of a former save: it would be loaded first
    gloo.run(2, _there_and_back, plan, inputs, source.config, str(tmp_path))
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())["weight_map"]
    names = {name for file in {*index.values()} for name in load_file(tmp_path / "out" / file)}
    assert names == {*index} == {n for n, _ in source.named_parameters()} and len({*index.values()}) == 2
