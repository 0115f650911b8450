"""A second start traces, plans and lowers nothing where everything is the same, and does so where anything is not."""

from __future__ import annotations

import copy
import importlib
import os
import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.api import call_compiler, kept_program
from autopar.ir.mesh import Mesh
from tests.helpers import gloo

MODEL = """
import torch
from torch import nn
from {helper} import scaled

FACTOR = 2.0

class Net(nn.Module):
    def __init__(self, width=8, power=1.0):
        super().__init__()
        self.up, self.down = nn.Linear(8, width), nn.Linear(width, 8)
        self.power, self.seen, self.calls = power, None, 0

    def forward(self, x):
        y = self.down(scaled(self.up(x)).relu()) * FACTOR
        self.calls += 1
        self.seen = y.detach().mean()
        return {{"loss": (y ** 2).mean() * self.power, "y": y}}
"""
HELPER = "def scaled(y, by=3.0):\n    return y * by\n"


class Counted:
    """Counts what a process traces, plans and lowers."""

    def __init__(self, monkeypatch):
        self.traced = self.planned = self.lowered = 0
        for module, name, field in (
            (call_compiler, "trace", "traced"), (call_compiler, "planned_or_fixes", "planned"),
            (kept_program, "lower_plan", "lowered"),
        ):  # fmt: skip
            monkeypatch.setattr(module, name, self._counting(getattr(module, name), field))

    def _counting(self, function, field):
        def counted(*args, **kwargs):
            setattr(self, field, getattr(self, field) + 1)
            return function(*args, **kwargs)

        return counted


class Job:
    """Starts of one process with a model in files of its own."""

    def __init__(self, folder, monkeypatch):
        self.folder, self.patch, self.names = folder, monkeypatch, ("model_of_job", "helper_of_job")
        monkeypatch.setenv("AUTOPAR_CACHE", str(folder / "cache"))
        monkeypatch.syspath_prepend(str(folder))
        self.write()

    def write(self, model: str = MODEL, helper: str = HELPER) -> None:
        """Write the files of the model, as an edit does."""
        (self.folder / "model_of_job.py").write_text(model.format(helper="helper_of_job"))
        (self.folder / "helper_of_job.py").write_text(helper)

    def start(self, change=lambda module, model: None, rows: int = 4, options=(), **built) -> tuple[int, int, int]:
        """Compile and run a step as a new process would; return how often it traced, planned and lowered."""
        for name in self.names:
            sys.modules.pop(name, None)
        importlib.invalidate_caches()
        module = importlib.import_module("model_of_job")
        torch.manual_seed(0)
        model = module.Net(**built)
        change(module, model)
        torch.manual_seed(0)
        reference = module.Net(**built)
        change(module, reference)
        x = torch.randn(rows, 8)
        with self.patch.context() as patch:
            counted = Counted(patch)
            mesh = dist.init_device_mesh("cpu", Mesh.parse("dp=1").sizes, mesh_dim_names=("dp",))
            parallel = autopar.compile(model, mesh, (x,), **dict(options))
            mine, whole = parallel(x), reference(x)
            mine["loss"].backward()
            whole["loss"].backward()
            torch.testing.assert_close(mine["loss"] + 0, whole["loss"])
            torch.testing.assert_close(mine["y"] + 0, whole["y"])
            for one, other in zip(parallel.parameters(), reference.parameters()):
                assert (one.grad is None) == (other.grad is None)
                if other.grad is not None:
                    torch.testing.assert_close(one.grad.full_tensor(), other.grad)
            assert parallel.calls == 1 and float(parallel.seen) == pytest.approx(float(reference.seen))
        return counted.traced, counted.planned, counted.lowered


@pytest.fixture
def job(tmp_path, monkeypatch):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    yield Job(tmp_path, monkeypatch)
    dist.destroy_process_group()
    for name in ("model_of_job", "helper_of_job"):
        sys.modules.pop(name, None)


def another_factor(module, model):
    module.FACTOR = 5.0


def another_function(module, model):
    module.scaled = lambda y: y * 7.0


def frozen(module, model):
    model.up.weight.requires_grad_(False)


def a_hook(module, model):
    model.up.register_forward_hook(lambda layer, args, output: output * 2)


def another_layer(module, model):
    model.up = nn.Sequential(model.up)


def test_the_second_start_finds_everything(job):
    assert job.start() == (1, 1, 1)
    assert job.start() == (0, 0, 0)


def test_another_state_is_traced(job):
    job.start()
    for change in (another_factor, another_function, frozen, a_hook, another_layer):
        assert job.start(change)[0] == 1, change.__name__
    assert job.start() == (0, 0, 0)


def test_another_model_or_call_is_traced(job):
    job.start()
    for said in (dict(power=2.0), dict(width=12), dict(rows=6)):
        assert job.start(**said) == (1, 1, 1), said


def test_another_option_is_planned(job):
    job.start()
    assert job.start(options={"strategy": "ddp"}) == (0, 1, 1)
    assert job.start(options={"memory": "1GiB"}) == (0, 1, 1)
    assert job.start(options={"strategy": "ddp"}) == (0, 0, 0)


def test_an_edited_file_is_traced(job):
    job.start()
    edits = {
        "forward": dict(model=MODEL.replace("relu", "sigmoid")),
        "default": dict(helper=HELPER.replace("3.0", "4.0")),
        "helper": dict(helper=HELPER.replace("y * by", "y + by")),
        "global": dict(model=MODEL.replace("FACTOR = 2.0", "FACTOR = 4.0")),
    }
    for what, edit in edits.items():
        job.write(**edit)
        assert job.start()[0] == 1, what


def test_what_a_user_registers_is_planned_with(job, monkeypatch):
    monkeypatch.setattr(autopar.errors, "added", ["mine"])
    job.start()
    assert job.start() == (0, 1, 1)


def test_damaged_entries_are_made_again(job):
    job.start()
    for file in (job.folder / "cache").iterdir():
        file.write_bytes(file.read_bytes()[:-100])
    assert job.start() == (1, 1, 1)
    assert job.start() == (0, 0, 0)


def test_stages_are_lowered_at_each_start(job):
    options = {"micro_batches": 2}
    assert job.start(options=options) == (1, 1, 1)
    assert job.start(options=options) == (0, 0, 1)


def _ranks(rank, folder, rows, strategy):
    os.environ["AUTOPAR_CACHE"] = folder
    with pytest.MonkeyPatch.context() as patch:
        counted = Counted(patch)
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.LayerNorm(7), nn.Linear(7, 6))
        reference = copy.deepcopy(model)
        mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
        parallel = autopar.compile(model, mesh, (torch.ones(rows, 6),), strategy=strategy)
        x = torch.randn(rows, 6)
        mine, whole = parallel(x), reference(x)
        torch.testing.assert_close(mine + 0, whole)
        mine.square().sum().backward(), whole.square().sum().backward()
        for one, other in zip(parallel.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(one.grad.full_tensor(), other.grad)
        return counted.traced, counted.planned, counted.lowered


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize("rows, strategy", [(4, "megatron"), (5, "fsdp")])  # in equal parts, and in uneven ones
def test_ranks_of_the_second_start_do_nothing_again(tmp_path, rows, strategy):
    assert gloo.run(2, _ranks, str(tmp_path), rows, strategy) == [(1, 1, 1), (0, 0, 1)]
    assert gloo.run(2, _ranks, str(tmp_path), rows, strategy) == [(0, 0, 0), (0, 0, 0)]
