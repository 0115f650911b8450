"""torch.optim.Muon on compiled modules: the matrices of one device, parts that are orthogonalized alone, and the bytes
that its step sends, as the plan says them."""

from __future__ import annotations

import re
from unittest import mock

import pytest
import torch
from torch.optim import Adafactor, Muon
from torch.utils._python_dispatch import TorchDispatchMode

import autopar
from autopar import Plan
from autopar.errors import OptimizerError
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair, planned

X, Y = (t.double() for t in tiny.Regressor.batch())
CALL = dict(x=X, target=Y)
IN_FULL = mock.patch.object(torch.Tensor, "bfloat16", lambda tensor: tensor.clone())  # other sums round otherwise


class Sent(TorchDispatchMode):
    """Counts the bytes that a device sends to gather: what it has, to all others of its group."""

    def __init__(self):
        super().__init__()
        self.bytes_, self.kinds = 0, set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "_c10d_functional" and not re.search("wait|wrap", function.name()):
            self.kinds.add(function.name().split("::")[1])
            self.bytes_ += args[0].nbytes * (args[1] - 1)
        return function(*args, **(kwargs or {}))


def double(hidden: int):
    return tiny.Regressor(hidden=hidden, loss=True).double()


def matrices(model) -> list:
    return [p for p in model.parameters() if p.dim() == 2]


def _bytes(rank: int, mesh: str, plan: Plan, hidden: int) -> None:
    parallel, _ = pair(double(hidden), device_mesh(mesh), CALL, plan=plan)
    parallel(**CALL).loss.backward()
    optimizer = Muon([parallel.get_parameter("up.weight")], lr=0.02)  # the other one is a head
    with Sent() as sent:
        optimizer.step()
    assert sent.kinds <= {"all_gather_into_tensor"}
    assert sent.bytes_ == sum(c.wire_bytes for c in plan.collectives if c.phase == "optimizer")


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, options",
    [
        ("dp=2", dict(strategy="ddp")), ("dp=2", dict(strategy="fsdp")),
        ("dp=2,tp=2", dict(pin={"up.weight": "tp:S(0) dp:S(0)", "down.weight": "tp:S(1) dp:S(1)"})),
        ("dp=2,tp=2", dict(pin={"up.weight": "dp:S(0) tp:S(1)", "down.weight": "R"})),
    ],
    ids=["ddp", "fsdp", "nested", "mixed"],
)  # fmt: skip
def test_bytes_are_those_of_the_plan(mesh, options):
    plan = planned(double(32), mesh, CALL, optimizer="muon", **options)
    gloo.run(plan.mesh.devices, _bytes, mesh, plan, 32)


