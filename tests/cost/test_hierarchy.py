"""Collectives that go tier by tier: what the steps cost, and when they are taken."""

from __future__ import annotations

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopar.cost.collectives import CollectiveCost
from autopar.hardware.profile import Hardware, Tier, load
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


def test_axes_of_one_tier_and_gpus_reduce_at_once():
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=2,tp=2")).hierarchy == {}
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=4")).hierarchy == {}
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=6")).hierarchy == {}  # of two nodes one would have two devices
    assert CollectiveCost(load("h100"), Mesh.parse("dp=2,tp=8")).hierarchy == {}  # compute runs beside it
    assert CollectiveCost(TWO_TIERS, Mesh.parse("dp=2,tp=4"), "ring").hierarchy == {}


@pytest.mark.parametrize("hardware", [TWO_TIERS, THREE_TIERS])
def test_the_faster_way_is_taken_and_more_bytes_never_cost_less(hardware):
    mesh, seed = Mesh.parse("a=3,b=2,c=2,d=2"), Random().randrange(2**31)
    print(f"seed {seed}")
    cost = CollectiveCost(hardware, mesh)
    held = np.sort(np.exp(np.random.default_rng(seed).uniform(0, np.log(1e9), 300)))
    assert {steps.inner for steps in cost.hierarchy.values()} <= {
        ("d",),
        ("c", "d"),
        ("c",),
        ("b",),
        ("b", "c"),
    }
    for axes, steps in cost.hierarchy.items():
        assert steps.axes == axes and 0 < steps.from_bytes <= steps.to_bytes
        seconds = cost.seconds("all_reduce", axes, held)
        flat = cost._at_once("all_reduce", axes, "alpha-beta")(held)
        assert (np.diff(seconds) >= -1e-12).all() and (seconds <= flat * (1 + 1e-9)).all()
        assert [steps.takes(h) for h in held] == pytest.approx(seconds < flat)
        for edge in (steps.from_bytes - 1, steps.from_bytes):
            assert (cost.seconds("all_reduce", axes, edge) < cost._at_once("all_reduce", axes, "alpha-beta")(edge)) == (
                edge == steps.from_bytes
            )


def test_three_tiers_have_steps_inside_steps():
    cost = CollectiveCost(THREE_TIERS, Mesh.parse("a=2,b=4,c=2"))
    steps = cost.hierarchy
    assert (steps["a", "b", "c"].outer, steps["a", "b", "c"].inner) == (("a", "b"), ("c",))
    assert (steps["a", "b"].outer, steps["a", "b"].inner) == (("a",), ("b",))


@pytest.mark.parametrize(("whole", "in_two"), [("dp=12", "out=3,dp=4"), ("dp=6,tp=2", "out=3,dp=2,tp=2")])
def test_an_axis_that_leaves_a_node_costs_what_two_would(whole, in_two):
    whole_axes, in_two = tuple(Mesh.parse(whole).names), Mesh.parse(in_two)
    cost, other = CollectiveCost(TWO_TIERS, Mesh.parse(whole)), CollectiveCost(TWO_TIERS, in_two)
    held = np.geomspace(1, 1e9, 40)
    np.testing.assert_allclose(
        cost.seconds("all_reduce", whole_axes, held), other.seconds("all_reduce", in_two.names, held)
    )
    steps, two = cost.hierarchy[whole_axes], other.hierarchy[in_two.names]
    assert (steps.from_bytes, steps.to_bytes, steps.axes) == (two.from_bytes, two.to_bytes, whole_axes)
    inside = 4 // (2 if "tp" in whole_axes else 1)
    assert steps.outer == (f"dp//{inside}",) and steps.inner == (f"dp%{inside}", *whole_axes[1:])


def test_an_axis_over_three_tiers_has_parts_of_parts():
    steps = CollectiveCost(THREE_TIERS, Mesh.parse("dp=16")).hierarchy
    assert (steps["dp",].outer, steps["dp",].inner) == (("dp//2",), ("dp%2",))
    assert (steps["dp//2",].outer, steps["dp//2",].inner) == (("dp//2//4",), ("dp//2%4",))
