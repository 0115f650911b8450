"""Tests that what no joint graph can hold is one error with the reason and the user's line, and that nothing of torch's
own is printed."""

from __future__ import annotations

import logging
import warnings

import pytest
import torch
from torch import nn

import autopar
from autopar.api import entry as api
from autopar.errors import CaptureError
from autopar.frontend.quiet import quiet
from autopar.simulate.oracle import global_values, relative_error
from autopar.simulate.step import simulate_step

functional = nn.functional
X, IDS = torch.randn(8, 4), torch.randint(0, 10, (8,))


class Model(nn.Module):
    """A linear layer, an embedding, and a forward of them."""

    def __init__(self, forward, sparse: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.table, self.body = nn.Linear(4, 4), nn.Embedding(10, 4, sparse=sparse), forward

    def forward(self, x):
        return self.body(self, x).square().mean()


def _set_by_mask(model, x):
    y = model.layer(x).clone()
    y[x[:, 0] > 0] = model.layer.bias
    return y


def _branch(model, x):
    return model.layer(x) if x.sum() > 0 else x * model.layer.weight.sum()


def _derivative(model, x):
    return torch.func.grad(lambda weight: functional.linear(x, weight).square().mean())(model.layer.weight)


def _packed(model, x):
    packed = nn.utils.rnn.pack_padded_sequence(model.layer(x)[..., None], (x > 0).sum(1).clamp(1).cpu(), True, False)
    return packed.data


REFUSED = {
    "sparse embedding": (lambda m, x: m.table(x), IDS, "sparse gradient", "sparse=True"),
    "sparse function": (
        lambda m, x: functional.embedding(x, m.layer.weight, sparse=True), IDS % 4, "sparse gradient", "sparse=True",
    ),
    "cond": (lambda m, x: torch.cond(x.sum() > 0, m.layer, torch.clone, (x,)), X, "torch.cond", "torch.where"),
    "vmap": (lambda m, x: torch.vmap(lambda row: m.layer(row) + 1)(x), X, "torch.vmap", "broadcast"),
    "func.grad": (_derivative, X, "torch.func.grad", "outside of the model"),
    "func.grad of inputs": (
        lambda m, x: torch.func.grad(lambda z: m.layer(z).sum())(x), X, "torch.func.grad", "outside of the model",
    ),
    "jacfwd": (lambda m, x: torch.func.jacfwd(lambda z: m.layer(z).sum(0))(x), X, "torch.func.jvp",
               "outside of the model"),
    "masked_select": (lambda m, x: torch.masked_select(m.layer(x), x > 0), X, "aten.masked_select", "torch.where"),
    "nonzero": (lambda m, x: m.layer(x)[(x[:, 0] > 0).nonzero()[:, 0]], X, "aten.nonzero", "torch.where"),
    "mask as an index": (lambda m, x: m.layer(x)[x[:, 0] > 0], X, "aten.index.Tensor", "torch.where"),
    "assignment by a mask": (_set_by_mask, X, "where a mask is True", "torch.where"),
    "unique": (lambda m, x: m.table(torch.unique(x)), IDS, "aten._unique2", "torch.where"),
    "packed sequences": (_packed, X, "packs sequences by their lengths", "padded sequences"),
    "a branch": (_branch, X, "data-dependent", "torch.where"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_one_error_and_nothing_printed(name, capfd):
    forward, example, reason, fix = REFUSED[name]
    model = Model(forward, sparse="sparse e" in name)
    model(example).backward()  # eager torch takes it
    capfd.readouterr()
    with warnings.catch_warnings(record=True) as seen, pytest.raises(CaptureError, match=reason) as caught:
        warnings.simplefilter("always")
        autopar.plan(model, "dp=2", (example,), hardware="cpu-gloo", baselines=False)
    out, err = capfd.readouterr()
    assert not out and not err and not [w for w in seen if issubclass(w.category, UserWarning)]
    assert "test_refusals.py:" in caught.value.source and fix in caught.value.fix
    assert len(str(caught.value).splitlines()) <= 6


TAKEN = {
    "assignment of a number by a mask": lambda m, x: m.layer(x).clone().masked_fill_(x > 0, 0.5),
    "index_put of a number": lambda m, x: m.layer(x).clone().index_put_((x > 0,), torch.tensor(0.5)),
    "functional_call": lambda m, x: torch.func.functional_call(m.layer, dict(m.layer.named_parameters()), (x,)),
    "cond of what is known": lambda m, x: torch.cond(x.shape[0] > 2, m.layer, torch.clone, (x,)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_what_looks_alike_and_can_be_traced_is_right(name, capfd):
    model = Model(TAKEN[name])
    planned = api.search(model, "dp=2", (X,), hardware="cpu-gloo", baselines=False)
    step = simulate_step(planned.captured, planned.plan, global_values(planned.captured, model, (X,)))
    loss = model(X)
    loss.backward()
    assert relative_error(step.loss, loss) < 1e-6 and not capfd.readouterr().err
    for name, parameter in model.layer.named_parameters():
        assert relative_error(step.gradients[f"layer.{name}"], parameter.grad) < 1e-6


def test_loggers_and_warnings_are_as_before(monkeypatch, caplog):
    logger = logging.getLogger("torch._subclasses.fake_tensor")
    logger.disabled = False
    try:
        with quiet():
            assert logger.disabled
            logger.error("a dump")
            raise ValueError
    except ValueError:
        assert not logger.disabled and not caplog.records
    monkeypatch.setenv("TORCH_LOGS", "+export")
    with quiet():
        assert not logger.disabled, "somebody asked for them"
    with pytest.warns(UserWarning, match="one's own"), quiet():
        warnings.warn("one's own", UserWarning, stacklevel=1)
