"""Values that wait on the host: whichever they are, gradients stay what they were, to the bit."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.compiler import lower, lower_deferred
from autopar.errors import PlanIncompatible, VerifyError
from autopar.frontend.device import move
from autopar.ir.graph import bytes_of, output_node, tensor_of, values_of
from autopar.models import build
from autopar.ops import autopar
from autopar.passes.distribute.partition import view_base
from autopar.plans.plan import Plan
from autopar.plans.saved_on_host import SavedOnHost
from autopar.simulate import step
from autopar.simulate.oracle import global_values
from tests.helpers import kept

MODELS = {
    "gpt": "gpt:hidden=16,layers=2,heads=2,vocab=32,seq=8",
    "llama": "llama:hidden=16,layers=2,heads=2,kv_heads=2,ffn=32,vocab=32,seq=8",
    "moe": "moe-tiny:layers=2",
}
COPIES = (autopar.to_host.default, autopar.on_host.default, autopar.to_device.default, autopar.on_device.default)


@functools.cache
def planned(family: str, mesh: str, recompute: str = "none", strategy: str | None = None):
    """(plan, capture, values, saved values that may wait on the host, gradients without)."""
    torch.manual_seed(0)
    module, inputs = build(MODELS[family], batch=4, seq=8, device="cpu")
    module = module.double()
    options = {"hardware": "cpu-gloo", "baselines": False, "cache": kept.captures(), "recompute": recompute}
    plan, captured = step.plan_and_capture(module, mesh, inputs, **options, strategy=strategy)
    values = global_values(captured, module, inputs)
    found = step.simulate_step(captured, plan, values)
    module(**inputs).loss.backward()
    for name, parameter in module.named_parameters():
        assert (found.gradients[name] - parameter.grad).norm() <= 1e-10 * (1 + parameter.grad.norm())
    return plan, captured, values, candidates(lower(captured, plan, 0)), found.gradients


def candidates(program) -> list[tuple[str, int]]:
    """Return what the forward saves that is an output of an op of the joint graph, views among it."""
    names, graph = set(program.parts.saved), program.local.graph
    made = [n for n in graph.nodes if n.op == "call_function" and n.name in names]
    return [(tensor_of(n)[0].name, tensor_of(n)[1]) for n in made if "sharding" in tensor_of(n)[0].meta]


def with_host(plan: Plan, values) -> Plan:
    """Return the plan with these values on the host."""
    return replace(plan, saved_on_host=SavedOnHost(tuple(values), 0.0, 0.0, 0.0) if values else None)


CASES = [
    ("llama", "tp=2", "selective", None), ("gpt", "dp=2", "none", "fsdp"),
    ("llama", "tp=2", "none", "megatron_sp"), ("moe", "dp=2,tp=2", "none", None),
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
@settings(max_examples=2, deadline=None, derandomize=True)
@given(picks=st.randoms(use_true_random=False))
def test_gradients_are_the_same_bits_whatever_waits_on_the_host(case, picks):
    plan, captured, values, able, want = planned(*case)
    chosen = [value for value in able if picks.random() < 0.5]
    got = step.simulate_step(captured, with_host(plan, chosen), values).gradients
    assert all(torch.equal(got[name], gradient) for name, gradient in want.items())
    parts = lower(captured, with_host(plan, chosen), 0, check=True).parts
    sent = [n for n in parts.forward.graph.nodes if n.target is autopar.to_host.default]
    saved = output_node(parts.forward.graph).args[0][-len(parts.saved) :]
    assert len(sent) == len(chosen) == sum(n.target is autopar.on_host.default for n in saved)
    assert not {n.args[0].name for n in sent} & set(parts.saved)
    back = [n for n in parts.backward.graph.nodes if n.target is autopar.on_device.default]
    assert sum(bytes_of(n.args[0].meta["val"]) for n in sent) == sum(bytes_of(n.meta["val"]) for n in back)


def test_copies_have_the_time_of_a_block():
    """The copies of a block end with the next one, and come back while that runs backward."""
    plan, captured, _, able, _ = planned(*CASES[0])
    parts = lower(captured, with_host(plan, able), 0).parts
    forward, backward = ([n for n in p.graph.nodes if n.op == "call_function"] for p in (parts.forward, parts.backward))

    def places(ops, block: int, *targets) -> list[int]:
        """Return where ops of a block are, those of some kinds, or all but copies."""
        ofs = [i for i, n in enumerate(ops) if f"layers.{block}." in n.meta["module"] + "."]
        return [i for i in ofs if (ops[i].target in targets if targets else ops[i].target not in COPIES)]

    sent, arrived = (places(forward, 0, op.default) for op in (autopar.to_host, autopar.on_host))
    assert max(sent) <= max(places(forward, 0)) + 1 and min(arrived) > max(places(forward, 1))
    fetched, back = (places(backward, 0, op.default) for op in (autopar.to_device, autopar.on_device))
    assert len(sent) == len(fetched) == len(back) > 2
    assert max(fetched) < min(places(backward, 1)) < min(back) and min(fetched) > 0


@pytest.mark.slow
def test_on_gpus_what_waits_is_in_the_memory_of_the_host():
    module, inputs = build(MODELS["gpt"], batch=4, seq=8, device="cpu")
    plan, captured = step.plan_and_capture(
        module, "dp=2", inputs, hardware="cpu-gloo", strategy="fsdp", baselines=False
    )
    plan = with_host(plan, candidates(lower(captured, plan, 0)))
    move(captured, torch.device("cuda"))
    program = lower(captured, plan, 0, check=True)
    deferred = lower_deferred(captured, plan, 0, program.parts.saved)
    hosts = (autopar.to_host.default, autopar.on_host.default, autopar.to_device.default)
    for graph in (program.parts.forward.graph, program.parts.backward.graph, deferred.backward.graph):
        for node in graph.nodes:
            for value in values_of(node) if node.op == "call_function" else ():
                assert value.device.type == ("cpu" if node.target in hosts else "cuda"), node.format_node()
                assert node.target is not autopar.to_device.default or node.args[1].index is None


def test_plans_that_move_what_cannot_be_moved_are_refused():
    plan, captured, *_ = planned(*CASES[0])
    with pytest.raises(PlanIncompatible, match="output 0 of nothing on the host"):
        with_host(plan, [("nothing", 0)]).check_fits(captured.graph, plan.mesh)
    early = [n for n in lower(captured, plan, 0).local.graph.nodes if n.meta.get("phase") == "forward"]
    joint = {n.name for n in captured.graph.nodes}
    view = next(n for n in early if n.name in joint and view_base(n) in early and tensor_of(n)[0] is n)
    with pytest.raises(VerifyError, match="lies in other memory"):
        lower(captured, with_host(plan, [(view.name, 0)]), 0)
    late = next(n for n in captured.graph.nodes if n.op == "call_function" and n.meta["phase"] == "backward")
    with pytest.raises(VerifyError, match="no op of the forward gives it"):
        lower(captured, with_host(plan, [(late.name, 0)]), 0)
    again = with_host(plan, [("a", 0), ("b", 1)])
    assert Plan.from_json(again.to_json()) == again
