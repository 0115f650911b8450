"""Gradients through outputs beside the loss: the program for them is made at their first need, and serves from then
on."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar import compiler
from autopar.errors import InputError
from autopar.ir.mesh import Mesh
from autopar.models.output import Output
from autopar.planner.options import options_of
from autopar.planner.spmd.plan import make_plan
from autopar.runtime.captures import Captures
from autopar.simulate.compare import verify_plan
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair

pytestmark = pytest.mark.usefixtures("kept")


class TwoHeads(nn.Module):
    """A loss from one head, scores from another; `also` reads a part of the parameters that the loss does not."""

    def __init__(self, dropout: float = 0.0, norm: bool = False, grows: bool = True):
        super().__init__()
        torch.manual_seed(0)
        self.grows = grows
        self.body = nn.Linear(6, 10)
        self.norm = nn.BatchNorm1d(10) if norm else nn.Identity()
        self.drop = nn.Dropout(dropout)
        self.one, self.other = nn.Linear(10, 3), nn.Linear(10, 5)
        self.register_buffer("seen", torch.zeros(5))

    def forward(self, x, target):
        h = self.drop(self.norm(torch.tanh(self.body(x))))
        self.seen.add_(1.0)
        scores = self.other(h) * (self.seen if self.grows else 2.0)
        return {"loss": F.cross_entropy(self.one(h), target), "scores": scores}


def batch(size: int = 8):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(size, 6, generator=generator), torch.randint(0, 3, (size,), generator=generator)


def both(parallel, reference, total, *arguments, steps: int = 1):
    """Backward of `total(outputs)` in both models, and a comparison of everything they leave."""
    for _ in range(steps):
        for model in (parallel, reference):
            total(model(*arguments)).backward()
        assert_same_gradients(parallel, reference)
        for (name, mine), whole in zip(parallel.named_buffers(), reference.buffers()):
            assert_close(mine, whole, name)


def weighted(outputs):
    return outputs["loss"] + 0.1 * full(outputs["scores"]).square().mean()


def scores(outputs):
    return full(outputs["scores"]).square().mean()


def _programs(monkeypatch) -> list[str]:
    """Is told of each program made for all outputs."""
    made, complete = [], Captures._complete

    def completed(self, step, inputs):
        known = next(capture.step for capture in self.table if capture.inputs is inputs)
        made.append(known is not step)
        return complete(self, step, inputs)

    monkeypatch.setattr(Captures, "_complete", completed)
    return made


def test_loss_alone_makes_no_other_program(alone, monkeypatch):
    made = _programs(monkeypatch)
    parallel, reference = pair(TwoHeads(), alone, batch())
    both(parallel, reference, lambda o: o["loss"], *batch(), steps=2)
    assert not made and parallel.other.weight.grad is None
    both(parallel, reference, weighted, *batch(), steps=3)
    assert made == [False]
    parallel.zero_grad(), reference.zero_grad()
    both(parallel, reference, lambda o: o["loss"], *batch())  # in the program for all outputs
    assert parallel.other.weight.grad is None and made == [False] and len(parallel.captures) == 1


@pytest.mark.slow
def test_the_forward_before_the_program_keeps_its_numbers(alone):
    """Masks, buffers and parameters of the forward that the backward belongs to, whatever ran since."""
    x, y = batch()
    torch.manual_seed(3)
    parallel = autopar.compile(TwoHeads(0.5, norm=True), alone, (x, y))
    torch.manual_seed(3)
    again = autopar.compile(TwoHeads(0.5, norm=True), alone, (x, y))
    parallel.random.seed = again.random.seed  # and goes on with it, although torch was seeded since
    full(again(x, y)["scores"]).sum().backward()  # from here on it has the program from the start
    again.random.offset = 0
    again.seen.zero_(), again.zero_grad()
    for model in (parallel, again):
        outputs = [model(x, y), model(2 * x, y)]
        weighted(outputs[0]).backward()
        weighted(outputs[1]).backward()
    for (name, mine), other in zip(parallel.named_parameters(), again.parameters()):
        assert_close(mine.grad, other.grad.full_tensor(), name)
    assert parallel.random.offset == again.random.offset == 2
    assert torch.equal(parallel.seen, again.seen) and parallel.norm.num_batches_tracked == 2


def test_retained_graphs_and_several_gradients(alone):
    x, y = batch()
    parallel, reference = pair(TwoHeads(norm=True), alone, (x, y))
    for model in (parallel, reference):
        outputs = model(x, y)
        outputs["loss"].backward(retain_graph=True)
        scores(outputs).backward(retain_graph=True)
        weighted(outputs).backward()
        with pytest.raises((RuntimeError, InputError), match="second time"):
            scores(outputs).backward()
    assert_same_gradients(parallel, reference)
    found = []
    for model in (parallel, reference):
        outputs, leaves = model(x, y), [model.body.weight, model.other.bias]
        found.append(
            torch.autograd.grad([outputs["loss"], scores(outputs)], leaves, [torch.tensor(2.0), torch.tensor(3.0)])
        )
    for mine, whole in zip(*found):
        assert_close(mine, whole)


def test_what_changes_before_the_backward(alone):
    x, y = batch()
    parallel = autopar.compile(TwoHeads(), alone, (x, y))
    outputs = parallel(x, y)
    with torch.no_grad():
        parallel.other.bias.add_(1)  # which the loss does not read
    outputs["loss"].backward(retain_graph=True)
    with pytest.raises(InputError, match="the parameter other.bias, which this backward needs, has been modified"):
        scores(outputs).backward()
    outputs = parallel(x, y)
    with torch.no_grad():
        parallel.one.weight.add_(1)
    with pytest.raises(
        InputError, match="parameter one.weight, which this backward needs, has been modified by an inplace"
    ):
        outputs["loss"].backward()
    evaluated = autopar.compile(Scaled(), alone, (x,))
    for change, what in (
        (evaluated.scale, "a parameter, buffer or input"),
        (evaluated.layer.weight, "the parameter layer.weight"),
    ):
        outputs = evaluated(x)
        with torch.no_grad():
            change.mul_(2)
        with pytest.raises(InputError, match=f"{what}(.|\n)*modified by an inplace operation"):
            full(outputs).sum().backward()


class Scaled(nn.Module):
    """Has a buffer that its backward reads."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 4), nn.Linear(4, 2)
        self.last.requires_grad_(False)
        self.register_buffer("scale", torch.ones(4))

    def forward(self, x):
        return self.last(torch.relu(self.layer(self.layer(x) @ torch.ones(4, 6)) * self.scale))


