"""Values that are not tensors, as JSON and back."""

from __future__ import annotations

import json
from collections import Counter

import pytest
import torch

from autopar.errors import CheckpointError
from autopar.storage.plain import canonical, decode, encode


@pytest.mark.parametrize(
    "value",
    [
        None, True, 0, -(2**70), 1e-300, float("inf"), "text", [1, [2.5, None]], (1, (2, [3])), {"a": 1},
        {1: "one", (2, 3): "two"}, {"!tuple": [1]}, Counter({3: 2}), {"betas": (0.9, 0.999), "lr": 0.1 + 0.2},
    ],
)  # fmt: skip
def test_round_trip(value):
    again = decode(json.loads(canonical(encode(value, "value"))))
    assert again == value and type(again) is type(value)


def test_tensors_and_nan():
    for value in (torch.tensor(0.1), torch.tensor([[1, 2]]), torch.tensor([0.1, float("inf")], dtype=torch.bfloat16)):
        again = decode(json.loads(canonical(encode(value, "value"))))
        assert torch.equal(again, value) and again.dtype == value.dtype
    assert decode(encode(float("nan"), "value")) != decode(encode(float("nan"), "value"))


def test_anything_else_is_refused():
    with pytest.raises(CheckpointError, match=r"scheduler\['f'\]\[1\] is a function"):
        encode({"f": [0, lambda: 0]}, "scheduler")
