"""Parameters on the host: what they cost and hold, when they are put there, and that they compute the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.api import entry as api
from autopar.compiler import lower, lower_deferred
from autopar.errors import MemoryInfeasibleError, StrategyError
from autopar.frontend.device import move
from autopar.hardware.profile import Host
from autopar.ir.graph import values_of
from autopar.ir.layout import Layout, largest_local_numel
from autopar.ir.mesh import Mesh
from autopar.models import build, registry
from autopar.plans.entries import Offloaded
from autopar.plans.plan import Plan
from autopar.simulate import step
from autopar.simulate.compare import verify_plan

from .planning import make, toy

GPT = "gpt:hidden=64,layers=2,heads=4,vocab=64,seq=16"
SMALL = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16"
HOST = Host(link_bytes_per_second=1e9, memory_bytes_per_second=4e9, memory_bytes=10**9)
MACHINE = replace(toy(flops=1e11, memory=1e10, latency=1e-6, bucket=1 << 16), host=HOST)
STATES = {"adamw": 2, "sgd_momentum": 1, "sgd": 0}


def without_planning_for_it(plan: Plan) -> dict:
    return {k: v for k, v in plan.to_json().items() if k not in ("hash", "gap", "bound", "program")}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{}, {"strategy": "fsdp"}, {"micro_batches": 2}], ids=str)
def test_where_memory_is_no_matter_nothing_changes(options):
    """A layout on the host is dominated by itself on the device as long as bytes are free."""
    on_device, either = (make(SMALL, "dp=4", MACHINE, **options, offload=level) for level in ("none", "auto"))
    assert without_planning_for_it(on_device) == without_planning_for_it(either)
    assert on_device.offloaded == Offloaded() and "host" not in str(on_device)


@settings(max_examples=6, deadline=None, derandomize=True)
@given(
    mesh=st.sampled_from(["dp=1", "dp=2", "tp=3", "dp=2,tp=2", "a=2,b=3"]), hidden=st.sampled_from([16, 24, 36]),
    passes=st.integers(1, 3), optimizer=st.sampled_from(sorted(STATES)), bf16=st.booleans(), dear=st.floats(0.1, 10),
)  # fmt: skip
def test_all_on_the_host_by_the_closed_formula(mesh, hidden, passes, optimizer, bf16, dear):
    """The device holds neither masters nor gradients nor state, the host all of it; seconds are bytes over
    bandwidths."""
    host = Host(dear * 1e9, 4e9, 10**9)
    model, inputs = registry.build(f"mlp:hidden={hidden},ffn=32,layers=1", batch=6, seq=1, device="meta")
    plan = api.plan(
        model, Mesh.parse(mesh), inputs, hardware=replace(MACHINE, host=host), precision="bf16" if bf16 else "fp32",
        optimizer=optimizer, offload="optimizer", micro_batches=passes, baselines=False,
    )  # fmt: skip
    shards = sum(
        largest_local_numel(p.shape, Layout.parse(plan.layouts[name], p.dim()), plan.mesh)
        for name, p in model.named_parameters()
    )
    states, computing = STATES[optimizer], 2 if bf16 else 4
    assert plan.memory.get("parameters", 0.0) == shards * computing
    assert "gradients" not in plan.memory and "optimizer" not in plan.memory
    o = plan.offloaded
    assert o.parameters == len(list(model.parameters())) and o.host_bytes == shards * 4 * (2 + states)
    assert o.copy_seconds == pytest.approx(passes * shards * (computing + 4) / host.link_bytes_per_second)
    assert o.optimizer_seconds == pytest.approx(shards * 4 * (1 + 2 * (1 + states)) / host.memory_bytes_per_second)
    assert plan.step_seconds == pytest.approx(plan.compute_seconds + plan.communication_seconds + o.seconds)
    assert Plan.from_json(plan.to_json()) == plan and f"{o.parameters} parameters with gradients" in str(plan)


@pytest.mark.slow
def test_memory_decides_how_many_parameters_go_to_the_host():
    """Below what fits on the device, as few parameters as needed; what no plan of the device could fit is planned at
    all."""
    options = {"hardware": MACHINE, "strategy": "ddp", "recompute": "auto", "batch": 8}
    free, all_ = make(GPT, "dp=2", **options), make(GPT, "dp=2", **options, offload="optimizer")
    with pytest.raises(MemoryInfeasibleError):
        make(GPT, "dp=2", **options, memory_bytes=1.1 * all_.peak_bytes)
    some = [make(GPT, "dp=2", **options, offload="auto", memory_bytes=limit * free.peak_bytes) for limit in (0.9, 0.5)]
    held = [plan.offloaded.host_bytes for plan in some]
    assert 0 < held[0] < held[1] <= all_.offloaded.host_bytes
    for plan in some:
        assert plan.peak_bytes <= plan.memory_limit_bytes and plan.bound <= plan.step_seconds
        assert free.step_seconds + plan.offloaded.seconds + plan.recompute_seconds == pytest.approx(plan.step_seconds)
        assert len(plan.sharding.on_host) == plan.offloaded.parameters


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("model", "mesh", "strategy", "precision", "recompute"), [
    ("mlp-tiny", "dp=2,tp=2", None, "fp32", "auto"), (SMALL, "dp=2", "fsdp", "fp32", "full"),
    (SMALL, "dp=2", "zero1", "bf16", "auto"), ("llama-tiny:layers=1", "tp=3", None, "fp32", "selective"),
    ("mlp-tiny", "dp=2", "ddp", "bf16", "auto"),
])  # fmt: skip
def test_gradients_are_those_of_one_device(model, mesh, strategy, precision, recompute):
    """The emitted graphs copy every parameter once to the device, in the type that computes, and every gradient to the
    host."""
    module, inputs = build(model, batch=4, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module, mesh, inputs, hardware=MACHINE, strategy=strategy, precision=precision, recompute=recompute,
        baselines=False, offload="optimizer",
    )  # fmt: skip
    report = verify_plan(captured, plan, module, inputs)
    assert report.match, report
    graph = lower(captured, plan, 0, check=True).local.graph
    moved = [
        n
        for n in graph.nodes
        if n.op == "call_function" and "device" in n.kwargs and n.name.endswith(("_device", "_host"))
    ]
    arriving = [n for n in moved if n.name.endswith("_on_device")]
    assert len(arriving) == len(plan.sharding.on_host) and len(moved) == 2 * len(arriving)
    narrow = {str(n.meta["val"].dtype) for n in arriving}
    assert narrow == {"torch.bfloat16" if precision == "bf16" else "torch.float32"}
    assert all(a.op == "placeholder" or a.args[0].op == "placeholder" for n in arriving for a in n.all_input_nodes)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_graphs_for_gpus_compute_on_them(precision):
    """Lowered for a mesh of GPUs, only parameters, their casts and the gradients that leave are in the host's
    memory."""
    module, inputs = build("mlp-tiny", batch=4, seq=16, device="cpu")
    plan, captured = step.plan_and_capture(
        module,
        "dp=2",
        inputs,
        hardware=MACHINE,
        strategy="fsdp",
        precision=precision,
        baselines=False,
        offload="optimizer",
    )
    move(captured, torch.device("cuda"))
    program = lower(captured, plan, 0, check=True)
    deferred = lower_deferred(captured, plan, 0, program.parts.saved)
    for graph in (
        program.parts.forward.graph,
        program.parts.backward.graph,
        deferred.backward.graph,
        deferred.reduce.graph,
    ):
        for node in graph.nodes:
            for value in values_of(node) if node.op != "output" else ():
                source = node.args[0] if node.target is torch.ops.aten._to_copy.default else node
                arrives = source.op == "placeholder" and source.name in (
                    *plan.sharding.on_host,
                    *deferred_inputs(deferred),
                )
                on_host = node.name.endswith("_on_host") or arrives and not node.name.endswith("_on_device")
                assert value.device.type == ("cpu" if on_host else "cuda"), node.format_node()
                assert getattr(node.kwargs.get("device"), "index", None) is None  # each rank has a GPU of its own


def deferred_inputs(deferred) -> list[str]:
    return [n.name for n in deferred.reduce.graph.nodes if n.op == "placeholder"]


def test_what_cannot_be_offloaded_says_so():
    with pytest.raises(StrategyError, match="use one of none, auto, optimizer"):
        make(SMALL, "dp=2", MACHINE, offload="all")
    with pytest.raises(StrategyError, match="nothing of a host"):
        make(SMALL, "dp=2", toy(), offload="optimizer")
    assert make(SMALL, "dp=2", toy(), offload="auto").offloaded == Offloaded()
    with pytest.raises(MemoryInfeasibleError, match="on the host"):
        make(SMALL, "dp=2", replace(MACHINE, host=replace(HOST, memory_bytes=1000)), offload="optimizer")
