"""A step of attention that is written out equals one device's to 1e-10 under every cut of its sequence, and the plan
names the cut."""

from __future__ import annotations

import itertools

import pytest

from autopar.simulate.compare import verify_model

from ..helpers.written_attention import KINDS, Model, inputs_of

CUTS = [  # mesh, strategy, what the plan calls it, length
    ("cp=2", "ring", "ring over cp", 16),
    ("cp=3", "ring", "ring over cp", 13),
    ("cp=4", "ring", "ring over cp", 16),
    ("cp=2", "all_gather_kv", "all_gather_kv over cp", 13),
    ("cp=4", "all_gather_kv", "all_gather_kv over cp", 16),
    ("cp=3", "ulysses", "ulysses over cp", 13),
    ("cp=2,up=2", "ring+ulysses", "ring over cp", 16),
    ("dp=2,cp=2", "ring+fsdp", "ring over cp", 13),
    ("cp=2,tp=2", "all_gather_kv+megatron_sp", "all_gather_kv over cp", 16),
]
CASES = [
    (kind, padding, kv_heads, *cut)
    for kind, padding, kv_heads, cut in itertools.product(KINDS, ("", "left", "right"), (12, 6, 3), CUTS)
    if not (padding and kind == "plain") and (kind, padding) != ("filled_inf", "left")  # whose softmax is NaN
]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES[::7], ids=lambda case: "-".join(map(str, case)))
def test_every_form_under_every_cut(case):
    """A prime stride meets all forms, paddings, heads and cuts."""
    kind, padding, kv_heads, mesh, strategy, scheme, length = case
    report = verify_model(Model(kind, 12, kv_heads, padding), inputs_of(length, padding), mesh, strategy=strategy)
    assert report.match and max(report.errors.values()) <= 1e-10, report
    (attention,) = report.plan.attentions
    assert attention.scheme.startswith(scheme) and "written out" not in attention.scheme


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["softcap", "sinks", "alibi", "bias", "bias_of_keys", "all"])
def test_causal_forms_in_zigzag(kind):
    report = verify_model(Model(kind, 8, 4), inputs_of(16), "cp=2", strategy="ring", pin={"input_ids": "cp:Z(1)"})
    assert report.match and max(report.errors.values()) <= 1e-10, report
    assert report.plan.attentions[0].scheme == "ring over cp in zigzag"
