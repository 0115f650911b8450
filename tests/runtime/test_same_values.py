"""Ranks that build their models with other random numbers train the one of rank 0."""

from __future__ import annotations

import copy
import logging

import pytest
import torch
from torch import nn

import autopar
from autopar.errors import DesyncError, InputError
from autopar.runtime.same_values import checksum, tensors_of
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, assert_same_values, device_mesh, full


class Everything(nn.Module):
    """Values in every place where a model keeps some: x (B, 6) -> (B, 6)."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(6, 9), nn.Linear(9, 6)
        self.again = self.up  # a tied layer
        self.frozen = nn.Parameter(torch.randn(6), requires_grad=False)
        self.register_buffer("saved", torch.randn(6))
        self.register_buffer("unsaved", torch.randn(6), persistent=False)
        self.register_buffer("expanded", torch.randn(1, 6).expand(3, 6), persistent=False)
        self.register_buffer("strided", torch.randn(12)[::2])
        self.register_buffer("small", torch.randn(6).bfloat16())
        self.register_buffer("mask", torch.rand(6) > 0.5)
        self.register_buffer("empty", torch.randn(0))
        self.plain, self.listed = torch.randn(6), [torch.randn(6), {"deep": torch.randn(6)}]

    def forward(self, x):
        y = (
            self.down(torch.relu(self.up(x))) * self.frozen
            + self.saved * self.unsaved
            + self.expanded[0] * self.strided
        )
        return torch.where(self.mask, y, y * self.small) * self.plain + self.listed[0] * self.listed[1]["deep"]


DIFFERENT = """down.bias down.weight expanded frozen listed[0] listed[1]['deep'] mask plain saved small strided unsaved
up.bias up.weight""".split()


class Heard(logging.Handler):
    """The log lines of autopar."""

    def __init__(self):
        super().__init__()
        self.lines: list[str] = []
        logging.getLogger("autopar").addHandler(self)

    def emit(self, record):
        self.lines.append(record.getMessage())


def _train(rank, mesh):
    torch.manual_seed(0)
    reference = Everything()
    torch.manual_seed(rank)
    source, heard = Everything(), Heard()
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(5))
    parallel = autopar.compile(source, device_mesh(mesh), (x,))
    lines = list(heard.lines)
    for _ in range(2):
        mine, whole = parallel(x), reference(x)
        assert_close(mine, whole)
        mine.square().mean().backward()
        whole.square().mean().backward()
        assert_same_gradients(parallel, reference)
        for model in (parallel, reference):
            with torch.no_grad():
                for p in model.parameters():
                    if p.grad is not None:
                        p.sub_(0.1 * p.grad)
            model.zero_grad()
    assert_same_values(parallel, reference)
    for name, buffer in reference.named_buffers():
        assert torch.equal(full(parallel.get_buffer(name)), buffer), name
    return lines


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2", "tp=2"])
def test_every_rank_trains_the_model_of_rank_zero(mesh):
    lines = gloo.run(2, _train, mesh)
    text = f"{len(DIFFERENT)} of 15 parameters and buffers differed between ranks; all have the values of rank 0 now: "
    assert lines[1] == [] and [line for line in lines[0] if "differed" in line] == [
        text + ", ".join(DIFFERENT[:8]) + " and others"
    ]


def _pipeline(rank):
    """Each rank keeps one of the two stages, of rank 0's values."""
    x, y = tiny.Regressor.batch()
    reference = tiny.Regressor(loss=True)
    source = copy.deepcopy(reference)
    if rank:
        nn.init.normal_(source.up.weight), nn.init.normal_(source.down.weight)
    parallel = autopar.compile(source, device_mesh("pp=2"), dict(x=x, target=y), micro_batches=2)
    parallel(x=x, target=y).loss.backward()
    reference(x=x, target=y).loss.backward()
    wanted = dict(reference.named_parameters())
    for name, p in parallel.named_parameters():
        assert_close(p, wanted[name], name)
        assert_close(p.grad, wanted[name].grad, name)
    return sorted(name for name, _ in parallel.named_parameters())


@pytest.mark.slow
@pytest.mark.gloo
def test_stages(tmp_path):
    first, second = gloo.run(2, _pipeline)
    assert {*first, *second} == {"up.weight", "up.bias", "down.weight", "down.bias"} and first != second


def _from_folder(rank, folder):
    """Values of the folder, whatever ranks have; one of them has none, and computes unsaved buffers."""
    source, inputs = tiny.llama(num_hidden_layers=1)
    if rank == 0:
        source.save_pretrained(folder)
    torch.distributed.barrier()
    cls, config = type(source), source.config
    if rank == 0:
        with torch.device("meta"):
            mine = cls(config)
    else:
        torch.manual_seed(7)
        mine = cls(config)
    heard = Heard()
    parallel = autopar.compile(mine, device_mesh("tp=2"), inputs, weights=folder)
    assert_same_values(parallel, source)
    assert_close(parallel(**inputs).loss, source(**inputs).loss)
    assert not [line for line in heard.lines if "differed" in line]


@pytest.mark.gloo
def test_values_of_a_folder(tmp_path):
    gloo.run(2, _from_folder, str(tmp_path))


def _refused(rank):
    x, mesh = torch.zeros(4, 6), device_mesh("dp=2")
    other = nn.Sequential(nn.Linear(6, 4 + rank))
    with pytest.raises(
        DesyncError, match=r"0.weight is \(5, 6\) torch.float32 on rank 1 and \(4, 6\) torch.float32 on rank 0"
    ):
        autopar.compile(other, mesh, (x,))
    longer = nn.Sequential(nn.Linear(6, 4), *[nn.Linear(4, 4)] * rank)
    with pytest.raises(DesyncError, match="1.bias is in the model of rank 1 and not of rank 0"):
        autopar.compile(longer, mesh, (x,))
    odd = nn.Linear(6, 4)
    odd.scale = torch.ones(1, device="meta" if rank else "cpu")
    with pytest.raises(InputError, match="scale has values on rank 0 and is on the meta device on rank 1"):
        autopar.compile(odd, mesh, (x,))
    torch.manual_seed(3)
    same, heard = nn.Linear(6, 4), Heard()
    before = same.weight.detach().clone()
    assert torch.equal(full(autopar.compile(same, mesh, (x,)).weight), before)
    assert not [line for line in heard.lines if "differed" in line]


@pytest.mark.gloo
def test_models_that_are_not_one():
    gloo.run(2, _refused)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64, torch.int8, torch.complex64])
def test_checksums_see_every_byte(dtype):
    for shape in ((), (1,), (3, 5), (70_000,)):
        tensor = torch.arange(torch.Size(shape).numel()).reshape(shape).to(dtype)
        first = checksum(tensor).item()
        assert checksum(tensor.clone()).item() == first
        for at in {0, tensor.numel() // 2, tensor.numel() - 1}:
            other = tensor.clone()
            other.view(-1)[at] += 1 if dtype is not torch.bfloat16 else 1 + abs(other.view(-1)[at])
            assert checksum(other).item() != first
    swapped = torch.arange(200_000).to(dtype)
    assert checksum(swapped).item() != checksum(swapped.flip(0)).item()
    rows = torch.arange(35).reshape(5, 7).to(dtype)
    assert checksum(rows[1:]).item() == checksum(rows[1:].clone()).item()  # begins where no int64 can
    assert checksum(rows.T).item() == checksum(rows.T.contiguous()).item() != checksum(rows).item()


def test_every_tensor_once():
    names = [name for name, _ in tensors_of(Everything())]
    assert sorted(names) == sorted([*DIFFERENT, "empty"])
