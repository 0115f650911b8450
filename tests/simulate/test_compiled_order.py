"""Inductor leaves collectives where the emitted graphs have them."""

from __future__ import annotations

import re

import pytest
import torch
from torch import fx

from autopar._torch import c10d
from autopar._torch.compiling import in_given_order
from autopar.passes.distribute.heavy_ops import is_product
from autopar.simulate import census
from benchmarks.overlap import TINY, Case
from tests.helpers.inductor import absent_ranks, compiled_census, program_of

aten = torch.ops.aten

UNORDERED = {"reorder_for_peak_memory": True, "reorder_for_locality": True, "post_grad_custom_post_pass": None}


@pytest.mark.slow
@pytest.mark.parametrize("case", TINY, ids=str)
def test_collectives_keep_the_products_beside_them(case):
    _, program = case.lowered("cpu")
    emitted, compiled = census.of_graphs(program), compiled_census(program)
    assert compiled.moved == pytest.approx(emitted.moved)
    assert compiled.overlapped >= 0.98 * emitted.overlapped


@pytest.mark.slow
def test_inductor_alone_leaves_few():
    _, program = Case(
        "llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=60", "dp=4", "fsdp", 4, 16, 8192.0
    ).lowered("cpu")
    emitted = census.of_graphs(program)
    assert compiled_census(program).overlapped >= 0.98 * emitted.overlapped
    assert compiled_census(program, {"options": UNORDERED}).overlapped < 0.7 * emitted.overlapped


def test_truths_are_gathered_as_bytes():
    """Inductor alone makes integers of 8 bytes of them, and of the mask that an attention then gets."""
    graph = fx.Graph()
    with absent_ranks(2) as name:
        x = graph.placeholder("x")
        mask = graph.call_function(aten._to_copy.default, (x,), {"dtype": torch.bool})
        start = graph.call_function(c10d.all_gather_into_tensor.default, (mask, 2, name))
        wait = graph.call_function(c10d.wait_tensor.default, (start,))
        graph.output((graph.call_function(aten.clone.default, (wait,)),))
        for node, rows, dtype in (x, 4, torch.int64), (mask, 4, torch.bool), (start, 8, torch.bool):
            node.meta["val"] = torch.empty(rows, 7, dtype=dtype, device="meta")
        made = [line for line in program_of(fx.GraphModule({}, graph)) if re.match(r"\s+buf\d+ = empty_strided", line)]
    assert made and not any("int64" in line for line in made)


def test_options():
    def given(options):
        found = in_given_order(options, is_product)
        pass_ = found.get("options", {}).pop("post_grad_custom_post_pass", None)
        assert (pass_ is None) == ("options" not in found or pass_ is None)
        return found

    ordered = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    assert given({"dynamic": False}) == {"dynamic": False, "options": ordered}
    assert given({"mode": "reduce-overhead"})["options"] == {**ordered, "triton.cudagraphs": True}
    assert given({"options": {"reorder_for_peak_memory": True}})["options"] == {
        **ordered,
        "reorder_for_peak_memory": True,
    }
    for untouched in ({"backend": "eager"}, {"mode": "default", "options": {"max_autotune": True}}):
        assert given(untouched) == untouched
    first, second = (in_given_order({}, is_product)["options"]["post_grad_custom_post_pass"] for _ in range(2))
    assert first.uuid() == second.uuid()  # by which Inductor's cache finds what it made
