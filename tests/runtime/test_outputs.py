"""Tests of what a model returns and how gradients flow from it: with a loss, without one, and through one outside."""

from __future__ import annotations

import inspect
from collections import namedtuple
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import autopar
from autopar.errors import CaptureError, InputError, SourceMethodError
from autopar.models.output import Output
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair, planned

pytestmark = pytest.mark.usefixtures("kept")

Point = namedtuple("Point", "y total")


@dataclass
class Nested:
    inner: dict
    note: str
    nothing: None = None


class Returning(nn.Module):
    """A Regressor whose result `form(y, x)` puts together."""

    def __init__(self, form):
        super().__init__()
        self.net, self.form = tiny.Regressor(), form

    def forward(self, x):
        return self.form(self.net(x), x)


FORMS = {
    "tensor": lambda y, x: y,
    "scalar": lambda y, x: y.square().mean(),
    "tuple": lambda y, x: (y, [y.sum(), y * 2], None),
    "dict": lambda y, x: {"y": y, "twice": 2 * y},
    "dict with loss": lambda y, x: {"y": y, "loss": y.square().mean(), "also": y.abs().sum()},
    "detached loss": lambda y, x: {"y": y, "loss": y.square().mean().detach(), "also": y.abs().sum()},
    "a view of an output": lambda y, x: {"y": y, "loss": y.square().mean(), "half": y[:4], "turned": y.T},
    "integers": lambda y, x: {"loss": y.square().mean(), "best": y.argmax(-1), "count": (y > 0).sum(), "y": y.detach()},
    "the loss twice": lambda y, x: (lambda loss: {"loss": loss, "total": loss, "y": y})(y.square().mean()),
    "namedtuple": lambda y, x: Point(y, y.sum()),
    "dataclass": lambda y, x: Nested({"y": y, "x": x}, "text"),
    "dataclass with loss": lambda y, x: Output(y.square().mean(), y),
}


def _tensors(value, name=""):
    """(name, tensor) of all tensors of an output."""
    if isinstance(value, torch.Tensor):
        return [(name, value)]
    if isinstance(value, dict):
        return [t for k, v in value.items() for t in _tensors(v, f"{name}.{k}")]
    if isinstance(value, (tuple, list)):
        return [t for i, v in enumerate(value) for t in _tensors(v, f"{name}[{i}]")]
    return _tensors(vars(value), name) if hasattr(value, "__dataclass_fields__") else []


def _loss_of(value):
    return value["loss"] if isinstance(value, dict) and "loss" in value else getattr(value, "loss", None)


def _sum(value):
    """Return the sum of all outputs, each with a factor of its own."""
    terms = [(full(t) * (i + 1)).sum() for i, (_, t) in enumerate(_tensors(value)) if t.requires_grad]
    return sum(terms)


def _check_form(mesh, form, **options):
    """The outputs and what they say of themselves, the gradients of the loss if there is one, and those of all
    outputs."""
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(Returning(form), mesh, (x,), **options)
    for total in (_loss_of, _sum, _sum, _loss_of):
        found, expected = parallel(x), reference(x)
        assert isinstance(found, type(expected))
        for (name, mine), (other, whole) in zip(_tensors(found), _tensors(expected), strict=True):
            assert name == other
            assert_close(mine, whole, name)
            assert mine.requires_grad == whole.requires_grad, name
        if getattr(total(expected), "requires_grad", False):
            for model, outputs in ((parallel, found), (reference, expected)):
                model.zero_grad()
                total(outputs).backward()
            assert_same_gradients(parallel, reference)
    if isinstance(expected, Nested):
        assert found.note == "text" and found.nothing is None


@pytest.mark.sampled(1)
@pytest.mark.parametrize("form", FORMS)
def test_forms(alone, form):
    _check_form(alone, FORMS[form])


