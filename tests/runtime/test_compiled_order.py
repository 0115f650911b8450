"""Inductor leaves collectives where the emitted graphs have them."""

from __future__ import annotations

import contextlib
from dataclasses import replace
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from autopar import _torch
from autopar.codegen.python_code import bind_groups, group_names
from autopar.compiler import lower
from autopar.errors import CompilerError
from autopar.models import build
from autopar.runtime import loaded
from autopar.simulate import step


class Written(Exception):
    """Raised instead of compiling the kernels of a program that is written."""


def program_of(module, options=()) -> list[str]:
    """The lines of the program that Inductor writes for a graph."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    programs = []

    def stop(text: str) -> None:
        programs.append(text)
        raise Written

    values = [
        torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in module.graph.find_nodes(op="placeholder")
    ]
    with patch.object(GraphLowering, "save_output_code", staticmethod(stop)), config.patch(force_disable_caches=True):
        with contextlib.suppress(CompilerError):
            loaded._compiled(module, "forward", dict(options))(values)
    (text,) = programs
    return text.splitlines()


def overlapped(lines: list[str]) -> int:
    """Count the gathers and reduce-scatters that have a matrix product between their start and their wait."""
    started, count = [], 0
    for line in lines:
        if "_c10d_functional.wait_tensor" in line:
            for start in [s for s in started if s[0] in line]:
                count += start[1]
                started.remove(start)
        elif "_c10d_functional." in line and " = torch.ops" in line:
            started.append([line.split(" = ")[0].strip(), False])
        elif "extern_kernels." in line and ("mm(" in line):
            for start in started:
                start[1] = True
    return count


def emitted(module) -> int:
    started, count = {}, 0
    for node in module.graph.nodes:
        name = str(node.target)
        if "wait_tensor" in name:
            count += started.pop(node.args[0], False)
        elif "_c10d_functional" in name:
            started[node] = False
        elif any(word in name for word in ("aten.linear", "aten.mm", "aten.matmul")):
            started = dict.fromkeys(started, True)
    return count


@pytest.fixture
def of_four():
    """A process group of four ranks, three of which are not there."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield dist.group.WORLD.group_name
    dist.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("phase", ["forward", "backward"])
def test_collectives_keep_their_place(of_four, phase):
    """Most that have a product beside them keep one: a few lose it where Inductor fuses what was between."""
    module, inputs = build("llama:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=60", batch=4, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module, "dp=4", inputs, hardware="h100", strategy="fsdp", precision="bf16", baselines=False
    )
    graph_module = getattr(lower(captured, replace(plan, bucket_bytes=8192.0), 0).parts, phase)
    wanted = emitted(graph_module)
    bound = bind_groups(graph_module, dict.fromkeys(group_names(graph_module), of_four))
    assert wanted >= 4
    assert overlapped(program_of(bound)) >= wanted / 2
    if phase == "backward":  # Inductor's own order leaves few
        assert overlapped(program_of(bound, {"options": {"reorder_for_peak_memory": True}})) < wanted / 4


def test_options():
    given = _torch.in_given_order
    assert given({"dynamic": False}) == {"dynamic": False, "options": {"reorder_for_peak_memory": False}}
    assert given({"mode": "reduce-overhead"})["options"] == {
        "reorder_for_peak_memory": False,
        "triton.cudagraphs": True,
    }
    assert given({"options": {"reorder_for_peak_memory": True}})["options"] == {"reorder_for_peak_memory": True}
    for untouched in ({"backend": "eager"}, {"mode": "default", "options": {"max_autotune": True}}):
        assert given(untouched) == untouched
