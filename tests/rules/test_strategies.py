"""Show that rules miss no strategy and refuse what they must; numerical checks show that nothing offered is wrong."""

from __future__ import annotations

import pytest
import torch

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.rules import local_call, rule_of, strategies, strategy_of
from autopar.rules.numeric_check import make_node
from autopar.rules.rule import rule

from .instances import mask, real, whole
from .rule_check import zeros_node

aten, ops = torch.ops.aten, torch.ops.autopar

# op, arguments -> for every choice on one axis of two devices: "inputs -> outputs"
EXPECTED = {
    "linear": (
        ops.linear.default, (real(2, 4, 6), real(8, 6)),
        ["S(0), R -> S(0)", "S(1), R -> S(1)", "S(2), S(1) -> P", "R, S(0) -> S(2)", "P, R -> P", "R, P -> P"],
    ),
    "linear_dw": (
        ops.linear_dw.default, (real(2, 4, 8), real(2, 4, 6)),
        ["S(0), S(0) -> P", "S(1), S(1) -> P", "S(2), R -> S(0)", "R, S(2) -> S(1)", "P, R -> P", "R, P -> P"],
    ),
    "addmm: k is whole": (
        aten.addmm.default, (real(8), real(4, 6), real(6, 8)),
        ["S(0), R, S(1) -> S(1)", "R, S(0), R -> S(0)", "P, P, R -> P", "P, R, P -> P"],
    ),
    "add": (aten.add.Tensor, (real(4, 6), real(6)), ["S(0), R -> S(0)", "S(1), S(0) -> S(1)", "P, P -> P"]),
    "add to zeros": (
        aten.add.Tensor, (zeros_node(4, 6), real(4, 6)), ["S(0), S(0) -> S(0)", "S(1), S(1) -> S(1)", "R, P -> P"]
    ),
    "add a number": (aten.add.Tensor, (real(4, 6), 1.0), ["S(0) -> S(0)", "S(1) -> S(1)"]),
    "where zero": (aten.where.self, (mask(4), real(4), zeros_node()), ["S(0), S(0), R -> S(0)", "R, P, R -> P"]),
    "silu": (aten.silu.default, (real(4, 6),), ["S(0) -> S(0)", "S(1) -> S(1)"]),
    "cast that rounds": (aten._to_copy.default, (real(4),), ["S(0) -> S(0)"]),
    "sum of integers": (aten.sum.dim_IntList, (whole(9, 4, 6), [1]), ["S(0) -> S(0)", "S(1) -> P"]),
    "any": (aten.any.dim, (mask(4, 6), 1), ["S(0) -> S(0)"]),
    "amax": (aten.amax.default, (real(4, 6), [1]), ["S(0) -> S(0)", "S(1) -> P(max)"]),
    "mean": (aten.mean.dim, (real(4, 6), [1]), ["S(0) -> S(0)", "P -> P"]),
    "softmax": (aten._softmax.default, (real(4, 6), -1, False), ["S(0) -> S(0)"]),
    "embedding": (
        ops.embedding.default, (real(8, 6), whole(8, 2, 4), -1, 0),
        ["S(0), R -> P", "S(1), R -> S(2)", "R, S(0) -> S(0)", "R, S(1) -> S(1)", "P, R -> P"],
    ),
    "grouped attention": (
        ops.attention.default, (real(2, 8, 3, 4), real(2, 4, 5, 4), real(2, 4, 5, 4), real(1, 1, 3, 5), False, None),
        ["S(0), S(0), S(0), R -> S(0), S(0)", "S(1), S(1), S(1), R -> S(1), S(1)", "S(2), R, R, S(2) -> S(2), S(2)"],
    ),
    "fused split": (
        aten.split.Tensor, (real(5, 12), 4, 1),
        ["S(0) -> S(0), S(0), S(0)", "S(1/3) -> S(1), S(1), S(1)", "P -> P, P, P"],
    ),
    "unequal split": (aten.split_with_sizes.default, (real(4, 6), [2, 4], 1), ["S(0) -> S(0), S(0)", "P -> P, P"]),
    "heads": (
        aten.view.default, (real(3, 24), [3, 6, 4]), ["S(0) -> S(0)", "S(1) -> S(1)", "S(1/6) -> S(2)", "P -> P"],
    ),
    "odd heads": (aten.view.default, (real(3, 12), [3, 3, 4]), ["S(0) -> S(0)", "S(1/3) -> S(2)", "P -> P"]),
    "expand": (aten.expand.default, (real(4, 1), [4, 6]), ["S(0) -> S(0)", "R -> S(1)", "P -> P"]),
}  # fmt: skip


