"""Recurrent cells and layers on meshes with stages: few ops, some of them without any seconds, and chains of partial
sums."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from autopar.api import entry as api
from autopar.simulate.oracle import global_values, norm, relative_error
from autopar.simulate.pipeline import simulate_pipeline
from autopar.simulate.step import simulate_step
from tests.helpers import gloo
from tests.runtime.parity import assert_close, device_mesh, pair

CELLS = ("LSTMCell", "GRUCell", "RNNCell")
LAYERS = ("LSTM", "GRU", "RNN")


class Recurrent(nn.Module):
    """Linear, recurrence over the sequence, linear; a cell alone if `steps` is None. x (B, S, 6), or (B, 6) for a cell
    alone."""

    def __init__(self, kind: str, steps: bool = True):
        super().__init__()
        torch.manual_seed(0)
        options = {} if kind in CELLS else dict(batch_first=True)
        self.before = nn.Linear(6, 8) if steps else None
        self.inside = getattr(nn, kind)(8 if steps else 6, 8, **options)
        self.after = nn.Linear(8, 3)

    def forward(self, x):
        if self.before is None:
            return self.after(_hidden(self.inside(x))).square().mean()
        x = self.before(x)
        if isinstance(self.inside, nn.RNNBase):
            return self.after(self.inside(x)[0]).square().mean()
        state, found = None, []
        for step in range(x.shape[1]):
            state = self.inside(x[:, step], state)
            found.append(_hidden(state))
        return self.after(torch.stack(found, 1)).square().mean()


def _hidden(state):
    return state[0] if isinstance(state, tuple) else state


def check(model: nn.Module, mesh: str, x: torch.Tensor, **planning) -> None:
    """The planned step on all ranks against plain eager torch."""
    planned = api.search(model, mesh, (x,), hardware="cpu-gloo", **planning)
    values = global_values(planned.captured, model, (x,))
    step = simulate_pipeline if not planned.plan.pipeline.is_one_program else simulate_step
    found = step(planned.captured, planned.plan, values)
    loss = model(x)
    wanted = dict(zip(dict(model.named_parameters()), torch.autograd.grad(loss, list(model.parameters()))))
    mine = found.outputs["0"] if not planned.plan.pipeline.is_one_program else found.loss
    assert relative_error(mine, loss) < 1e-5 and {*found.gradients} == {*wanted}
    least = 1e-4 * max(map(norm, wanted.values()))
    assert max(relative_error(found.gradients[name], g, least) for name, g in wanted.items()) < 1e-5


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["pp=2", "pp=2,dp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("kind", [*CELLS, *LAYERS])
def test_over_a_sequence(kind, mesh):
    check(Recurrent(kind), mesh, torch.randn(8, 2, 6), baselines=False)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [None, 1, 4])
@pytest.mark.parametrize("kind", CELLS)
def test_a_cell_alone(kind, micro_batches):
    """A stage may have nothing but views, which take no time."""
    check(Recurrent(kind, steps=False), "pp=2,tp=2", torch.randn(8, 6), baselines=False, micro_batches=micro_batches)


def _trains(rank: int) -> float:
    model, x = Recurrent("LSTMCell", steps=False), torch.randn(8, 6, generator=torch.Generator().manual_seed(1))
    parallel, reference = pair(model, device_mesh("pp=2"), (x,))
    loss, expected = parallel(x), reference(x)
    loss.backward()
    expected.backward()
    assert_close(loss, expected, "loss")
    for name, parameter in parallel.named_parameters():
        assert_close(parameter.grad, reference.get_parameter(name).grad, name)
    return loss.item()


@pytest.mark.slow
@pytest.mark.gloo
def test_on_two_processes():
    first, second = gloo.run(2, _trains)
    assert first == second
