"""Layouts that a user rules out."""

from __future__ import annotations

import pytest

import autopar
from autopar.errors import AutoparError
from autopar.models import build


def plan(forbid, model="mlp-tiny:layers=1", **options):
    module, inputs = build(model, batch=8, seq=4)
    return autopar.plan(module, "dp=2,tp=2", inputs, hardware="cpu-gloo", baselines=False, forbid=forbid, **options)


def test_what_is_forbidden_is_not_chosen():
    free = plan(None).layouts
    assert free["blocks.0.up.weight"] == "R"
    for forbid in ({"*.up.weight": "R"}, {"*.up.weight": ["R", "tp:S(0)", "tp:S(1)"]}):
        found = plan(forbid).layouts["blocks.0.up.weight"]
        assert found != "R" and found not in forbid["*.up.weight"]
    assert plan({"*.up.weight": "R"}, strategy="fsdp").strategy == "fsdp"


@pytest.mark.parametrize(("forbid", "message"), [
    ({"*.up.weight": "R"}, "no layout left"), ({"*.upp.*": "R"}, "matches no parameter"),
    ({"*": "ep:S(0)"}, "no axis 'ep'"), ({"*": "tp:T"}, "as a placement"), ("R", "what is forbidden"),
    ({"*": 3}, "what is forbidden"),
])  # fmt: skip
def test_errors(forbid, message):
    with pytest.raises(AutoparError, match=message) as error:
        plan(forbid, strategy="ddp")
    assert error.value.fix
