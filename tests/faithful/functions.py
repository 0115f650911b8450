"""Custom autograd functions, checkpointing, function transforms, and control flow that depends on values."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from .nets import Block, Net
from .program import Topic, ids, one, randn

functions = Topic(__name__)


class Between(Net):
    """A Net with `change(self, h)` of its features."""

    def __init__(self, change):
        super().__init__()
        self._change = change

    def forward(self, x):
        return self.down(self._change(self, self.features(x)))


class Reversal(torch.autograd.Function):
    """Gradient reversal (Ganin and Lempitsky 2015), with its factor in the context."""

    @staticmethod
    def forward(ctx, x, factor):
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -ctx.factor * gradient, None


class Swish(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.sigmoid(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        s = torch.sigmoid(x)
        return gradient * (s + x * s * (1 - s))


class WrongOnPurpose(torch.autograd.Function):
    """A backward that is not the derivative: it clips."""

    @staticmethod
    def forward(ctx, x):
        return x.exp()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.clamp(-0.01, 0.01)


class TwoOutputs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        values, places = x.max(1)
        ctx.save_for_backward(places)
        ctx.mark_non_differentiable(places)
        ctx.width = x.shape[1]
        return values, places

    @staticmethod
    def backward(ctx, gradient, _):
        (places,) = ctx.saved_tensors
        return F.one_hot(places, ctx.width).to(gradient.dtype) * gradient[:, None] * 2


class SeparateSetup(torch.autograd.Function):
    @staticmethod
    def forward(x, scale):
        return x * scale

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, gradient):
        x, scale = ctx.saved_tensors
        return gradient * scale * 3, (gradient * x).sum(0)


class OnlyIfNeeded(torch.autograd.Function):
    """Computes no gradient that is not needed."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = (saved.to(gradient.dtype) for saved in ctx.saved_tensors)  # autocast's is narrower
        return (gradient @ weight if ctx.needs_input_grad[0] else None,
                gradient.t() @ x if ctx.needs_input_grad[1] else None)  # fmt: skip


CUSTOM = {
    "reversal": lambda m, h: Reversal.apply(h, 0.3),
    "swish": lambda m, h: Swish.apply(h),
    "wrong_on_purpose": lambda m, h: WrongOnPurpose.apply(h),
    "two_outputs": lambda m, h: h * TwoOutputs.apply(h)[0][:, None] + TwoOutputs.apply(h)[1][:, None],
    "separate_setup": lambda m, h: SeparateSetup.apply(h, m.up.bias),
    "only_if_needed": lambda m, h: OnlyIfNeeded.apply(h, m.up.weight[:, :1] @ m.up.bias[None]),
    "of_a_detached": lambda m, h: Swish.apply(h.detach()) + h,
}
for name, change in CUSTOM.items():
    functions.add(f"function_{name}", lambda change=change: (Between(change), one(5, 6)))


@functions()
def function_factor_changed():
    """The factor of a gradient reversal rises between calls, as its schedule has it."""

    class Domain(Net):
        def __init__(self):
            super().__init__()
            self.factor = 0.1

        def features(self, x):
            return Reversal.apply(super().features(x), self.factor)

    def script(run):
        for seed in (1, 2, 3):
            run.model.factor = 0.3 * seed
            run(seed)

    return Domain(), one(5, 6), script


CHECKPOINTS = {
    "not_reentrant": lambda m, h: checkpoint(lambda t: F.gelu(t) * m.up.bias, h, use_reentrant=False),
    "reentrant": lambda m, h: checkpoint(lambda t: F.gelu(t) * m.up.bias, h, use_reentrant=True),
    "sequential": lambda m, h: checkpoint_sequential(nn.Sequential(nn.ReLU(), nn.Tanh()), 2, h, use_reentrant=False),
    "nested": lambda m, h: checkpoint(
        lambda t: checkpoint(torch.sin, t, use_reentrant=False) * 2, h, use_reentrant=False
    ),
    "two_outputs": lambda m, h: sum(checkpoint(lambda t: (t.sin(), t.cos()), h, use_reentrant=False)),
    "with_keywords": lambda m, h: checkpoint(lambda t, scale=1.0: t.sin() * scale, h, use_reentrant=False, scale=3.0),
}  # fmt: skip
for name, change in CHECKPOINTS.items():
    functions.add(f"checkpoint_{name}", lambda change=change: (Between(change), one(5, 6)))


@functions()
def checkpoint_blocks():
    """Blocks are recomputed where a flag says so, which is switched between calls."""

    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks, self.checkpointing = nn.ModuleList(Block() for _ in range(2)), True

        def forward(self, x):
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False) if self.checkpointing and self.training else block(x)
            return x

    def script(run):
        run(1)
        run.model.checkpointing = False
        run(2)

    return Stack(), one(3, 5, 12), script


