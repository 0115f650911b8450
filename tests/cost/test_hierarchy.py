"""Collectives that go tier by tier: what the steps cost, and when they are taken."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopar.cost.collectives import CollectiveCost
from autopar.cost.hierarchy import STEPS
from autopar.cost.redistribute import Redistributor
from autopar.cost.transfer_prices import TransferPrices
from autopar.hardware.profile import Hardware, Tier
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh

NODE = Tier("node", 4, 1e-4, 1e9, 2**20)
NETWORK = Tier("network", None, 1e-3, 25e6, 2**20)
TWO_TIERS = Hardware("toy", "", "", {"fp32": 1e12}, 1.0, 1e11, 1.0, 10**9, 1e-6, (NODE, NETWORK), "all_to_all")
RACK = Tier("rack", 8, 5e-4, 5e8, 2**20)
THREE_TIERS = replace(TWO_TIERS, links=(replace(NODE, devices=2), RACK, NETWORK))


@pytest.mark.parametrize(("nodes", "inside"), [(2, 4), (3, 4), (8, 4)])
def test_an_all_reduce_costs_its_three_steps(nodes, inside):
    mesh = Mesh.parse(f"dp={nodes},tp={inside}")
    cost, held = CollectiveCost(TWO_TIERS, mesh), 64e6
    seconds = (
        2 * (1e-4 + (inside - 1) / inside * held / 1e9) + 1e-3 + 2 * (nodes - 1) / nodes * held / inside / 25e6
    )  # fmt: skip
    assert cost.seconds("all_reduce", ("dp", "tp"), held) == pytest.approx(seconds)
    assert cost.seconds("all_reduce", ("tp", "dp"), held) == pytest.approx(seconds)
    ring = 1e-3 + 2 * (nodes * inside - 1) / (nodes * inside) * held / (inside * 25e6)
    assert seconds < ring


@pytest.mark.parametrize(("nodes", "inside"), [(2, 4), (3, 4), (8, 4)])
def test_gathers_and_reduce_scatters_cost_their_two_steps_and_a_copy(nodes, inside):
    """Each device sends across its node's link what one peer in every other node wants, and no more."""
    cost, held = CollectiveCost(TWO_TIERS, Mesh.parse(f"dp={nodes},tp={inside}")), 64e6
    copied = 2 / TWO_TIERS.reached_memory_bytes_per_second
    shard = held / nodes / inside
    gathered = (1e-3 + (nodes - 1) * shard / 25e6) + (1e-4 + (inside - 1) * nodes * shard / 1e9) + copied * held
    assert cost.seconds("all_gather", ("dp", "tp"), shard) == pytest.approx(gathered)
    part = held / inside
    reduced = (1e-4 + (inside - 1) / inside * held / 1e9) + (1e-3 + (nodes - 1) / nodes * part / 25e6) + copied * held
    assert cost.seconds("reduce_scatter", ("dp", "tp"), held) == pytest.approx(reduced)
    ring = 1e-3 + (nodes * inside - 1) * shard / (inside * 25e6)
    assert gathered < ring and cost.at_once.seconds("all_gather", ("dp", "tp"), shard) == pytest.approx(ring)


def test_axes_of_one_tier_reduce_at_once():
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=2,tp=2")).hierarchy == {}
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=4")).hierarchy == {}
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=6")).hierarchy == {}  # of two nodes one would have two devices
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=2,tp=4"), "ring").hierarchy == {}
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=2,tp=4")).at_once.hierarchy == {}


@pytest.mark.parametrize("hardware", [TWO_TIERS, THREE_TIERS])
def test_the_faster_way_is_taken_and_more_bytes_never_cost_less(hardware):
    mesh, seed = Mesh.parse("a=3,b=2,c=2,d=2"), Random().randrange(2**31)
    print(f"seed {seed}")
    cost = CollectiveCost(hardware, mesh)
    held = np.sort(np.exp(np.random.default_rng(seed).uniform(0, np.log(1e9), 300)))
    inner = {("d",), ("c", "d"), ("c",), ("b",), ("b", "c")}
    assert {kind for kind, _ in cost.hierarchy} == {*STEPS} and {s.inner for s in cost.hierarchy.values()} <= inner
    for (kind, axes), steps in cost.hierarchy.items():
        assert (steps.kind, steps.axes) == (kind, axes) and 0 < steps.from_bytes <= steps.to_bytes
        seconds, flat = cost.seconds(kind, axes, held), cost.at_once.seconds(kind, axes, held)
        assert (np.diff(seconds) >= -1e-12).all() and (seconds <= flat * (1 + 1e-9)).all()
        assert [steps.takes(h) for h in held] == pytest.approx(seconds < flat)
        for edge in (steps.from_bytes - 1, steps.from_bytes):
            is_less = cost.seconds(kind, axes, edge) < cost.at_once.seconds(kind, axes, edge)
            assert is_less == (edge == steps.from_bytes)


