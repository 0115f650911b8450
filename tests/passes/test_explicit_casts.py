"""Autocast inside and around a forward is captured as casts: the same numbers as in eager torch, and the same
gradients."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar._torch.regions import autocast_switch
from autopar.frontend import autocast
from autopar.frontend.export import export
from autopar.ir.graph import is_tensor, output_node
from autopar.passes.canonicalize.explicit_casts import explicit_casts
from autopar.passes.canonicalize.grad_regions import grad_regions

from .against_eager import assert_as_eager
from .test_grad_regions import Net


def low(**options):
    return torch.autocast("cpu", dtype=torch.bfloat16, **options)


def two_layers(net, x):
    with low():
        y = net.second(F.gelu(net.first(x)))
    return y.float().square().sum()


def off_inside(net, x):
    with low():
        y = net.first(x)
        with torch.autocast("cpu", enabled=False):
            z = net.second(y.float())
        return F.mse_loss(net.first(z), y)


def float16_inside(net, x):
    with low():
        y = net.first(x)
        with torch.autocast("cpu", dtype=torch.float16):
            z = net.second(y)
    return (z.float() * y).sum()


def layer_that_is_used_twice(net, x):
    with low():
        return net.first(net.first(x)).float().square().sum()


def without_gradients_inside(net, x):
    with low():
        with torch.no_grad():
            wanted = net.teacher(x)
            net.mean.mul_(0.9).add_(net.first(x).mean((0, 1)), alpha=0.1)
        return F.mse_loss(net.first(x), wanted) + net.mean.sum()


def inside_of_no_grad(net, x):
    with torch.no_grad(), low():
        hidden = net.first(x)
    return net.second(hidden.float()).square().sum()


def weight_written_between(net, x):
    with low():
        with torch.no_grad():
            net.first.weight.clamp_(-0.2, 0.2)
        return net.first(x).float().sum()


def composite_ops(net, x):
    with low():
        y = torch.einsum("bsi,oi->bso", x, net.first.weight)
        return torch.cdist(net.second(y), y).sum() + torch.cat([net.second(x), x]).square().sum()


def attention(net, x):
    with low():
        q, v = (layer(x).view(2, 3, 2, 2).transpose(1, 2) for layer in (net.first, net.second))
        return F.scaled_dot_product_attention(q, q, v).float().square().sum()


def conv1d(net, x):
    with low():
        y = torch.addmm(net.first.bias, x.view(-1, 4), net.first.weight).view(2, 3, 4)
    return y.float().square().sum()


def loss(net, x):
    with low():
        return F.cross_entropy(net.first(x).view(-1, 4), torch.arange(6) % 4)


def convolution(net, x):
    with low():
        return F.conv1d(x, net.first.weight[:3, :3].unsqueeze(-1)).float().square().sum()


def autocast_of_another_device(net, x):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        return net.first(x).square().sum()


def from_one_call_into_another(net, x):
    region = low()
    region.__enter__()
    y = net.first(x)
    region.__exit__(None, None, None)
    return net.second(y.float()).sum()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad):
        x, w = ctx.saved_tensors
        return grad.float() @ w.t(), x.flatten(0, 1).t() @ grad.flatten(0, 1).float()


def own_function(net, x):
    with low():
        return Product.apply(net.first(x).float(), net.second.weight).float().square().sum()


CASES = [
    own_function, two_layers, off_inside, float16_inside, layer_that_is_used_twice, without_gradients_inside,
    inside_of_no_grad, weight_written_between, composite_ops, attention, conv1d, loss, convolution,
    autocast_of_another_device, from_one_call_into_another,
]  # fmt: skip


@pytest.fixture
def x():
    torch.manual_seed(0)
    return torch.randn(2, 3, 4)


def forward_of(model: nn.Module, x: torch.Tensor, around: autocast.State = ()):
    """The exported forward of `model` with explicit casts, as a function of the values of a model."""
    with autocast.entered(around):
        exported = export(model, (x,))
    module = grad_regions(explicit_casts(exported.graph_module, around))
    assert all(autocast_switch(n) is None for n in module.graph.nodes)

    def run(other: nn.Module, x: torch.Tensor) -> torch.Tensor:
        values = {f"model.{n}": v for n, v in [*other.named_parameters(), *other.named_buffers()]}
        return torch.func.functional_call(module, values, (x,))[0]

    return run


def assert_the_same_bits(model: nn.Module, x: torch.Tensor, around: autocast.State = ()) -> None:
    """The loss, every gradient and every new value of the exported forward are eager torch's."""
    run, mine, eager = forward_of(model, x, around), copy.deepcopy(model), copy.deepcopy(model)
    with autocast.entered(around):
        wanted = eager(x)
    found = run(mine, x)
    assert found.dtype == wanted.dtype and torch.equal(found, wanted)
    found.backward()
    wanted.backward()
    for (name, one), (_, other) in zip(mine.named_parameters(), eager.named_parameters()):
        assert torch.equal(one, other), name
        assert (one.grad is None) == (other.grad is None), name
        assert one.grad is None or torch.equal(one.grad, other.grad), name
    assert all(torch.equal(one, other) for one, other in zip(mine.buffers(), eager.buffers()))


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_the_forward_is_that_of_eager_torch_to_the_bit(run, x):
    assert_the_same_bits(Net(run), x)


@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_a_step_is_that_of_eager_torch(run, x):
    """Up to the roundings of sums that are split differently, as of a product and its bias."""
    assert_as_eager(Net(run), x, tolerance=3e-2)


def plain(net, x):
    return F.cross_entropy(net.second(net.first(x).relu()).view(-1, 4), torch.arange(6) % 4)


def test_autocast_around_the_call(x):
    state = (("cpu", torch.bfloat16),)
    for run in (plain, off_inside, inside_of_no_grad):
        assert_the_same_bits(Net(run), x, state)
    with low():
        captured = compiler.trace(Net(plain), (x,))
        assert autocast.ambient() == state
    dtypes = {str(n.target): n.meta["val"].dtype for n in captured.graph.nodes if is_tensor(n)}
    assert dtypes["autopar.linear.default"] == torch.bfloat16 and dtypes["autopar.linear_dw.default"] == torch.bfloat16
    assert autocast.ambient() == ()


def test_gradients_are_as_wide_as_parameters(x):
    captured = compiler.trace(Net(two_layers), (x,))
    output = output_node(captured.graph)
    found = {r.name: v.meta["val"].dtype for r, v in zip(output.meta["roles"], output.args[0]) if r.kind == "gradient"}
    assert set(found.values()) == {torch.float32} and len(found) == 4


def test_an_own_function_computes_in_the_lower_precision(x):
    products = [n for n in compiler.trace(Net(own_function), (x,)).graph.nodes if str(n.target) == "aten.mm.default"]
    assert products[0].meta["val"].dtype == torch.bfloat16


def test_a_weight_is_cast_once(x):
    module = explicit_casts(export(Net(layer_that_is_used_twice), (x,)).graph_module)
    casts = [n for n in module.graph.nodes if n.target is torch.ops.aten.to.dtype and n.args[0].op == "get_attr"]
    assert sorted(n.args[0].target for n in casts) == ["model.first.bias", "model.first.weight"]


def test_state():
    assert autocast.ambient() == ()
    with autocast.entered((("cpu", torch.float16), ("cuda", torch.bfloat16))):
        assert autocast.ambient() == (("cpu", torch.float16), ("cuda", torch.bfloat16))
        with autocast.entered(()):
            assert autocast.ambient() == ()
        assert hash(autocast.ambient())
    assert autocast.ambient() == ()
