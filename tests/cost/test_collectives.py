"""Tests of the price that a collective gets, and of what every price has in common."""

from dataclasses import replace
from random import Random

import numpy as np
import pytest

from autopar.cost.collectives import SEVERAL_AXES, CollectiveCost
from autopar.cost.redistribute import Redistributor
from autopar.cost.textbook import ALL_REDUCES
from autopar.errors import HardwareError
from autopar.hardware.profile import Curve, Hardware, Tier, load
from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh

TOY = Hardware("toy", "", "", {"fp32": 1e12}, 1.0, 1e11, 1.0, 10**9, 1e-6,
               (Tier("near", 4, 1e-6, 1e9, 64), Tier("far", None, 1e-5, 1e8, 16)), "native")  # fmt: skip
SIZES = np.logspace(3, 8, 6)
CURVE = Curve("all_reduce", 4, 1, tuple(SIZES), tuple(1e-4 + SIZES / 1e9))
MEASURED = replace(TOY, curves=(CURVE,), curves_error=0.1)


def test_alpha_beta_is_what_the_redistributor_pays():
    mesh = Mesh.parse("a=2,b=4")
    cost, search = CollectiveCost(TOY, mesh), Redistributor(mesh, TOY.links_for(mesh), 1e11)
    for source, target, kind, axes, held in [
        ("a:S(0)", "R", "all_gather", ("a",), 0.5), ("b:P", "b:S(0)", "reduce_scatter", ("b",), 1.0),
        ("a:S(0)", "a:S(1)", "all_to_all", ("a",), 0.5), ("b:P", "R", "all_reduce", ("b",), 1.0),
    ]:  # fmt: skip
        (step,) = search(Layout.parse(source, 2), Layout.parse(target, 2)).steps
        assert step.move.kind == kind
        for bytes_ in (1e3, 1e9):
            assert cost.seconds(kind, axes, held * bytes_) == pytest.approx(
                step.latency_seconds + step.seconds_per_byte * bytes_
            )
    assert cost.tier == "alpha-beta" and cost.relative_error == 0.5


@pytest.mark.parametrize("hardware", [TOY, MEASURED, load("h100"), load("cpu-gloo")])
def test_what_all_prices_have_in_common(hardware):
    mesh, seed = Mesh.parse("a=2,b=1,c=4"), Random().randrange(2**31)
    print(f"seed {seed}")
    held = np.sort(np.random.default_rng(seed).uniform(0, 1e9, 50))
    cost = CollectiveCost(hardware, mesh)
    for kind in ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send"):
        for axes in (("a",), ("b",), ("c",)) + (
            (("a", "c"), ("c", "a"), ("a", "b", "c")) if kind == "all_reduce" else ()
        ):
            seconds = cost.seconds(kind, axes, held)
            assert seconds.shape == held.shape and (np.diff(seconds) >= 0).all()
            assert cost.seconds(kind, axes, float(held[7])) == pytest.approx(seconds[7])
            assert (seconds == 0).all() == (axes == ("b",))
    assert (cost.seconds("all_reduce", ("a", "c"), held) == cost.seconds("all_reduce", ("c", "a"), held)).all()


def test_measured_points_come_back():
    cost = CollectiveCost(MEASURED, Mesh.parse("a=4"))
    assert cost.seconds("all_reduce", ("a",), SIZES) == pytest.approx(CURVE.seconds)
    assert cost.tier == "measured" and cost.relative_error == 0.1
    below, above = cost.seconds("all_reduce", ("a",), np.array([0.0, 1e9]))
    assert below == pytest.approx(CURVE.seconds[0]) and above == pytest.approx(10 * CURVE.seconds[-1])


def test_between_two_points_the_logarithms_are_linear():
    curve = Curve("send", 2, 1, (1e3, 1e5), (1e-4, 1e-3))
    cost = CollectiveCost(replace(TOY, curves=(curve,)), Mesh.parse("a=2"))
    assert cost.seconds("send", ("a",), 1e4) == pytest.approx(10**-3.5)


def test_a_point_above_a_later_one_is_lowered():
    curve = Curve("send", 2, 1, (1e3, 1e4, 1e5), (1e-4, 5e-3, 1e-3))
    cost = CollectiveCost(replace(TOY, curves=(curve,)), Mesh.parse("a=2"))
    assert cost.seconds("send", ("a",), np.array([1e3, 1e4, 1e5])) == pytest.approx([1e-4, 1e-3, 1e-3])


def test_curves_are_for_their_tier_alone():
    """A group that leaves the node was not measured; nor was another collective."""
    cost = CollectiveCost(MEASURED, Mesh.parse("a=2,b=4"))
    assert cost.tier_of("all_reduce", ("b",)) == "measured"
    assert cost.tier_of("all_reduce", ("a",)) == cost.tier_of("all_gather", ("b",)) == cost.tier == "alpha-beta"