@pytest.mark.parametrize("kind", STEPS)
def test_three_tiers_have_steps_inside_steps(kind):
    cost, held = CollectiveCost(THREE_TIERS, Mesh.parse("a=2,b=4,c=2")), 2.0**20
    steps = cost.hierarchy
    assert (steps[kind, ("a", "b", "c")].outer, steps[kind, ("a", "b", "c")].inner) == (("a", "b"), ("c",))
    assert (steps[kind, ("a", "b")].outer, steps[kind, ("a", "b")].inner) == (("a",), ("b",))
    if kind == "all_gather":  # one copy, whatever the tiers
        each = [("a", held), ("b", 2 * held), ("c", 8 * held)]
        seconds = sum(cost.seconds(kind, (axis,), bytes_) for axis, bytes_ in each)
        copy = 2 * 16 * held / THREE_TIERS.reached_memory_bytes_per_second
        assert cost.seconds(kind, ("a", "b", "c"), held) == pytest.approx(seconds + copy)


@pytest.mark.parametrize("kind", STEPS)
@pytest.mark.parametrize(("whole", "in_two"), [("dp=12", "out=3,dp=4"), ("dp=6,tp=2", "out=3,dp=2,tp=2")])
def test_an_axis_that_leaves_a_node_costs_what_two_would(whole, in_two, kind):
    whole_axes, in_two = tuple(Mesh.parse(whole).names), Mesh.parse(in_two)
    cost, other = CollectiveCost(TWO_TIERS, Mesh.parse(whole)), CollectiveCost(TWO_TIERS, in_two)
    held = np.geomspace(1, 1e9, 40)
    np.testing.assert_allclose(cost.seconds(kind, whole_axes, held), other.seconds(kind, in_two.names, held))
    steps, two = cost.hierarchy[kind, whole_axes], other.hierarchy[kind, in_two.names]
    assert (steps.from_bytes, steps.to_bytes, steps.axes) == (two.from_bytes, two.to_bytes, whole_axes)
    inside = 4 // (2 if "tp" in whole_axes else 1)
    assert steps.outer == (f"dp//{inside}",) and steps.inner == (f"dp%{inside}", *whole_axes[1:])


@pytest.mark.parametrize("kind", STEPS)
def test_an_axis_over_three_tiers_has_parts_of_parts(kind):
    steps = CollectiveCost(THREE_TIERS, Mesh.parse("dp=16")).hierarchy
    assert (steps[kind, ("dp",)].outer, steps[kind, ("dp",)].inner) == (("dp//2",), ("dp%2",))
    assert (steps[kind, ("dp//2",)].outer, steps[kind, ("dp//2",)].inner) == (("dp//2//4",), ("dp//2%4",))


def test_what_other_code_emits_is_priced_at_once():
    """DTensors gather outputs and updates of Muon with one collective."""
    mesh, links = Mesh.parse("dp=8"), TWO_TIERS.links_for(Mesh.parse("dp=8"))
    prices = TransferPrices(Redistributor(mesh, links, 1e11), CollectiveCost(TWO_TIERS, mesh))
    whole, shard = Layout.parse("R", 1), Layout.parse("dp:S(0)", 1)
    at_once = CollectiveCost(TWO_TIERS, mesh, by_tier=False).seconds("all_gather", ("dp",), 2.0**20)
    assert prices.pair(shard, whole, 2.0**23) < prices.at_once.pair(shard, whole, 2.0**23) == pytest.approx(at_once)
    assert prices.hierarchy and prices.at_once.at_once is prices.at_once
