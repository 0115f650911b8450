"""Small programs around one thing of torch, compiled and compared with eager torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor, nn

from autopar.errors import AutoparError
from autopar.simulate.compare import verify_model

MESHES = ("dp=2", "tp=2", "dp=2,tp=2", "dp=4")  # a batch of 6 is uneven over 4


class Probe(nn.Module):
    """`body(self, y, **inputs)` behind two linear layers: (..., 8) -> (..., 8) -> what the body returns."""

    def __init__(self, body: Callable, modules: Mapping[str, Callable[[], nn.Module]]):
        super().__init__()
        torch.manual_seed(0)
        self.body, self.first, self.second = body, nn.Linear(8, 8), nn.Linear(8, 8)
        for name, make in modules.items():
            self.add_module(name, make())

    def forward(self, x, **inputs):
        return self.body(self, 1.5 * torch.tanh(self.second(torch.tanh(self.first(x)))), **inputs)


@dataclass(frozen=True)
class Program:
    """`refused`: a part of the message of the one error that is raised instead, by precision."""

    body: Callable[..., Tensor]
    shape: tuple[int, ...] = (6, 5, 8)
    inputs: Mapping[str, Callable[[], Tensor]] = field(default_factory=dict)
    modules: Mapping[str, Callable[[], nn.Module]] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)

    def made(self) -> tuple[nn.Module, dict[str, Tensor]]:
        model = Probe(self.body, self.modules)
        torch.manual_seed(1)
        return model, {"x": torch.randn(self.shape), **{name: make() for name, make in self.inputs.items()}}

    def check(self, mesh: str, precision: str = "fp32", **options) -> None:
        """Loss, every gradient and every buffer are those of eager torch, or the one error is raised."""
        model, inputs = self.made()
        if reason := self.refused.get(precision):
            with pytest.raises(AutoparError, match=reason):
                verify_model(model, inputs, mesh, precision=precision, **options)
            return
        report = verify_model(model, inputs, mesh, precision=precision, **options)
        assert report.match, str(report)


def as_loss(y: Tensor) -> Tensor:
    """A number that follows also what a normalization leaves: the mean of its squares would be a constant."""
    y = y.float()
    return (y.square() + torch.sin(2 * y)).mean()


def layer(make: Callable[[], nn.Module], shape=(6, 5, 8), before=lambda y: y, after=lambda y: y, refused=()) -> Program:
    """A program whose body is one module."""
    return Program(lambda m, y: as_loss(after(m.layer(before(y)))), shape, {}, {"layer": make}, dict(refused))


def everywhere(programs: Mapping[str, Program]):
    """Marks for a test of (name, mesh, precision): each program once on some mesh, by turns in either precision; on two
    axes, and unevenly, it is marked slow."""
    turns = [(mesh, precision) for precision in ("fp32", "bf16") for mesh in MESHES]
    cases = []
    for i, name in enumerate(programs):
        usual = turns[i % len(turns)]
        cases.append(pytest.param(name, *usual))
        slow = [case for case in (("dp=2,tp=2", "fp32"), ("dp=4", "bf16")) if case != usual]
        cases += [pytest.param(name, *case, marks=pytest.mark.slow) for case in slow]
    return pytest.mark.parametrize("name, mesh, precision", cases)
