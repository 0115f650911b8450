"""Stretches of a forward without gradients are captured as eager torch runs them: values, gradients and writes."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar.ir.graph import output_node

from .against_eager import assert_as_eager


class Net(nn.Module):
    """Two layers that train, a teacher that does not, and some buffers; `run(net, x)` is its forward."""

    def __init__(self, run):
        super().__init__()
        self.run, self.first, self.second, self.teacher = run, nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.table = nn.Embedding(6, 4, max_norm=0.5)
        self.register_buffer("mean", torch.ones(4))
        self.register_buffer("codes", torch.randn(3, 4))
        self.register_buffer("count", torch.zeros(()))
        self.teacher.requires_grad_(False)

    def forward(self, x):
        return self.run(self, x)


def writes_that_nobody_reads(net, x):
    with torch.no_grad():
        net.mean.mul_(0.9).add_(x.mean((0, 1)), alpha=0.1)
    y = net.first(x)
    with torch.no_grad():
        net.codes[1] = y.mean((0, 1))
        net.count += 1
    return y.square().sum()


def writes_that_are_read(net, x):
    y = net.first(x)
    with torch.no_grad():
        net.mean.mul_(0.9).add_(y.mean((0, 1)), alpha=0.1)
    return (net.second(y) * net.mean).sum()


def nearest_code(net, x):
    y = net.first(x)
    with torch.no_grad():
        nearest = torch.cdist(y.flatten(0, 1), net.codes).argmin(-1)
        hits = F.one_hot(nearest, 3).float()
        net.codes.lerp_((hits.t() @ y.flatten(0, 1)) / hits.sum(0).clamp(min=1).unsqueeze(1), 0.1)
    quantized = F.embedding(nearest, net.codes).view_as(y)
    return F.mse_loss(y, quantized) + net.second(y + (quantized - y).detach()).square().mean()


def teacher_follows(net, x):
    with torch.no_grad():
        for old, new in zip(net.teacher.parameters(), net.first.parameters()):
            old.mul_(0.9).add_(new, alpha=0.1)
        wanted = net.teacher(x)
    return F.mse_loss(net.second(net.first(x)), wanted)


@torch.no_grad()
def _follow(net):
    torch._foreach_mul_(list(net.teacher.parameters()), 0.9)
    torch._foreach_add_(list(net.teacher.parameters()), list(net.first.parameters()), alpha=0.1)


def teacher_follows_at_once(net, x):
    _follow(net)
    return F.mse_loss(net.first(x), net.teacher(x))


def masks_written_in_place(net, x):
    q = net.first(x).view(2, 3, 2, 2).transpose(1, 2)
    mask = torch.zeros(3, 3, dtype=torch.bool)
    mask[:, :2] = True
    with torch.no_grad():
        net.codes[0, 1] = 1.0
    y = F.scaled_dot_product_attention(q, q, q, attn_mask=mask)
    return y.square().sum() + F.scaled_dot_product_attention(q, q, q, attn_mask=net.codes[:, :3]).square().sum()


def clamped_weights(net, x):
    with torch.no_grad():
        net.first.weight.clamp_(-0.2, 0.2)
        net.second.bias.zero_()
    return net.second(net.first(x)).square().sum()


def clamped_and_not_used(net, x):
    with torch.no_grad():
        net.second.weight.clamp_(-0.2, 0.2)
    return net.first(x).square().sum()


def clamped_after_use(net, x):
    y = net.first(x)
    with torch.no_grad():
        net.first.weight.clamp_(-0.2, 0.2)
    return y.square().sum()


def rows_of_limited_norm(net, x):
    return (net.table(torch.tensor([0, 3, 3])) * net.first(x).mean()).sum()


def gradients_inside(net, x):
    with torch.no_grad():
        hidden = net.first(x)
        with torch.enable_grad():
            y = net.second(hidden) * net.first(x)
        z = net.second(y)
    return (y * z).sum()


def views_made_inside(net, x):
    y = net.first(x)
    with torch.no_grad():
        flat, row = y.view(-1, 4), y.flatten()[:4]
    return F.linear(flat, net.second.weight).sum() + (row * y[0, 0]).sum()


def the_same_tensor_given_back(net, x):
    y = net.first(x)
    with torch.no_grad():
        same, weight = y.float(), net.second.weight.contiguous()
    return F.linear(same, weight).square().sum()


def logits_without_gradients(net, x):
    with torch.no_grad():
        logits = net.first(x).contiguous().float().view(-1, 4)
    target = torch.arange(6) % 4
    return F.cross_entropy(logits, target) + F.cross_entropy(net.second(x).view(-1, 4), target)


def attention_without_gradients(net, x):
    y = net.first(x)
    with torch.no_grad():
        k = y.view(2, 3, 2, 2).transpose(1, 2).contiguous()
    q = net.second(x).view(2, 3, 2, 2).transpose(1, 2)
    return F.scaled_dot_product_attention(q, k, q).square().sum()


def switched_by_function(net, x):
    torch.set_grad_enabled(False)
    y = net.first(x)
    net.count += 1
    torch.set_grad_enabled(True)
    z = net.second(x) * y
    torch.set_grad_enabled(False)
    net.mean += z.mean()
    torch.set_grad_enabled(True)
    return z.sum() + net.mean.sum()


class Opens(nn.Module):
    def forward(self, x):
        torch.set_grad_enabled(False)
        return x * 2


class Closes(nn.Module):
    def forward(self, x):
        y = x * 3
        torch.set_grad_enabled(True)
        return y + 1


def from_one_module_into_another(net, x):
    return (net.second(x) * Closes()(net.first(Opens()(net.second(x))))).sum()


def written_in_and_outside(net, x):
    with torch.no_grad():
        h = torch.zeros(4, 4)
        h[1] = 1.0
    h[0] = net.first(x).mean((0, 1))
    h.add_(net.second.weight)
    with torch.no_grad():
        h[2] = 0.0
        total = h.sum()
    return h.square().sum() + total


@torch.no_grad()
def _scores(net, x):
    return net.first(x).softmax(-1)


def decorated(net, x):
    return (net.second(x) * _scores(net, x)).sum()


def data_of_a_weight(net, x):
    net.first.weight.data.mul_(0.5)
    net.mean.data.add_(1)
    return (net.second(net.first(x)) * net.mean).sum()


def data_of_a_teacher(net, x):
    for old, new in zip(net.teacher.parameters(), net.first.parameters()):
        old.data = old.data * 0.9 + new.data * 0.1
    return F.mse_loss(net.first(x), net.teacher(x))


def inference_inside(net, x):
    with torch.inference_mode():
        score = net.first(x).sum()
        with torch.inference_mode(False):
            y = net.second(x)
        net.mean.mul_(0.9)
    return y.square().sum() + score


CASES = [
    data_of_a_weight, data_of_a_teacher, inference_inside,
    writes_that_nobody_reads, writes_that_are_read, nearest_code, teacher_follows,
    teacher_follows_at_once, masks_written_in_place, clamped_weights, clamped_and_not_used,
    clamped_after_use, rows_of_limited_norm, gradients_inside, views_made_inside, the_same_tensor_given_back,
    logits_without_gradients, attention_without_gradients, switched_by_function, from_one_module_into_another,
    written_in_and_outside, decorated,
]  # fmt: skip


@pytest.mark.sampled(1)
@pytest.mark.parametrize("run", CASES, ids=lambda run: run.__name__)
def test_a_step_is_that_of_eager_torch(run):
    torch.manual_seed(0)
    assert_as_eager(Net(run), torch.randn(2, 3, 4), tolerance=1e-5)


def test_every_written_tensor_is_an_output():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 4)
    written = {
        writes_that_nobody_reads: {"mean", "codes", "count"},
        teacher_follows: {"teacher.weight", "teacher.bias"},
        clamped_weights: {"first.weight", "second.bias"},
        rows_of_limited_norm: {"table.weight"},
    }
    for run, names in written.items():
        roles = output_node(compiler.trace(Net(run), (x,)).graph).meta["roles"]
        assert {r.name for r in roles if r.kind == "mutation"} == names


def test_random_ops_without_gradients_have_a_formula():
    def run(net, x):
        with torch.no_grad():
            keep = F.dropout(torch.ones_like(x), 0.5)
        return (net.first(x) * keep).sum()

    captured = compiler.trace(Net(run), (torch.randn(2, 3, 4),))
    assert "autopar.dropout.default" in {str(n.target) for n in captured.graph.nodes}


def test_an_error_inside_leaves_gradients_on():
    def run(net, x):
        with torch.no_grad():
            if x.sum() > 0:
                return net.first(x).sum()
        return net.second(x).sum()

    with pytest.raises(Exception, match="values of a tensor"):
        compiler.trace(Net(run), (torch.randn(2, 3, 4),))
    assert torch.is_grad_enabled()
