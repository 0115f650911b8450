"""Causal attention of a sequence cut in zigzag, as it is emitted: every device has as many pairs of a query and a key
to go over, and nothing that the mask closes but in its own triangles."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.layout import Layout, local_ranges
from autopar.ir.mesh import Mesh
from autopar.ops import autopar
from autopar.simulate.oracle import global_values
from autopar.simulate.step import plan_and_capture, simulate_step

from ..helpers.sequences import Decoder, batch

SIZES = (2, 4, 8)


def pairs_of(ranges: list[tuple[int, int]]) -> int:
    """Pairs that a causal mask leaves open to the queries in these ranges."""
    return sum(place + 1 for start, stop in ranges for place in range(start, stop))


@pytest.mark.parametrize("size", SIZES)
def test_mask_areas_are_those_of_the_formula(size):
    """The last of P devices has 2 - 1 / P times the mean of plain blocks, but for the diagonal; in zigzag each has
    N (N + 1) / 2 P pairs of N queries."""
    mesh, length = Mesh.parse(f"cp={size}"), 64 * size
    areas = {}
    for text in ("cp:S(0)", "cp:Z(0)"):
        layout = Layout.parse(text, 1)
        areas[text] = [pairs_of(local_ranges((length,), layout, mesh, mesh.coordinate(r))[0]) for r in range(size)]
    mean = length * (length + 1) / 2 / size
    assert areas["cp:Z(0)"] == [mean] * size
    assert max(areas["cp:S(0)"]) / mean == pytest.approx(2 - 1 / size, rel=1 / length)


CALLS = {  # whether they give gradients; the CPU's own kernels take what they can as it is
    autopar.attention.default: False,
    autopar.attention_bw.default: True,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default: False,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward.default: True,
}


def counted(graph, heads: int) -> int:
    """Pairs that the calls of a device's graph go over, of one head and sample."""
    total = 0
    for node in graph.graph.nodes:
        if node.target in CALLS:
            shift = int(CALLS[node.target])
            rows, keys = (node.args[i + shift].meta["val"].shape[2] for i in (0, 1))
            causal, first = node.args[7 if shift else 4], 0
            if node.target.namespace == "autopar":
                first = dict(enumerate(node.args)).get(9 if shift else 6, 0)
            total += sum(min(first + i + 1, keys) for i in range(rows)) if causal else rows * keys
    return total


CASES = [(4, "all_gather_kv"), (2, "ring")]
MORE = [(2, "all_gather_kv"), (4, "ring"), (8, "all_gather_kv"), (8, "ring")]


@pytest.mark.parametrize("size, strategy", [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)])
def test_all_devices_have_as_much_to_do(size, strategy):
    model, length = Decoder("causal", 4, 2), 4 * size
    options = dict(strategy=strategy, hardware="cpu-gloo", baselines=False, pin={"input_ids": "cp:Z(1)"})
    plan, captured = plan_and_capture(model, f"cp={size}", batch(length), **options)
    step = simulate_step(captured, plan, global_values(captured, model, batch(length)))
    for phase in ("forward", "backward"):
        areas = [counted(getattr(program.parts, phase), 4) for program in step.programs]
        assert areas == [length * (length + 1) / 2 / size] * size
