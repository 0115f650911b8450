"""Checks that tests of passes which quantize layers share."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar import compiler
from autopar.errors import AdaptError
from autopar.frontend.fake_parameters import forms_of


def traced(model, batch, adapt, precision="fp32"):
    return compiler.trace(model, batch, None, forms_of(model), precision, adapt)


def assert_the_same_again(run, model, batch, op: str, count: int) -> None:
    """A pass finds as many layers each time, and leaves those alone that it has done."""
    exported = autopar.frontend.export.export(model, batch, None, forms_of(model))
    autopar.passes.canonicalize.rewrite.canonicalize(exported.graph_module)
    texts = [str(run(exported, model).graph_module.graph) for _ in range(2)]
    assert texts[0] == texts[1] and texts[0].count(op) == count


class Squared(nn.Module):
    """Its weight is read as a matrix of its own."""

    def __init__(self, width: int):
        super().__init__()
        self.layer, self.unused = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return (self.layer.weight @ self.layer.weight + x).sum()


def assert_refused_of_other_ops(adaptation, width: int, target: str, words: str) -> None:
    """A weight that goes elsewhere than into its layer is an error that says so."""
    adapt = [adaptation(target_modules=[target])]
    with pytest.raises(AdaptError, match=f"{target}.weight {words}(.|\n)*exclude_modules"):
        autopar.plan(Squared(width), "dp=2", (torch.randn(width, width),), adapt=adapt)


OTHER_OPS = [("layer", "goes into aten"), ("unused", "is not used in this call")]
