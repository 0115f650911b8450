"""A block that differs from the others in any way that a graph shows is found by the run without values."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import autopar
from autopar import compiler
from autopar.errors import CaptureError
from autopar.frontend.equal_blocks import equal_blocks_of

from .test_unroll import assert_same_capture, traced_in_full

DEPTH, ODD = 10, 5  # of blocks 3 to 7 none is exported
FACTOR = [1.0]  # a global that forwards read
TABLES = [torch.ones(8), torch.full((8,), 2.0)]


class Scaled(torch.autograd.Function):
    """The identity, with a gradient that is scaled by a global."""

    @staticmethod
    def forward(ctx, x):
        ctx.factor = FACTOR[0]
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor


class Block(nn.Module):
    """A block whose forward depends on `odd`, of which one of the list has another value."""

    def __init__(self, kind: str, index: int):
        super().__init__()
        self.kind, self.index, self.odd = kind, index, index == ODD
        self.norm, self.linear, self.dropout = nn.LayerNorm(8), nn.Linear(8, 8), nn.Dropout(0.1)
        self.scale, self.act = 1.0, F.gelu
        self.register_buffer("shift", torch.zeros(8))
        self.table, self.limits = torch.ones(8), {"low": [0.0, -3.0]}

    def forward(self, x):
        kind, odd = self.kind, self.odd
        y = self.act(self.linear(self.norm(x))) * self.scale + self.shift * self.table
        y = y.clamp_min(self.limits["low"][1])
        if kind == "branch" and self.index == ODD:
            y = y.sin()
        if kind == "index in a constant":
            y = y * (1 + self.index % 4)
        if kind == "dropout":
            y = self.dropout(y)
        if kind == "type of a constant":
            y = y * (True if odd else 1)
        if kind == "sign of zero":
            y = y + (-0.0 if odd else 0.0)
        if kind == "no gradients" and odd:
            with torch.no_grad():
                y = y * 1.0
        if kind == "no gradients inside":
            with torch.set_grad_enabled(not odd):
                y = y * 1.0
        if kind == "detached":
            y = y.detach() if odd else y
        if kind == "autocast":
            with torch.autocast("cpu", enabled=odd):
                y = y + F.linear(y, self.linear.weight)
        if kind == "default type":
            torch.set_default_dtype(torch.float64 if odd else torch.float32)
            y = y + torch.ones(()).sum() * 2
            torch.set_default_dtype(torch.float32)
        if kind == "written in place" and odd:
            y = y.clone().relu_()
        if kind == "view":
            y = y.transpose(0, 1).contiguous().transpose(0, 1) if odd else y.clone()
        if kind == "table of a global":
            y = y * TABLES[odd]
        if kind == "backward of a function":
            FACTOR[0] = 2.0 if odd else 1.0
            y = Scaled.apply(y)
        if kind == "leaf":  # which no block's input is, but block 0's
            y = y * (2.0 if odd and x.is_leaf else 1.0)
        if kind == "history":
            y = y * (2.0 if odd and type(x.grad_fn).__name__ == "AddBackward0" else 1.0)
        if kind == "memory":
            y = y * (2.0 if odd and (x.reshape(-1)._base is x) else 1.0)
        if kind == "element of a tensor":
            y = y * (2.0 if odd and float(torch.ones(3).sum()) == 3.0 else 1.0)
        return x + y


class Tower(nn.Module):
    """Ten blocks; `kind` is how block 5 differs from the others, or what the model does with it."""

    def __init__(self, kind: str):
        super().__init__()
        self.kind = kind
        self.blocks = nn.ModuleList([Block(kind, i) for i in range(DEPTH)])
        odd = self.blocks[ODD]
        if kind == "attribute":
            odd.scale = 2.0
        if kind == "close attribute":
            odd.scale = 1.0 + 2**-52
        if kind == "dropout":
            odd.dropout.p = 0.2
        if kind == "evaluated":
            odd.dropout.eval()
        if kind == "epsilon":
            odd.norm.eps = 1e-6
        if kind == "function":
            odd.act = F.relu
        if kind == "closure":
            odd.act = lambda x, factor=2.0: F.gelu(x) * factor
        if kind == "inside of a container":
            odd.limits["low"][1] = -2.0
        if kind == "hook":
            odd.linear.register_forward_hook(lambda module, args, output: output.tanh())
        if kind == "hook before":
            odd.register_forward_pre_hook(lambda module, args: (args[0] * 2,))
        if kind == "forward of its own":
            odd.linear.forward = lambda x: F.linear(x, odd.linear.weight)
        if kind == "class":
            odd.__class__ = type("Other", (Block,), {"forward": lambda self, x: Block.forward(self, x).tanh()})
        if kind == "frozen":
            odd.linear.weight.requires_grad_(False)
        if kind == "last one frozen":
            self.blocks[-1].linear.weight.requires_grad_(False)
        if kind == "no bias":
            odd.linear.bias = None
        if kind == "buffer is not saved":
            odd._non_persistent_buffers_set.add("shift")
        if kind == "buffer's form":
            odd.shift = torch.zeros(1)
        if kind == "further parameter":
            odd.unused = nn.Parameter(torch.ones(3))
        if kind == "shared":
            odd.linear.weight = self.blocks[4].linear.weight
        if kind == "shared with the head":
            self.head = odd.linear
        if kind == "twice in the list":
            self.blocks[6] = odd
        if kind == "buffer's values":
            odd.shift.fill_(1.0)
        if kind == "table's values":
            odd.table = torch.full((8,), 2.0)

    def forward(self, x):
        kept = []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if self.kind == "between blocks" and i == ODD:
                x = x.cos()
            if self.kind == "depth":
                x = x / len(self.blocks)
            kept.append(x)
        if self.kind == "read at the end":
            x = x + kept[ODD]
        if self.kind == "returned":
            return x.square().mean(), kept[ODD]
        if self.kind == "returned, of a number":
            return x.square().mean(), kept[4 if len(self.blocks) == 5 else -1]
        if self.kind == "all returned":
            return (x.square().mean(), *kept)
        if self.kind == "left in an attribute":
            self.blocks[ODD].last = kept[ODD].detach()
        return x.square().mean()


DIFFER = [
    "attribute", "close attribute", "branch", "index in a constant", "dropout", "epsilon", "function", "closure",
    "inside of a container", "hook", "hook before", "forward of its own", "class", "frozen",
    "no bias", "buffer is not saved", "buffer's form", "further parameter", "shared", "shared with the head",
    "twice in the list", "type of a constant", "sign of zero", "no gradients", "no gradients inside", "detached",
    "autocast", "default type", "written in place", "view", "table of a global", "backward of a function", "leaf",
    "history", "memory", "element of a tensor", "between blocks", "depth", "read at the end", "returned",
    "all returned", "left in an attribute",
]  # fmt: skip
ALIKE = ["equal", "last one frozen", "evaluated", "buffer's values", "table's values", "returned, of a number"]


def example(kind: str) -> tuple[Tower, torch.Tensor]:
    torch.manual_seed(0)
    return Tower(kind), torch.randn(4, 8)


@pytest.mark.parametrize("kind", [*DIFFER, *ALIKE])
def test_a_block_that_differs_is_found(kind):
    model, x = example(kind)
    found = equal_blocks_of(model, (x,), None, None, None, True, True)
    assert (found is not None) == (kind in ALIKE)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [*DIFFER, *ALIKE])
def test_a_capture_is_that_of_all_blocks(kind):
    model, x = example(kind)
    try:
        whole = traced_in_full(example(kind)[0], (x,))
    except CaptureError as error:
        with pytest.raises(type(error)):
            compiler.trace(model, (x,))
        return
    found = compiler.trace(model, (x,))
    if kind != "backward of a function":  # each of its ops has a name of its own
        assert_same_capture(found, whole)
    assert [r.path for r in found.guards.reads] == [r.path for r in whole.guards.reads]
    assert found.returns.outputs == whole.returns.outputs


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["equal", "attribute", "hook", "no gradients", "branch", "table's values"])
def test_result_is_that_of_eager(kind):
    model, x = example(kind)
    for block in model.blocks:
        block.dropout.p = 0.0
    report = autopar.verify(model, "dp=2", (x,))
    assert report.match, report