def test_the_nearest_measured_size_stands_in():
    """Two devices send as much of 1.5 bytes as four of one."""
    cost = CollectiveCost(MEASURED, Mesh.parse("a=2"))
    assert cost.seconds("all_reduce", ("a",), 1.5e6) == pytest.approx(1e-4 + 1e6 / 1e9, rel=0.1)
    eight = CollectiveCost(replace(MEASURED, links=TOY.links[1:]), Mesh.parse("a=8"))
    assert eight.seconds("all_reduce", ("a",), 0.0) == pytest.approx(1e-4 * (1 + 4 / 3), rel=0.1)


@pytest.mark.parametrize("kind", SEVERAL_AXES)
@pytest.mark.parametrize("card", [1e9, 4e9, 1e12])
def test_several_axes_are_one_ring(kind, card):
    """Over 3 nodes of 4 devices, at once: what leaves a node takes the cards of all its devices, what stays its
    links."""
    links = Tier("node", 4, 1e-6, 8e9, 1 << 20), Tier("network", None, 1e-5, card, 1 << 20)
    cost = CollectiveCost(replace(TOY, links=links), Mesh.parse("a=3,b=4"), by_tier=False)
    sent = {"all_gather": 11, "reduce_scatter": 11 / 12, "all_reduce": 22 / 12}[kind] * 1e6
    ring = 1e-5 + sent / min(8e9, 4 * card)
    assert cost.seconds(kind, ("a", "b"), 1e6) == pytest.approx(ring)


def test_several_axes_are_what_nccl_does_with_the_group():
    cost, held = CollectiveCost(load("v100"), Mesh.parse("a=4,b=8")), np.array([1e9])
    assert cost.seconds("all_reduce", ("a", "b"), held) == cost._nccl("all_reduce", ("a", "b"))(held)


@pytest.mark.parametrize("model", ALL_REDUCES)
def test_textbook_models(model):
    """The all-reduce alone follows the model, over several axes on the slowest link."""
    mesh = Mesh.parse("a=2,b=4")
    cost, plain = CollectiveCost(load("h100"), mesh, model), CollectiveCost(load("h100"), mesh)
    expected = ALL_REDUCES[model].seconds(4, 1e6, 20e-6, 365e9)
    assert cost.seconds("all_reduce", ("b",), 1e6) == pytest.approx(expected)
    assert cost.seconds("all_reduce", ("a", "b"), 1e6) == pytest.approx(
        ALL_REDUCES[model].seconds(8, 1e6, 20e-6, 365e9)
    )
    assert cost.tier == "textbook" and cost.seconds("all_gather", ("b",), 1e6) == plain.seconds(
        "all_gather", ("b",), 1e6
    )


@pytest.mark.parametrize("n", [3, 4, 8, 16])
def test_a_parameter_server_never_wins(n):
    """On equal links and more than two workers, for what is not tiny."""
    costs = {
        m: CollectiveCost(load("cpu-gloo"), Mesh(("a",), (n,)), m).seconds("all_reduce", ("a",), 1e8)
        for m in ALL_REDUCES
    }
    assert min(costs, key=costs.get) in ("ring", "halving_doubling")
    assert costs["parameter_server"] > 2 * costs["ring"]


def test_a_gather_or_a_reduce_scatter_over_several_axes_is_one_ring():
    """Two nodes of 4 take, by hand, the latency of the farther axis and 7 b over the four cards that lead out of a
    node; NCCL's model takes the axes for the group of all."""
    cost, held = CollectiveCost(TOY, Mesh.parse("a=2,b=4"), by_tier=False), 1e6
    assert cost.seconds("all_gather", ("a", "b"), held) == pytest.approx(1e-5 + 7 * held / 4e8)
    assert cost.seconds("reduce_scatter", ("a", "b"), 8 * held) == pytest.approx(1e-5 + 7 * held / 4e8)
    mesh, hardware = Mesh.parse("a=4,b=8"), load("h100")
    for kind in ("reduce_scatter", "all_gather"):
        at_once = CollectiveCost(hardware, mesh, by_tier=False).seconds(kind, ("a", "b"), held)
        assert at_once == CollectiveCost(hardware, Mesh.parse("c=32"), by_tier=False).seconds(kind, ("c",), held)
    one_by_one = CollectiveCost(hardware, mesh, by_tier=False)
    in_turn = one_by_one.seconds("all_gather", ("b",), held) + one_by_one.seconds("all_gather", ("a",), 8 * held)
    assert at_once < in_turn / 3


@pytest.mark.parametrize(
    "call, complaint",
    [
        (lambda cost: CollectiveCost(TOY, cost.mesh, "gossip"), "no model 'gossip'(.|\n)*parameter_server"),
        (lambda cost: cost.seconds("all_sum", ("a",), 1.0), "no collective 'all_sum'(.|\n)*all_reduce"),
        (lambda cost: cost.seconds("all_to_all", ("a", "b"), 1.0), "only all_reduce, all_gather, reduce_scatter take"),
    ],
)
def test_bad_calls(call, complaint):
    with pytest.raises(HardwareError, match=complaint):
        call(CollectiveCost(TOY, Mesh.parse("a=2,b=2")))