def cut(weight: torch.Tensor, parts) -> list[torch.Tensor]:
    """The parts of a matrix, as copies."""
    rows, columns = ([n // p] * p if isinstance(p, int) else p for n, p in zip(weight.shape, parts))
    return [piece.clone() for row in weight.split(rows, 0) for piece in row.split(columns, 1)]


def _parts(rank: int, mesh: str, plan: Plan, hidden: int, parts: dict) -> None:
    """Each part moves as a matrix of its own does under torch's Muon."""
    parallel, reference = pair(double(hidden), device_mesh(mesh), CALL, plan=plan)
    mine = Muon([{"params": [p], "parts": parts[n]} for n, p in parallel.named_parameters() if n in parts], lr=0.02)
    pieces = {n: [torch.nn.Parameter(x) for x in cut(p.detach(), parts[n])]
              for n, p in reference.named_parameters() if n in parts}  # fmt: skip
    wanted = Muon(sum(pieces.values(), []), lr=0.02)
    with IN_FULL:
        for _ in range(3):
            for model in (parallel, reference):
                model.zero_grad()
                model(**CALL).loss.backward()
            for name, some in pieces.items():
                for piece, gradient in zip(some, cut(reference.get_parameter(name).grad, parts[name]), strict=True):
                    piece.grad = gradient
            mine.step()
            wanted.step()
            with torch.no_grad():
                for name, some in pieces.items():
                    _join(reference.get_parameter(name), some, parts[name])
    for name, parameter in parallel.named_parameters():
        assert_close(parameter, reference.get_parameter(name), name, 1e-10)
        if name in parts:
            assert mine.state[parameter]["momentum_buffer"].placements == parameter.placements


def _join(weight: torch.Tensor, pieces: list, parts) -> None:
    columns = parts[1] if isinstance(parts[1], int) else len(parts[1])
    rows = [torch.cat(pieces[i : i + columns], 1) for i in range(0, len(pieces), columns)]
    weight.copy_(torch.cat(rows))


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, options, parts",
    [
        ("dp=2", dict(strategy="ddp"), {"up.weight": (3, 1), "down.weight": (1, 4)}),
        ("dp=2", dict(strategy="fsdp"), {"up.weight": ([16, 12, 8], 1), "down.weight": (2, [20, 16])}),
        ("dp=2,tp=2", dict(pin={"up.weight": "tp:S(0) dp:S(0)", "down.weight": "tp:S(1)"}),
         {"up.weight": (9, 1), "down.weight": (1, 3)}),
    ],
    ids=["whole", "sizes", "nested"],
)  # fmt: skip
def test_parts_are_orthogonalized_alone(mesh, options, parts):
    plan = planned(double(36), mesh, CALL, optimizer="muon", **options)
    gloo.run(plan.mesh.devices, _parts, mesh, plan, 36, parts)


@pytest.mark.parametrize("parts", [(5, 1), (2,), 3, ([1, 2], 1), (0, 1), ("a", 1)])
def test_parts_that_are_none(alone, parts):
    """Are refused before anything is changed."""
    parallel, _ = pair(double(36), alone, CALL)
    parallel(**CALL).loss.backward()
    before = [full(p).clone() for p in parallel.parameters()]
    up, down = matrices(parallel)
    optimizer = Muon([{"params": [down]}, {"params": [up], "parts": parts}], lr=0.02)
    with pytest.raises(OptimizerError, match=r"a parameter of shape \(36, 6\) has no parts(.|\n)*or their sizes"):
        optimizer.step()
    assert all(torch.equal(full(p), q) for p, q in zip(parallel.parameters(), before))


def _checkpoint(rank: int, folder: str) -> None:
    """A run that goes on from a checkpoint takes the same steps, parts and all."""
    parallel, _ = pair(double(36), device_mesh("dp=2"), CALL, strategy="fsdp")

    def groups() -> list:
        up, down = matrices(parallel)
        return [{"params": [up], "parts": (3, 1)}, {"params": [down]}]

    def steps(optimizer: Muon) -> list:
        for _ in range(2):
            parallel.zero_grad()
            parallel(**CALL).loss.backward()
            optimizer.step()
        return [full(p).detach().clone() for p in parallel.parameters()]

    optimizer = Muon(groups(), lr=0.02)
    steps(optimizer)
    autopar.save_checkpoint(folder, parallel, optimizer, step=2)
    wanted = steps(optimizer)
    again = Muon(groups(), lr=0.5)
    autopar.load_checkpoint(folder, parallel, again)
    assert again.param_groups[0]["parts"] == (3, 1)
    assert all(map(torch.equal, steps(again), wanted))


@pytest.mark.gloo
def test_checkpoints(tmp_path):
    gloo.run(2, _checkpoint, str(tmp_path))


@pytest.mark.parametrize(
    "make", [lambda p: Muon(p, lr=0.02), lambda p: Adafactor(p, lr=0.02)], ids=["muon", "adafactor"]
)
def test_schedules_and_parameters_of_others(alone, make):
    """A plain parameter in the same optimizer is updated too, and a schedule sees one step for each."""
    parallel, reference = pair(double(36), alone, CALL)
    outcomes = []
    for model in (parallel, reference):
        torch.manual_seed(0)
        other = torch.nn.Parameter(torch.randn(5, 3, dtype=torch.float64))
        optimizer = make([*matrices(model), other])
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        with IN_FULL:
            for _ in range(3):
                optimizer.zero_grad()
                (model(**CALL).loss + other.square().sum()).backward()
                optimizer.step()
                schedule.step()
        outcomes.append([full(p).detach() for p in (*matrices(model), other)])
    for mine, whole in zip(*outcomes):
        assert_close(mine, whole, "", 1e-10)