def _distributed(rank, plan):
    """On four processes: every form, then losses outside of the model."""
    mesh = device_mesh("dp=2,tp=2")
    for form in ("tensor", "tuple", "dict with loss", "the loss twice"):
        _check_form(mesh, FORMS[form])
    x, y = tiny.Regressor.batch()
    model, reference = pair(tiny.Regressor(), mesh, dict(x=x), plan=plan)
    target = model.shard_inputs(target=y)["target"]
    (also,) = model.shard_inputs(y)
    assert target.placements == also.placements == model(x=x).placements and not target.placements[0].is_replicate()
    reference(x).sub(y).square().mean().backward()
    for loss in (
        lambda: (model(x=x) - target).square().mean(),  # on DTensors
        lambda: F.mse_loss(full(model(x=x)), y),  # on gathered outputs
        lambda: (full(model(**model.shard_inputs(x=x))) - also.full_tensor()).square().mean(),
    ):
        model.zero_grad()
        loss().backward()
        assert_same_gradients(model, reference)
    for each in (model, reference):
        each.zero_grad()
        (F.mse_loss(each(x=x), y) + _penalty(each)).backward()
    assert_same_gradients(model, reference)


def _penalty(model) -> torch.Tensor:
    """Return what a script adds for all parameters, which are DTensors, to a loss, which is a plain tensor."""
    return sum(0.1 * p.square().sum() + 0.01 * p.norm(1) for p in model.parameters())


@pytest.mark.slow
@pytest.mark.gloo
def test_losses_outside_on_four_processes():
    x, _ = tiny.Regressor.batch()
    plan = planned(tiny.Regressor(), "dp=2,tp=2", dict(x=x), strategy="megatron")
    gloo.run(4, _distributed, plan)


def test_loss_fn(alone):
    x, y = tiny.Regressor.batch()
    parallel, reference = pair(
        tiny.Regressor(), alone, dict(x=x, target=y), loss_fn=lambda out, target: F.mse_loss(out, target)
    )
    result = parallel(x=x, target=y)
    assert_close(result.output, reference(x))
    assert result.output.requires_grad
    result.loss.backward()
    F.mse_loss(reference(x), y).backward()
    assert_same_gradients(parallel, reference)


def test_loss_fn_gets_what_it_takes(alone):
    x, y = tiny.Regressor.batch()
    takes_any = autopar.compile(
        tiny.Regressor(), alone, dict(x=x, t=y), loss_fn=lambda out, **rest: F.mse_loss(out, rest["t"])
    )
    assert torch.isfinite(takes_any(x=x, t=y).loss)
    with pytest.raises(InputError, match="neither the model nor loss_fn takes target"):
        autopar.compile(tiny.Regressor(), alone, dict(x=x, target=y), loss_fn=lambda out: out.sum())


def test_hugging_face_outputs(alone):
    model, batch = tiny.gpt2(n_layer=1)
    parallel, reference = pair(model, alone, batch)
    found, expected = parallel(**batch), reference(**batch)
    assert type(found) is type(expected) and list(found) == list(expected)
    assert_close(found["logits"], expected.logits)
    assert found[0] is found.loss and found.logits.requires_grad
    assert parallel.config.n_embd == 24 and parallel.config is model.config
    assert parallel.dtype == torch.float32
    assert parallel.num_parameters() == model.num_parameters() == reference.num_parameters()
    assert parallel.get_input_embeddings() is model.transformer.wte
    assert inspect.signature(parallel.forward) == inspect.signature(reference.forward)
    with pytest.raises(
        SourceMethodError, match="resize_token_embeddings is a method of the source model that computes"
    ):
        parallel.resize_token_embeddings(100)
    assert not hasattr(parallel, "no_such_attribute")