@pytest.mark.slow
def test_hooks_and_evaluation(alone):
    """Gradients pass hooks once, in train and in eval mode."""
    x, y = batch()
    parallel, reference = pair(TwoHeads(norm=True), alone, (x, y))
    calls = []
    parallel.body.weight.register_post_accumulate_grad_hook(lambda p: calls.append(p.grad is not None))
    both(parallel, reference, weighted, x, y)
    parallel.eval(), reference.eval()
    both(parallel, reference, scores, x, y, steps=2)
    assert calls == [True] * 3
    with torch.no_grad():
        found, expected = parallel(x, y), reference(x, y)
        assert not found["scores"].requires_grad and not found["loss"].requires_grad
        assert_close(found["scores"], expected["scores"])


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["dp=2", "tp=3", "dp=2,tp=2"])
@pytest.mark.parametrize("strategy", [None, "fsdp", "megatron"])
def test_simulated(mesh, strategy):
    """The program with tangents for the loss and the scores, against eager torch."""
    model, arguments = TwoHeads(norm=True), batch(7)
    captured = compiler.trace(model, arguments, loss_alone=False)
    tangents = [n for n in captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "tangent"]
    options = options_of(mesh, "cpu-gloo", None, "adamw", "fp32", strategy, None, False, {}, False)
    plan = make_plan(captured, Mesh.parse(mesh), options, "TwoHeads")
    report = verify_plan(captured, plan, model, arguments)
    assert len(tangents) == 2 and report.match and "other.weight" in report.gradient_errors, str(report)


def _sharded(rank):
    """Accumulation, buffers and dropout over two ranks that cut a batch of seven unevenly."""
    mesh, arguments = device_mesh("dp=2"), batch(7)
    parallel, reference = pair(TwoHeads(norm=True), mesh, arguments)
    both(parallel, reference, scores, *arguments, steps=2)
    for outside in (weighted, lambda o: o["loss"]):
        parallel.zero_grad(), reference.zero_grad()
        with parallel.no_sync():
            for total in (lambda o: o["loss"], scores, weighted):
                for model in (parallel, reference):
                    total(model(*arguments)).backward()
        both(parallel, reference, outside, *arguments)
    parallel, reference = pair(TwoHeads(), mesh, arguments)
    with parallel.no_sync():  # the program is made inside
        for model in (parallel, reference):
            weighted(model(*arguments)).backward()
    both(parallel, reference, weighted, *arguments)
    gathered = autopar.compile(TwoHeads(), mesh, arguments, strategy="fsdp")  # the backward would gather new values
    loss = gathered(*arguments)["loss"]
    torch.optim.AdamW(gathered.parameters()).step()
    with torch.no_grad():
        for parameter in gathered.parameters():
            parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(gathered.parameters()).step()
    with pytest.raises(InputError, match="which this backward needs, has been modified by an inplace operation"):
        loss.backward()
    torch.manual_seed(5)
    drawn = autopar.compile(TwoHeads(0.5), mesh, arguments)
    gradients = []
    for _ in range(2):  # with the program made in the backward, and before the forward
        drawn.random.offset, drawn.seen[:] = 0, 0
        drawn.zero_grad()
        weighted(drawn(*arguments)).backward()
        gradients.append([full(p.grad) for p in drawn.parameters()])
    for mine, whole in zip(*gradients):
        assert_close(mine, whole)