@functions(tolerance=0.05)
def checkpoint_with_dropout():
    """A recomputed dropout has the mask of the forward: gradients are zero where outputs are."""

    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.ones(200, 300))

        def forward(self, x):
            return checkpoint(lambda t: F.dropout(t * self.scale, 0.4, self.training), x, use_reentrant=False)

    def script(run):
        run.model(torch.ones(200, 300)).sum().backward()
        gradient = run.model.scale.grad
        run.model.zero_grad()
        run.record(zeros=(gradient == 0).float().mean(), largest=gradient.max())

    return Dropping(), lambda seed: (torch.ones(200, 300),), script


TRANSFORMS = {
    "vmap": lambda m, h: torch.vmap(lambda row: row.softmax(0) * row.sum())(h),
    "vmap_over_weights": lambda m, h: torch.vmap(lambda row: torch.dot(row, m.up.bias))(h)[:, None] + h,
    "func_grad": lambda m, h: torch.func.grad(lambda t: t.sin().square().sum())(h),
    "vmap_of_grad": lambda m, h: torch.vmap(torch.func.grad(lambda t: t.exp().sum().log()))(h),
    "jvp": lambda m, h: torch.func.jvp(torch.sin, (h,), (torch.ones_like(h),))[1],
    "functional_call": lambda m, h: torch.func.functional_call(
        m.up, {"weight": m.up.weight * 2}, (h[:, :6],)
    ),
    "jacrev": lambda m, h: torch.func.jacrev(lambda t: t.sum(0).sin())(h).sum((0, 1)) + h,
}  # fmt: skip
for name, change in TRANSFORMS.items():
    functions.add(f"transform_{name}", lambda change=change: (Between(change), one(5, 6)), refused="")


@functions(refused="torch.autograd.grad")
def autograd_grad_inside():
    """Forces as the gradient of an energy, computed in the forward."""

    class Forces(Net):
        def forward(self, x):
            x = x.detach().requires_grad_(True)
            energy = super().forward(x).sum()
            return energy, -torch.autograd.grad(energy, x, create_graph=True)[0]

    return Forces(), one(5, 6)


VALUES = {
    "if_sum_positive": lambda m, h: h * 2 if h.sum() > 0 else h,
    "item": lambda m, h: h * h.abs().max().item(),
    "tolist": lambda m, h: h * sum(h[0].tolist()),
    "while_norm": lambda m, h: _shrunk(h),
    "boolean_index": lambda m, h: h[h.sum(1) > 0].sum(0, keepdim=True) + h,
    "masked_select": lambda m, h: h + h.masked_select(h > 0).sum(),
    "nonzero": lambda m, h: h + torch.nonzero(h > 0).float().sum(),
    "unique": lambda m, h: h + torch.unique((h * 3).round().detach()).numel(),
    "assert_values": lambda m, h: _asserted(h),
    "raise_on_values": lambda m, h: _raising(h),
    "any_bool": lambda m, h: h.relu() if bool((h > 0.5).any()) else h,
    "numpy_of_a_value": lambda m, h: h * float(h.detach().numpy().mean()),
    "float_of_a_value": lambda m, h: h * float(h.detach().mean()),
    "slice_to_a_value": lambda m, h: h + h[: int(h.abs().sum()) % 3 + 1].sum(),
}  # fmt: skip


def _shrunk(h):
    while h.norm() > 1:
        h = h / 2
    return h


def _asserted(h):
    assert not torch.isnan(h).any(), "nan"
    return h


def _raising(h):
    if h.max() > 0.9:
        raise ValueError("too large")
    return h


for name, change in VALUES.items():

    def _several(run):
        for seed in range(1, 5):
            run.call(randn(seed, 4 + seed % 2, 6) * (1 if seed < 3 else -2))

    def _values(change=change, script=_several):
        return Between(change), one(5, 6), script

    functions.add(f"values_{name}", _values, refused="value", raises=name == "raise_on_values")


@functions(refused="cond")
def torch_cond():
    """torch.cond chooses a branch by a value."""

    class Choosing(Net):
        def features(self, x):
            return torch.cond(x.sum() > 0, lambda t: t.sin(), lambda t: t.cos(), (super().features(x),))

    return Choosing(), one(5, 6)


@functions()
def torch_where():
    """torch.where chooses by elements."""
    return Between(lambda m, h: torch.where(h > 0, h.sin(), h.exp())), one(5, 6)


@functions(refused="")
def routed_experts():
    """Experts take the tokens that a router sends to them, found by their values."""

    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router, self.experts = nn.Linear(6, 3), nn.ModuleList(nn.Linear(6, 6) for _ in range(3))

        def forward(self, x):
            weights, chosen = self.router(x).softmax(-1).max(-1)
            y = torch.zeros_like(x)
            for i, expert in enumerate(self.experts):
                rows = torch.where(chosen == i)[0]
                y.index_add_(0, rows, expert(x[rows]) * weights[rows, None])
            return y

    return Routed(), one(9, 6)


@functions()
def gather_and_scatter():
    """Rows are gathered by index inputs, and scattered."""

    class Graph(Net):
        def forward(self, x, edges):
            h = self.features(x)
            return self.down(torch.zeros_like(h).index_add(0, edges[1], h[edges[0]]))

    return Graph(), lambda seed: (randn(seed, 7, 6), ids(seed, 7, 2, 11))