def _generated(rank: int, mesh: str, strategy: str | None) -> None:
    """Greedy and sampled, between steps of training, on every rank."""
    model, batch = tiny.gpt2(n_layer=1, bos_token_id=0, eos_token_id=0)
    parallel, reference = pair(model, device_mesh(mesh), batch, strategy=strategy)
    for _ in range(2):
        for options in (dict(do_sample=False), dict(do_sample=True, top_k=20)):
            found = []
            for m in (parallel, reference):
                m.eval()
                torch.manual_seed(5)
                tokens = m.generate(
                    batch["input_ids"][:2, :6], max_new_tokens=3, use_cache=False, pad_token_id=0, **options
                )
                found.append(tokens.tolist())
            assert found[0] == found[1]
        for m in (parallel, reference):
            m.train()
            m.zero_grad()
            m(**batch).loss.backward()
        assert_same_gradients(parallel, reference)


@pytest.mark.slow
@pytest.mark.gloo
def test_generate_on_processes():
    gloo.run(2, _generated, "tp=2", "megatron")


def test_what_cannot_be_returned(alone):
    x, _ = tiny.Regressor.batch()
    with pytest.raises(CaptureError, match="returns a Hidden as y, which may hold tensors"):
        autopar.compile(Returning(lambda y, x: {"y": Hidden(y)}), alone, (x,))
    with pytest.raises(CaptureError, match="the model returns no tensor"):
        autopar.compile(Returning(lambda y, x: None), alone, (x,))


class Hidden:
    def __init__(self, y):
        self.y = y


# modes and buffers
# -----------------------------------------------------------------------------------------------------


class Normalized(nn.Module):
    def __init__(self, dropout: float = 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.conv = nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.BatchNorm2d(4)
        self.drop = nn.Dropout(dropout)
        self.head = nn.Linear(4, 2)

    def forward(self, x):
        return self.drop(self.head(torch.relu(self.norm(self.conv(x))).mean((2, 3)))).square().mean()


def _batch_norm(rank):
    """Running statistics and gradients of the global batch, in both modes."""
    mesh, x = device_mesh("dp=2"), torch.randn(4, 3, 6, 6, generator=torch.Generator().manual_seed(0))
    for training in (True, False):
        parallel, reference = pair(Normalized().train(training), mesh, (x,))
        for step in range(2):
            losses = [m(x + step) for m in (parallel, reference)]  # a second forward before the first backward
            more = [m(2 * x) for m in (parallel, reference)]
            for loss, other in zip(losses, more):
                (loss + other).backward()
        assert_close(*losses, "loss", 1e-4)
        assert_same_gradients(parallel, reference, 1e-4)
        for (name, mine), whole in zip(parallel.named_buffers(), reference.buffers()):
            assert_close(mine, whole, name, 1e-4)


@pytest.mark.gloo
def test_batch_norm_on_two_processes():
    gloo.run(2, _batch_norm)


def test_modes(alone):
    x, _ = tiny.Regressor.batch()
    parallel, reference = pair(tiny.Regressor(), alone, (x,))
    with torch.no_grad():
        assert_close(parallel.eval()(x), reference(x))
    parallel.train()(x).sum().backward()
    images = torch.randn(2, 3, 6, 6)
    evaluated = autopar.compile(Normalized(dropout=0.5).eval(), alone, (images,))
    evaluated(images)
    assert evaluated.random.offset == 0
    evaluated.train()(images).backward()  # a capture of its own, which draws
    assert evaluated.random.offset == 1


def test_two_forwards_draw_different_numbers(alone):
    """The offset counts forwards; going back to one draws its numbers again; torch's own generator is left alone."""
    images = torch.randn(2, 3, 6, 6)
    model = Normalized(dropout=0.5)
    torch.manual_seed(41)
    parallel = autopar.compile(model, alone, (images,))
    assert (parallel.random.seed, parallel.random.offset) == (41, 0)
    generator = torch.get_rng_state()
    losses = [parallel(images) for _ in range(8)]
    losses[0].backward()
    assert parallel.random.offset == 8 and len({loss.item() for loss in losses}) > 2
    assert torch.equal(torch.get_rng_state(), generator)
    parallel.random.offset = 3
    assert parallel(images).item() == losses[3].item()
    parallel.random.seed, parallel.random.offset = 42, 3
    assert [parallel(images).item() for _ in range(4)] != [loss.item() for loss in losses[3:7]]