@pytest.mark.slow
@pytest.mark.gloo
def test_on_two_processes():
    gloo.run(2, _sharded)


class Chained(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.layer = nn.Linear(5, 2)

    def forward(self, scores):
        return self.layer(scores).square().sum()


def test_an_output_goes_on_into_another_module(alone):
    x, y = batch()
    (parallel, reference), (head, plain) = (
        pair(TwoHeads(), alone, (x, y)),
        pair(Chained(), alone, (x @ torch.ones(6, 5),)),
    )
    plain_head = Chained()
    for model, after, beside in ((parallel, head, full), (reference, plain, full)):
        outputs = model(x, y)
        (after(outputs["scores"]) + plain_head(beside(outputs["scores"])) + outputs["loss"]).backward()
    assert_same_gradients(parallel, reference)
    assert_same_gradients(head, plain)


def test_outputs_that_are_views_of_parameters(alone):
    class Viewing(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.w = nn.Parameter(torch.randn(6, 4))

        def forward(self, x):
            y = x @ self.w
            return Output(y.square().mean(), {"w": self.w, "top": self.w[:2], "y": y, "same": y, "x": x})

    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(Viewing(), alone, (x,))
    for _ in range(2):
        for model in (parallel, reference):
            out = model(x)
            assert [v.requires_grad for v in out.logits.values()] == [True, True, True, True, False]
            (out.loss + sum(full(v).sin().sum() for v in out.logits.values())).backward()
        assert_same_gradients(parallel, reference)


def test_the_log_names_the_program(alone, caplog):
    parallel = autopar.compile(TwoHeads(), alone, batch())
    with caplog.at_level(logging.INFO, "autopar"):
        scores(parallel(*batch())).backward()
    assert any("gradients of all outputs: compiled in" in r.message for r in caplog.records)


def test_several_calls_before_a_backward(alone):
    """Siamese: one loss of two calls, and accumulation over calls of other forms and modes."""
    x, y = batch()
    parallel, reference = pair(TwoHeads(norm=True, grows=False), alone, (x, y))
    for _ in range(2):
        for model in (parallel, reference):
            one, two = model(x, y), model(x.flip(0), y)
            apart = (full(one["scores"]) - full(two["scores"])).square().sum()
            (one["loss"] + two["loss"] + apart).backward()
            scores(model(x[:5], y[:5])).backward()
            with torch.no_grad():
                model(x, y)
        assert_same_gradients(parallel, reference)
        for (name, mine), whole in zip(parallel.named_buffers(), reference.buffers()):
            assert_close(mine, whole, name)


class Mixed(nn.Module):
    """Outputs with and without gradients: detached, made without gradients, of frozen parameters, of the input."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.one, self.frozen = nn.Linear(6, 4), nn.Linear(6, 4).requires_grad_(False)

    def forward(self, x):
        y = self.one(x)
        with torch.no_grad():
            quiet = self.one(2 * x)
        parts = dict(
            y=y, quiet=quiet, frozen=self.frozen(x), cut=y.detach(), x=x, part=x[:3], sum=y.sum(), best=y.argmax(-1)
        )
        return Output(y.square().mean(), parts)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gradient", [False, True])
def test_which_outputs_have_gradients(alone, gradient):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(Mixed(), alone, (x,))
    for mode in (True, False):
        for model in (parallel, reference):
            model.train(mode)
        inputs = x.clone().requires_grad_(gradient), x.clone().requires_grad_(gradient)
        for _ in range(2):
            found, expected = parallel(inputs[0]), reference(inputs[1])
            for name, whole in expected.logits.items():
                assert found.logits[name].requires_grad == whole.requires_grad, name
            for out in (found, expected):
                terms = [full(t).sin().sum() * i for i, t in enumerate(out.logits.values(), 2) if t.requires_grad]
                (out.loss + sum(terms)).backward()
            assert_same_gradients(parallel, reference)
            assert not gradient or not assert_close(inputs[0].grad, inputs[1].grad)


@pytest.mark.slow
def test_adapters(alone):
    """With an adapter and without it: each has its own program."""
    model, tokens = tiny.gpt2(n_layer=1)
    parallel = autopar.compile(model, alone, tokens, adapt=[autopar.LoRA(r=2, target_modules=["c_attn"])])
    found = []
    for _ in range(2):
        parallel.zero_grad()
        scores_ = full(parallel(**tokens).logits)
        scores_.square().mean().backward()
        found.append([full(p.grad) for p in parallel.parameters() if p.grad is not None])
    assert len(found[0]) == 2
    for mine, whole in zip(*found):
        assert_close(mine, whole)
