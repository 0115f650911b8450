"""A plan lets collectives go round beside products where that gains, and says what it gains."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import pytest

from autopar import Mesh, Plan, models
from autopar.api import entry as api
from autopar.compiler import lower
from autopar.cost.loop import LoopCost
from autopar.errors import PlanIncompatible, StrategyError
from autopar.hardware.profile import load
from autopar.planner.explain import explain_plan
from autopar.planner.objective.player import played_seconds

from ..helpers import kept

SHORT = "llama3-8b:layers=1"


@cache
def planned(mesh: str, loops: str, model: str = SHORT, **options):
    built, inputs = models.build(model, batch=options.pop("batch", 8), seq=options.pop("seq", 8192))
    defaults = dict(strategy="megatron_sp", hardware="h100", precision="bf16", baselines=False)
    return api.search(built, mesh, inputs, loops=loops, cache=kept.captures(), **defaults | options)


def test_auto_takes_what_gains():
    """Each loop costs less than the collective and its products one after the other; the step that is played has
    them."""
    never, auto = (planned("tp=4", loops).plan for loops in ("never", "auto"))
    assert not never.sharding.loops and "beside products" not in str(never)
    assert auto.sharding.loops and auto.step_seconds < never.step_seconds
    assert auto.communication_seconds == pytest.approx(never.communication_seconds)
    assert auto.compute_seconds == never.compute_seconds and auto.bound == pytest.approx(never.bound)
    gained = never.step_seconds - auto.step_seconds
    assert gained == pytest.approx(auto.beside_seconds) and gained > 0.01 * never.step_seconds
    assert never.exposed_seconds - auto.exposed_seconds == pytest.approx(gained)
    assert "without loops takes less" in str(auto)
    kinds = Counter(one.kind for one in auto.sharding.loops)
    said = [line for line in str(auto).splitlines() if "round beside products" in line]
    assert [f"{n} {kind}" in said[0] for kind, n in kinds.items()] == [True] * len(kinds)


def test_counts_and_bytes_are_those_of_the_program():
    """P - 1 messages a loop; together they have the bytes of the collectives."""
    found = planned("tp=4", "always")
    never = planned("tp=4", "never").plan
    plan, local = found.plan, lower(found.captured, found.plan, 1).local
    here = [c for n in local.graph.nodes if (c := n.meta.get("collective")) and c.kind.endswith("_loop")]
    for phase in ("forward", "backward"):
        for kind in ("all_gather_loop", "reduce_scatter_loop"):
            mine = [c for c in here if (c.kind, c.phase) == (kind, phase)]
            (said,) = [c for c in plan.collectives if (c.kind, c.phase) == (kind, phase)]
            assert len(mine) == said.count and sum(c.wire_bytes for c in mine) == said.wire_bytes
            loops = [one for one in plan.sharding.loops if (f"{one.kind}_loop", one.phase) == (kind, phase)]
            assert said.count == 3 * len(loops) > 0
    assert sum(c.wire_bytes for c in plan.collectives) == sum(c.wire_bytes for c in never.collectives)


def test_layers_that_read_one_tensor_share_a_loop():
    loops = planned("tp=4", "always").plan.sharding.loops
    counts = Counter((one.kind, one.phase, len(one.products)) for one in loops)
    assert counts["all_gather", "forward", 3] == counts["all_gather", "forward", 2] == 1  # q, k and v; gate and up
    assert counts["reduce_scatter", "backward", 3] == counts["reduce_scatter", "backward", 2] == 1
    assert not any(a is not b and {*a.products} & {*b.products} for a in loops for b in loops)


def test_near():
    """Links inside a node."""
    cost = [LoopCost(load("h100"), mesh, mesh, 0.0, "tp") for mesh in map(Mesh.parse, ("tp=8", "tp=16"))]
    assert [one.is_near for one in cost] == [True, False]


@pytest.mark.slow
def test_no_loop_where_nothing_is_gained():
    """Compute waits for gloo's collectives."""
    tiny = dict(model="llama-tiny:layers=1", seq=64, strategy="megatron_sp", hardware="cpu-gloo", precision="fp32")
    never, auto = (planned("tp=2", loops, **tiny).plan for loops in ("never", "auto"))
    assert auto.step_seconds == never.step_seconds and auto.sharding == never.sharding


def test_price():
    """P - 1 messages, each beside the products of a block, and one block beside none."""
    hardware = replace(load("h100"), overlap_slowdown=1.0)
    mesh = Mesh.parse("tp=4")
    cost, link = LoopCost(hardware, mesh, mesh, 1e-6, "tp"), hardware.links_for(mesh)["tp"]
    message = link.latency_seconds + 1e8 / link.bytes_per_second
    memory = hardware.reached_memory_bytes_per_second
    assert cost.seconds(2e-3, 1e8, False, 0.0) == pytest.approx(2e-3 + 3 * max(2e-3, message))
    assert cost.seconds(1e-9, 1e8, False, 0.0) == pytest.approx(1e-9 + 3 * message)
    added = 3e8 / memory + 1e-6
    assert cost.seconds(2e-3, 1e8, True, 0.0) == pytest.approx(2e-3 + 3 * (max(2e-3, message) + added))
    assert cost.seconds(2e-3, 1e8, False, 4e8) == pytest.approx(2e-3 + 3 * max(2e-3, message) + 8e8 / memory + 1e-6)


@pytest.mark.parametrize("mesh, model, seq", [
    ("tp=4", SHORT, 8192), pytest.param("tp=4", "gpt2-tiny", 64, marks=pytest.mark.slow),
    pytest.param("dp=4,tp=4", "llama3-8b:layers=4", 8192, marks=pytest.mark.slow),
    pytest.param("dp=2,tp=8", "llama3-8b:layers=4", 2048, marks=pytest.mark.slow),
])  # fmt: skip
def test_the_played_step_is_never_slower(mesh, model, seq):
    """Beside what else is hidden, too: gathers of parameters, reductions of gradients."""
    found = planned(mesh, "auto", model, seq=seq, strategy="megatron_sp+fsdp" if "dp" in mesh else "megatron_sp")
    chosen = found.chosen
    assert chosen.seconds <= chosen.searched_seconds
    assert chosen.seconds == played_seconds(found.problem, chosen.evaluation, found.pricer)


def test_a_file_keeps_them(tmp_path):
    plan = planned("tp=4", "auto").plan
    plan.save(tmp_path / "plan.json")
    again = Plan.load(tmp_path / "plan.json")
    assert again == plan and again.sharding.loops == plan.sharding.loops and str(again) == str(plan)


def test_a_file_with_other_loops():
    found = planned("tp=4", "auto")
    first, *rest = found.plan.sharding.loops
    sharding = replace(found.plan.sharding, loops=(replace(first, products=("linear_999",)), *rest))
    with pytest.raises(PlanIncompatible, match="linear_999, an unknown op"):
        replace(found.plan, sharding=sharding).check_fits(found.captured.graph, found.plan.mesh)


def test_what_is_asked():
    with pytest.raises(StrategyError, match="use never, auto, always"):
        planned("tp=2", "sometimes")
    with pytest.raises(StrategyError, match="stages have no loops"):
        planned("pp=2,tp=2", "always")


@pytest.mark.slow
def test_explained():
    found = planned("tp=4", "auto")
    assert "round beside products" in str(explain_plan(found, "layers.*.q_proj.weight", alternatives=1, choices=1))
