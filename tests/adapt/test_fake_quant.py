"""Tests of what FakeQuant accepts, what it adds to a model, and what it refuses."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.adapt import order
from autopar.adapt.grid import Grid
from autopar.errors import AdaptError
from tests.runtime import tiny

FakeQuant = autopar.FakeQuant


def test_words_that_say_the_same():
    assert (
        FakeQuant()
        == FakeQuant(torch.int8, "per_row")
        == FakeQuant("int8", granularity="per_axis")
        == FakeQuant.parse("int8")
    )
    assert FakeQuant("int4", group_size=32) == FakeQuant(torch.int4, "per_group", 32)
    config = FakeQuant.parse("int4,group_size=32,activations=int8, scale_precision=bfloat16, averaging_constant=0.1")
    same = dict(group_size=32, activations=torch.int8, scale_precision=torch.bfloat16, averaging_constant=0.1)
    assert config == FakeQuant("int4", **same)
    assert FakeQuant.parse("int3,range_learning=true,target_modules=.*up").target_modules == ".*up"
    assert Grid.from_json(config.weight_grid.to_json()) == config.weight_grid


@pytest.mark.parametrize("options, words", [
    (dict(dtype="int9"), "dtype='int9'(.|\n)*fix: one of int8"),
    (dict(dtype=torch.uint8), "dtype='uint8'"),
    (dict(activations="fp8"), "activations='fp8'"),
    (dict(granularity="per_group"), "granularity='per_group' and group_size=None"),
    (dict(granularity="per_channel", group_size=8), "granularity='per_channel' and group_size=8"),
    (dict(group_size=0), "group_size=0"),
    (dict(range_learning=True, mapping_type="asymmetric"), "range_learning has a trained scale"),
    (dict(averaging_constant=0), "averaging_constant=0"),
    (dict(target_modules=[]), "no target_modules"),
    (dict(observer="histogram"), "observer='histogram'"),
    (dict(scale_precision=torch.int8), "scale_precision=torch.int8"),
])  # fmt: skip
def test_values_that_mean_nothing(options, words):
    with pytest.raises(AdaptError, match=words):
        FakeQuant(**options)


@pytest.mark.parametrize("text, words", [
    ("int8,group", "no 'group'(.|\n)*group_size"), ("int8,groupsize=8", "group_size"), ("", "dtype=''"),
    ("int8,group_size=many", "group_size='many'(.|\n)*a number"),
    ("int8,range_learning=1", "range_learning='1'(.|\n)*true or false"),
])  # fmt: skip
def test_texts_that_cannot_be_read(text, words):
    with pytest.raises(AdaptError, match=words):
        FakeQuant.parse(text)


@pytest.mark.parametrize("options, words", [
    (dict(target_modules=["c_atn"]), "no module of the model is called 'c_atn'(.|\n)*c_attn"),
    (dict(group_size=7), "group_size=7 does not divide the 24 inputs of transformer.h.0.attn.c_attn(.|\n)*one of 4, 6, "
                         "8, or"),
    (dict(target_modules=["ln_1"]), "transformer.h.0.ln_1 is a LayerNorm"),
    (dict(exclude_modules=".*"), "leave no layer"),
])  # fmt: skip
def test_models_that_cannot_have_it(options, words):
    model, _ = tiny.gpt2()
    before = list(model.state_dict())
    with pytest.raises(AdaptError, match=words):
        order.attach(model, [FakeQuant(**options)])
    assert list(model.state_dict()) == before


def test_what_excludes_each_other():
    lora = dict(r=2, target_modules=["c_attn"])
    for adapt, words in (
        ([FakeQuant(), FakeQuant("int4")], "fake_quant twice"),
        ([autopar.LoRA(**lora, use_dora=True), FakeQuant()], "DoRA"),
        ([autopar.LoRA(r=2, target_parameters=["weight"]), FakeQuant()], "target_parameters"),
        ([autopar.LoRA(**lora), FakeQuant(range_learning=True)], "LoRA freezes the base"),
    ):
        with pytest.raises(AdaptError, match=words):
            order.checked(adapt)


def test_what_is_added_and_taken_away():
    model = nn.Sequential(nn.Linear(6, 4), nn.Linear(4, 2))
    config = FakeQuant(
        "int4", group_size=2, range_learning=True, activations="int8", activation_granularity="per_tensor"
    )
    with order.attached(model, [config]):
        added = {n: tuple(t.shape) for n, t in model.state_dict().items() if "quantizer" in n}
    ranges = {f"{i}.activation_fake_quantizer.{end}_val": () for i in range(2) for end in ("min", "max")}
    assert added == ranges | {"0.weight_fake_quantizer.scale": (4, 3), "1.weight_fake_quantizer.scale": (2, 2)}
    assert list(model.state_dict()) == ["0.weight", "0.bias", "1.weight", "1.bias"]
    to = order.attach(model, [config], "cpu")
    scale = 2 * model[0].weight.view(4, 3, 2).abs().mean(-1) / 7**0.5
    assert torch.allclose(model[0].weight_fake_quantizer.scale, scale)
    to.undo()