@pytest.mark.parametrize("what", EXPECTED)
def test_strategies_of(what):
    target, args, expected = EXPECTED[what]
    node, inputs = make_node(target, *args, **({"dtype": torch.float32} if target is aten._to_copy.default else {}))
    shapes = [tuple(t.shape) for t in inputs]
    value = node.meta["val"]
    outputs = [tuple(v.shape) for v in ([value] if isinstance(value, torch.Tensor) else value)]
    mesh = Mesh.parse("x=2")
    first, *found = strategies(rule_of(node), shapes, outputs, mesh)
    assert all(layout.is_replicated for layout in first.inputs + first.outputs)
    texts = [" -> ".join(", ".join(map(str, side)) for side in (s.inputs, s.outputs)).replace("x:", "") for s in found]
    assert sorted(texts) == sorted(expected)


def test_two_factors_of_one_dim_are_not_cut_together():
    node, inputs = make_node(aten.view.default, real(16), [4, 4])
    found = strategies(rule_of(node), [(16,)], [(4, 4)], Mesh.parse("x=2,y=2"))
    assert {s.outputs[0].text() for s in found if all(s.choice)} == {"x:S(0) y:S(0)", "x:P y:P"} | {
        f"{a}:S({d}) {b}:P" for d in (0, 1) for a, b in ("xy", "yx")
    }


def test_uneven_heads_are_offered_only_where_every_device_gets_some():
    made = rule("b h, b h -> b h")
    assert len(strategies(made, [(1, 6), (1, 6)], [(1, 6)], Mesh.parse("x=4"))) == 1  # blocks of 2: the last gets none
    assert len(strategies(made, [(1, 5), (1, 5)], [(1, 5)], Mesh.parse("x=3"))) == 2  # blocks 2, 2, 1


@pytest.mark.parametrize("text, expected", [
    ("x=2", {("h",): "x:S(1)"}), ("x=4", {("hq",): "R"}), ("x=16", {}),
    ("x=2,y=2", {("h", "hq"): "x:S(1)", ("hq", "h"): "y:S(1)", ("h", ""): "x:S(1)", ("", "h"): "y:S(1)"}),
    ("x=4,y=2", {("hq", "h"): "y:S(1)", ("hq", ""): "R", ("", "h"): "y:S(1)"}),
])  # fmt: skip
def test_heads_of_keys_are_replicated_only_where_they_cannot_be_cut(text, expected):
    """8 heads of queries, 2 of keys: the layout of keys by the choice of each axis."""
    node, inputs = make_node(
        ops.attention.default, real(1, 8, 3, 4), real(1, 2, 5, 4), real(1, 2, 5, 4), None, False, None
    )
    mesh = Mesh.parse(text)
    shapes = [[tuple(t.shape) for t in side] for side in (inputs, node.meta["val"])]
    found = {s.choice: s.inputs[1].text(mesh) for s in strategies(rule_of(node), *shapes, mesh) if any(s.choice)}
    assert {choice: keys for choice, keys in found.items() if {*choice} <= {"", "h", "hq"}} == expected


def test_offsets_count_every_axis_of_the_vocabulary():
    node, inputs = make_node(ops.embedding.default, real(16, 6), whole(16, 4), -1, 0)
    mesh = Mesh.parse("x=2,y=2")
    both = Layout((("x", "y"), ()))
    strategy = next(s for s in strategies(rule_of(node), [(16, 6), (4,)], [(4, 6)], mesh) if s.inputs[0] == both)
    calls = [local_call(node, strategy, mesh, mesh.coordinate(r), node.args, node.kwargs) for r in range(4)]
    assert [args[3] for args, _ in calls] == [0, 4, 8, 12]


def test_ops_without_a_rule():
    assert rule_of(make_node(aten.native_dropout.default, real(4, 6), 0.5, True)[0]) is None
    assert rule_of(make_node(aten.index.Tensor, real(4, 6), [mask(4)])[0]) is None  # its size depends on the data


@pytest.mark.parametrize("label, offered", [("s", True), ("s/zigzag", True), ("ring/zigzag", True), ("h/zigzag", True),
                                            ("s/2", False), ("ring/2", False), ("s/0", False)])  # fmt: skip
def test_what_a_plan_file_may_say_of_parts(label, offered):
    """Queries are cut into ranges of which the op knows the place, so not inside of parts, but in zigzag."""
    node, _ = make_node(ops.attention.default, *(torch.randn(1, 4, 8, 4) for _ in range(3)), None, True, None)
    shapes = [(1, 4, 8, 4)] * 3, [(1, 4, 8, 4), (1, 4, 8)]
    assert (strategy_of(rule_of(node), (label,), *shapes, Mesh.parse("a=2")) is not None) == offered


def test_positions_are_not_counted_in_zigzag():
    node, _ = make_node(aten.arange.start, 0, 8, device="cpu", pin_memory=False)
    assert strategy_of(rule_of(node), ("d0",), [], [(8,)], Mesh.parse("a=2")) is not None
    assert strategy_of(rule_of(node), ("d0/zigzag",), [], [(8,)], Mesh.parse("a=2")) is None
