"""Deliberately wrong rules: the numerical check must flag every one of them, or its silence means nothing."""

from __future__ import annotations

import pytest
import torch

from autopar.rules.numeric_check import check, make_node
from autopar.rules.rule import Inner, Rule, rule

from .instances import real, whole
from .rule_check import MESHES

aten, ops = torch.ops.aten, torch.ops.autopar

WRONG = {
    "mm: k as if it were n": (aten.mm.default, (real(6, 6), real(6, 6)), rule("m k, n k -> m n")),
    "mm: linear in both together": (aten.mm.default, (real(4, 5), real(5, 6)), rule("m k, k n -> m n", [[0, 1]])),
    "addmm: bias added once a device": (
        aten.addmm.default, (real(4), real(5, 6), real(6, 4)), rule("n, m k, k n -> m n"),
    ),
    "softmax: the normalised dim": (aten._softmax.default, (real(4, 6), -1, False), rule("a b -> a b")),
    "silu: linear": (aten.silu.default, (real(4, 6),), rule("a b -> a b", [[0]])),
    "amax: sums instead of maxima": (aten.amax.default, (real(4, 6), [1]), rule("a b -> a")),
    "amax: all dims for one": (aten.amax.default, (real(4, 6), []), rule("a b -> a", reduction="max")),
    "mean: as a sum": (aten.mean.dim, (real(4, 6), [1]), rule("a b -> a")),
    "view: inner factor as outer": (aten.view.default, (real(4, 6), [24]), Rule((("a", "b"),), (("b",),))),
    "view: cut unevenly": (aten.view.default, (real(5, 4), [20]), Rule((("a", None),), (("a",),))),
    "split: plain shard": (aten.split.Tensor, (real(4, 12), 4, 1), rule("a b -> a b, a b, a b")),
    "cat: wrong parts": (
        aten.cat.default, ([real(4, 4), real(4, 4)], 1), Rule((("a", "b"),) * 2, (("a", Inner("b", 4)),)),
    ),
    "embedding: rows by index": (ops.embedding.default, (real(6, 4), whole(6, 6), -1, 0), rule("v h, v -> v h")),
    "native_layer_norm: the normalised dim": (
        aten.native_layer_norm.default, (real(4, 6), [6], None, None, 1e-5), rule("a b -> a b, a _, a _"),
    ),
    "slice: a part that is not one of equal parts": (
        aten.slice.Tensor, (real(4, 12), 1, 2, 8), Rule((("a", Inner("b", 2)),), (("a", "b"),)),
    ),
    "linear_dw: batch not summed": (ops.linear_dw.default, (real(4, 6), real(4, 6)), rule("o a, i b -> o i")),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG)
def test_wrong_rule_is_flagged(what):
    target, args, wrong_rule = WRONG[what]
    node, inputs = make_node(target, *args)
    flagged = [bad for mesh in ("x=2", "x=3") for bad in check(node, inputs, MESHES[mesh], wrong_rule)[1]]
    assert flagged, what
