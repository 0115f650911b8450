"""FP8 accepts some words, takes some layers, and refuses the others."""

from __future__ import annotations

import logging

import pytest
from torch import nn

import autopar
from autopar.adapt import order
from autopar.adapt.fp8 import sites_of
from autopar.errors import AdaptError
from tests.runtime import tiny

FP8 = autopar.FP8


class Mixed(nn.Module):
    def __init__(self):
        super().__init__()
        self.words, self.a, self.b = nn.Embedding(256, 256), nn.Linear(256, 128), nn.Linear(128, 144)
        self.c, self.lm_head = nn.Linear(144, 20), nn.Linear(256, 128)


def _layers(*adapt) -> list[str]:
    model = Mixed()
    with order.attached(model, order.checked(adapt)):
        found = [path for path, _, _ in sites_of(model)]
    assert not list(sites_of(model))
    return found


def test_words_that_say_the_same():
    assert FP8() == FP8("block") == FP8.parse("block")
    for config in (FP8(), FP8("auto", target_modules=r".*\.up"), FP8("tensor", ["a", "b"], ["c"])):
        assert FP8.parse(config.text) == config
    assert FP8.parse("tensor,exclude_modules=o_proj+down_proj") == FP8(
        "tensor", exclude_modules=["o_proj", "down_proj"]
    )


def test_which_layers(caplog):
    with caplog.at_level(logging.INFO, "autopar"):
        assert _layers(FP8()) == ["a"] and "leaves 2 layers in their precision: b, c" in caplog.text
    assert _layers(FP8("tensor")) == ["a", "b"]
    assert _layers(FP8("tensor", exclude_modules=["a"])) == ["b"]
    assert _layers(FP8(target_modules=["lm_head"])) == ["lm_head"]
    assert _layers(FP8(target_modules=["a"]), autopar.LoRA(target_modules=["b"])) == ["a"]


@pytest.mark.parametrize("make, words", [
    (lambda: FP8("row"), "recipe='row'(.|\n)*fix: one of auto, block, tensor"),
    (lambda: FP8(target_modules=[]), "no target_modules"),
    (lambda: FP8.parse("block,target=a"), "no 'target'(.|\n)*target_modules"),
    (lambda: _layers(FP8(target_modules=["b"])), "b has 128 inputs and 144 outputs(.|\n)*128(.|\n)*tensor"),
    (lambda: _layers(FP8("tensor", target_modules=["c"])), "c has 144 inputs and 20 outputs(.|\n)*multiples of 16"),
    (lambda: _layers(FP8(target_modules=["words"])), "words is a Embedding"),
    (lambda: _layers(FP8(target_modules=["aa"])), "no module of the model is called 'aa'"),
    (lambda: _layers(FP8("auto")), "for autopar.plan and compile(.|\n)*fix: give FP8"),
    (lambda: _layers(FP8(exclude_modules=".*")), "leave no layer"),
    (lambda: _layers(FP8(exclude_modules=["a"])), "multiples of 128"),
    (lambda: _layers(FP8(), FP8("tensor")), "fp8 twice"),
    (lambda: _layers(FP8(), autopar.FakeQuant()), "both fp8 and fake_quant"),
    (lambda: _layers(FP8(), autopar.QLoRA(target_modules=["a"])), "both fp8 and qlora"),
])  # fmt: skip
def test_what_is_refused(make, words):
    with pytest.raises(AdaptError, match=words):
        make()


def test_transposed_weights():
    model, _ = tiny.gpt2(n_layer=1, n_embd=128)
    with order.attached(model, [FP8()]):
        found = [path.rpartition(".")[2] for path, _, _ in sites_of(model)]
    assert found == ["c_attn", "c_proj", "c_fc", "c_proj"]
