from dataclasses import replace

import pytest

import autopar
from autopar.models import build
from autopar.plans.entries import Alternative, Region
from autopar.plans.text import alternatives_table, in_tree_order, memory_table, summary


@pytest.mark.parametrize("model", ["gpt2-tiny", "mlp-tiny"])
def test_plan(model, golden):
    module, inputs = build(model, batch=8, seq=64)
    plan = autopar.plan(module, "dp=2,tp=2", inputs, hardware="cpu-gloo", name=model)
    text = str(plan)
    assert text.startswith(summary(plan)) and text.endswith("\n")
    assert all(line == line.rstrip() and "0.0000" not in line for line in text.splitlines())
    golden(text)


def test_bytes_of_alternatives_are_in_the_unit_of_the_plan():
    module, inputs = build("mlp-tiny:layers=1", batch=8, seq=8)
    plan = autopar.plan(module, "dp=2", inputs, hardware="cpu-gloo", baselines=False)
    far = Alternative("ddp", 1.0, None, 3 * 2**40, False)
    header, rows = alternatives_table(replace(plan, peak_bytes=64 * 2**30, alternatives=(far,)))
    assert header[2] == "GiB" and [row[3] for row in rows] == ["64.0", "3072.0"]


def test_the_bound_of_a_strategy_and_the_names_of_those_without_a_price():
    module, inputs = build("mlp-tiny:layers=1", batch=8, seq=8)
    text = str(autopar.plan(module, "dp=2", inputs, hardware="cpu-gloo", strategy="fsdp"))
    assert "; no plan of fsdp takes less than" in text and "\nhsdp: replicates over one axis" in text
    assert "; no plan takes less than" in str(
        autopar.plan(module, "dp=2", inputs, hardware="cpu-gloo", baselines=False)
    )


def test_the_memory_of_a_small_model_is_not_lost_beside_the_reserve():
    module, inputs = build("mlp-tiny", batch=8, seq=8)
    header, rows = memory_table(autopar.plan(module, "dp=2", inputs, hardware="h100", baselines=False))
    cells = {kind: most for kind, most, *_ in rows}
    assert header[0] == "most MiB" and float(cells["parameters"]) > 0 and float(cells["allocator reserve"]) > 1000


def region(name: str) -> Region:
    return Region(name, 1, 1, "", "", 0.0, 0.0, 0.0, {})


def test_modules_stand_before_what_is_inside_of_them():
    names = ["emb", "h.*.ln", "h.*.attn.q", "(outside of modules)", "norm", "h.*.attn", "h.*", "h.*.mlp"]
    expected = ["emb", "h.*", "h.*.ln", "h.*.attn", "h.*.attn.q", "h.*.mlp", "norm", "(outside of modules)"]
    assert [r.name for r in in_tree_order([region(n) for n in names])] == expected
