import pytest

import autopar
from autopar.models import build
from autopar.plan import Region
from autopar.view.plan_text import in_tree_order, summary


@pytest.mark.parametrize("model", ["gpt2-tiny", "mlp-tiny"])
def test_plan(model, golden):
    module, inputs = build(model, batch=8, seq=64)
    plan = autopar.plan(module, "dp=2,tp=2", inputs, hardware="cpu-gloo", name=model)
    text = str(plan)
    assert text.startswith(summary(plan)) and text.endswith("\n")
    assert all(line == line.rstrip() and "0.0000" not in line for line in text.splitlines())
    golden(text)


def region(name: str) -> Region:
    return Region(name, 1, 1, "", "", 0.0, 0.0, 0.0, {})


def test_modules_stand_before_what_is_inside_of_them():
    names = ["emb", "h.*.ln", "h.*.attn.q", "(outside of modules)", "norm", "h.*.attn", "h.*", "h.*.mlp"]
    expected = ["emb", "h.*", "h.*.ln", "h.*.attn", "h.*.attn.q", "h.*.mlp", "norm", "(outside of modules)"]
    assert [r.name for r in in_tree_order([region(n) for n in names])] == expected
