"""Every canonical op passes torch's own check: schema, fake implementation, autograd registration, AOT dispatch."""

from __future__ import annotations

import pytest
import torch

from .instances import overload
from .rule_instances import INSTANCES

NAMES = [name for name in INSTANCES if name.startswith("autopar.")]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name):
    differentiable = name.split(".")[1] in (
        "linear",
        "attention",
        "embedding",
        "vocab_loss",
        "grouped_mm",
        "fake_quantize",
        "ctc",
    )
    for args, kwargs in INSTANCES[name][:3]:
        if differentiable:
            args = tuple(
                a.clone().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() and i < 3 else a
                for i, a in enumerate(args)
            )
        torch.library.opcheck(overload(name), args, kwargs)
