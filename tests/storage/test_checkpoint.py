"""Checkpoints: what comes back, on which mesh, after which accident."""

from __future__ import annotations

import errno
import os
import random
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

import autopar
from autopar.errors import CheckpointCorrupt, CheckpointError, CheckpointMismatch, InputError
from autopar.ir.layout import local_part
from autopar.ir.mesh import Mesh
from autopar.processes.stage_mesh import StageMesh
from autopar.storage.gather import Held, gather_everywhere, gather_to
from autopar.storage.tensor_file import Form
from tests.helpers import gloo
from tests.helpers.random_layouts import random_layout
from tests.runtime import tiny
from tests.runtime.parity import device_mesh, full, planned

from . import damage


def regressor(mesh, hidden: int = 16, plan=None):
    x, y = tiny.Regressor.batch()
    return autopar.compile(tiny.Regressor(hidden=hidden, loss=True), mesh, dict(x=x, target=y), plan=plan)


def take_steps(model, optimizer, count: int = 2, call=None) -> list[float]:
    x, y = tiny.Regressor.batch()
    losses = []
    for _ in range(count):
        loss = model(x=x, target=y).loss if call is None else call()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def state_of(model, optimizer) -> dict[str, torch.Tensor]:
    """Copies of all tensors, global."""
    found = {}
    for name, p in model.named_parameters():
        found[name] = full(p).detach().clone()
        for key, value in optimizer.state.get(p, {}).items():
            if isinstance(value, torch.Tensor):
                found[f"{name}/{key}"] = full(value).clone()
    return found


def names_of(root) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def same(a: dict, b: dict) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1),  # no state
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=torch.tensor(0.01), amsgrad=True),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.01, foreach=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=0.01),
    "asgd": lambda p: torch.optim.ASGD(p, lr=0.01),
}
SCHEDULERS = [
    lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3, 4]),
    lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
    lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: torch.optim.lr_scheduler.LinearLR(o),
]


@pytest.fixture(scope="module")
def model(alone):
    return regressor(alone)


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_the_run_goes_on_as_if_it_had_not_stopped(kind, model, tmp_path):
    """State, random numbers, data position and schedule; the second half is run twice."""
    make, schedule = OPTIMIZERS[kind], SCHEDULERS[len(kind) % len(SCHEDULERS)]
    optimizer = make(model.parameters())
    scheduler = schedule(optimizer)
    model.random = SimpleNamespace(seed=3, offset=5)

    def second_half(optimizer, scheduler) -> tuple:
        losses = []
        for _ in range(3):
            losses += take_steps(model, optimizer, 1)
            scheduler.step(*([losses[-1]] if "Plateau" in type(scheduler).__name__ else []))
        return (
            losses,
            torch.rand(3).tolist(),
            state_of(model, optimizer),
            [float(g["lr"]) for g in optimizer.param_groups],
        )

    take_steps(model, optimizer)
    saved = state_of(model, optimizer)
    data = {"position": 7, "order": (3, 1)}
    path = autopar.save_checkpoint(tmp_path, model, optimizer, step=2, scheduler=scheduler, data=data)
    expected = second_half(optimizer, scheduler)
    model.random = SimpleNamespace(seed=0, offset=0)

    optimizer = make(model.parameters())
    scheduler = schedule(optimizer)
    loaded = autopar.load_checkpoint(tmp_path, model, optimizer, scheduler=scheduler)
    assert (loaded.path, loaded.step, loaded.data) == (path, 2, data)
    assert (model.random.seed, model.random.offset) == (3, 5)
    assert same(state_of(model, optimizer), saved)
    found = second_half(optimizer, scheduler)
    assert found[:2] == expected[:2] and same(found[2], expected[2]) and found[3] == expected[3]


def test_the_scale_of_gradients_is_kept(model, tmp_path):
    made = [torch.amp.GradScaler("cpu", init_scale=scale) for scale in (512.0, 2.0)]
    made[0].scale(torch.ones(()))
    autopar.save_checkpoint(tmp_path, model, step=1, scaler=made[0])
    autopar.load_checkpoint(tmp_path, model, scaler=made[1])
    assert made[1].get_scale() == 512.0 and made[1].state_dict() == made[0].state_dict()
    autopar.load_checkpoint(tmp_path, model, scaler=torch.amp.GradScaler("cpu", enabled=False))
    without = autopar.save_checkpoint(tmp_path, model, step=2, scaler=torch.amp.GradScaler("cpu", enabled=False))
    with pytest.raises(CheckpointMismatch, match="saved without a scaler that is enabled"):
        autopar.load_checkpoint(without, model, scaler=made[1])


def test_what_cannot_be_saved_or_is_not_there(model, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointError, match="data.*is a object"):
        autopar.save_checkpoint(tmp_path, model, optimizer, step=1, data={"x": object()})
    with pytest.raises(CheckpointError, match="parameters that are not the model's"):
        autopar.save_checkpoint(tmp_path, model, torch.optim.SGD([torch.nn.Parameter(torch.ones(1))]), step=1)
    assert not any(tmp_path.iterdir()) and autopar.latest_checkpoint(tmp_path / "none") is None
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        autopar.load_checkpoint(tmp_path, model)
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot write .*file"):
        autopar.save_checkpoint(tmp_path / "file", model, step=1)
    with pytest.raises(CheckpointError, match="step is -1"):
        autopar.save_checkpoint(tmp_path, model, step=-1)
    with pytest.raises(InputError, match="not of a Regressor"):
        autopar.save_checkpoint(tmp_path, tiny.Regressor(), step=1)


def test_a_full_disk(model, tmp_path):
    """Whichever call fails: a typed error, and what was there before."""
    autopar.save_checkpoint(tmp_path, model, step=1, data="old")
    with damage.counted() as made:
        autopar.save_checkpoint(tmp_path, model, step=2, data="new")

    def full():
        raise OSError(errno.ENOSPC, "No space left on device")

    for at in range(0, len(made), 3):
        with pytest.raises(CheckpointError, match="cannot write"), damage.counted(at, 0.5, full):
            autopar.save_checkpoint(tmp_path, model, step=3)
        assert autopar.load_checkpoint(tmp_path, model).data in ("new", None)


def test_another_model_or_optimizer(model, alone, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    path = autopar.save_checkpoint(tmp_path, model, optimizer, step=1)
    larger = regressor(alone, hidden=17)
    with pytest.raises(
        CheckpointMismatch, match=r"up.weight \(16, 6\), not \(17, 6\), up.bias \(16,\), not \(17,\), down.weight"
    ):
        autopar.load_checkpoint(path, larger)
    parameters = list(model.parameters())
    with pytest.raises(CheckpointMismatch, match="it is AdamW, not Adam; group 0 also has down.bias"):
        autopar.load_checkpoint(path, model, torch.optim.Adam(parameters[:-1]))
    with pytest.raises(CheckpointMismatch, match="it has 1 parameter groups, not 2; group 0 also has"):
        autopar.load_checkpoint(
            path, model, torch.optim.AdamW([{"params": parameters[:2]}, {"params": parameters[2:]}])
        )
    path = autopar.save_checkpoint(tmp_path, model, step=2)
    with pytest.raises(CheckpointMismatch, match="without an optimizer"):
        autopar.load_checkpoint(path, model, optimizer)


def test_a_disk_that_stays_full(model, tmp_path):
    """A save that fails takes no room and no file descriptor, nor does one that was killed once another begins."""
    path = autopar.save_checkpoint(tmp_path, model, step=1)
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    written, write = [], os.write

    def full(file, data):
        written.append(len(data))
        if sum(written) > room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data)

    before = len(os.listdir("/proc/self/fd"))
    for room in (0, 100, 700, 1500, 3000, 6000):
        written.clear()
        with pytest.raises(CheckpointError, match="No space left"), mock.patch.object(os, "write", full):
            autopar.save_checkpoint(tmp_path, model, optimizer, step=2)
        assert names_of(tmp_path) == [path.name] and len(os.listdir("/proc/self/fd")) == before, room
    with pytest.raises(damage.Killed), damage.counted(20, 0.5, damage.end_test):
        autopar.save_checkpoint(tmp_path, model, optimizer, step=3)
    assert names_of(tmp_path) == [".step-00000003.unfinished", path.name]
    with pytest.raises(damage.Killed), damage.counted(20, 0.5, damage.end_test):
        autopar.save_checkpoint(tmp_path, model, optimizer, step=4)
    assert names_of(tmp_path) == [".step-00000004.unfinished", path.name]


def test_what_does_not_fit_changes_nothing(model, alone, tmp_path):
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    path = autopar.save_checkpoint(tmp_path, model, optimizer, step=1)
    take_steps(model, optimizer)
    before, seed = state_of(model, optimizer), torch.get_rng_state()
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    with pytest.raises(CheckpointMismatch, match="was saved without a scheduler"):
        autopar.load_checkpoint(path, model, optimizer, scheduler=scheduler)
    with pytest.raises(CheckpointMismatch, match="was saved without data"):
        autopar.load_checkpoint(path, model, optimizer, data=scheduler)
    assert same(state_of(model, optimizer), before) and torch.equal(torch.get_rng_state(), seed)
    x, y = (t.double() for t in tiny.Regressor.batch())
    other = autopar.compile(tiny.Regressor(loss=True).double(), alone, dict(x=x, target=y))
    with pytest.raises(
        CheckpointMismatch, match="other dtypes than the model: up.weight torch.float32, not torch.float64"
    ):
        autopar.load_checkpoint(path, other)
    assert other.up.weight.dtype is torch.float64
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1)
    for _ in range(3):
        lbfgs.step(lambda: (lbfgs.zero_grad(), loss := model(x=x.float(), target=y.float()).loss, loss.backward())[1])
    with pytest.raises(
        CheckpointError, match=r"state\[up.weight\]\[al\]\[0\] is a DTensor, which a checkpoint cannot hold"
    ):
        autopar.save_checkpoint(tmp_path, model, lbfgs, step=2)


def test_damage_is_found(model, tmp_path):
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    rng, optimizer = random.Random(seed), torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    path = autopar.save_checkpoint(tmp_path, model, optimizer, step=1)
    take_steps(model, optimizer)
    before = state_of(model, optimizer)
    for _ in range(150):
        what, undo = damage.corruption(path, rng)
        with pytest.raises(CheckpointCorrupt):
            autopar.load_checkpoint(path, model, optimizer)
            print(what)
        undo()
    assert same(state_of(model, optimizer), before)
    autopar.load_checkpoint(path, model, optimizer)


@pytest.mark.parametrize("step", [2, 1])
def test_a_save_that_is_killed(model, tmp_path, step):
    """At every call that changes the disk, of a new checkpoint and of one that replaces another."""
    optimizer = torch.optim.AdamW(model.parameters())
    take_steps(model, optimizer)
    root = tmp_path / "root"
    autopar.save_checkpoint(root, model, step=1, data="old")
    start = damage.copy_of(root, tmp_path / "start")
    with damage.counted() as made:
        autopar.save_checkpoint(root, model, optimizer, step=step, data="new", keep=1)
    assert {"write", "fsync", "rename", "replace", "unlink"} <= {*made}
    loaded = []
    for at in range(len(made)):
        damage.copy_of(start, root)
        with pytest.raises(damage.Killed), damage.counted(at, 0.5, damage.end_test):
            autopar.save_checkpoint(root, model, optimizer, step=step, data="new", keep=1)
        loaded.append(autopar.load_checkpoint(root, model).data)
        assert loaded[-1] in ("old", "new"), made[at]
    assert loaded == sorted(loaded, reverse=True) and {*loaded} == {"old", "new"}  # once committed it stays
    autopar.save_checkpoint(root, model, optimizer, step=step, data="last", keep=1)
    assert autopar.load_checkpoint(root, model, optimizer).data == "last" and len(list(root.iterdir())) == 1


# between meshes
# --------------------------------------------------------------------------------------------------------

MESHES = {
    "dp=4": {"up.weight": "dp:S(0)", "down.weight": "dp:S(1)"},
    "dp=2,tp=2": {"up.*": "tp:S(0) dp:S(0)", "down.weight": "tp:S(1)"}, "tp=4": {"up.*": "tp:S(0)", "down.*": "R"},
}  # fmt: skip


def _gather(rank, seed):
    """Whole tensors out of parts in any layout: strided, inside parts, uneven."""
    rng, mesh = random.Random(seed), Mesh.parse("dp=2,tp=2")
    stage = StageMesh.alone(mesh, device_mesh("dp=2,tp=2"))
    for shape in ((7, 12), (31,), (5, 3, 6), ()) * 5:
        layout, owner = random_layout(rng, shape, mesh), rng.randrange(4)
        whole = torch.rand(shape, generator=torch.Generator().manual_seed(rng.randrange(1 << 30)))
        part = local_part(whole, layout, mesh, mesh.coordinate(rank))
        assert torch.equal(gather_everywhere(part, shape, layout, stage), whole), str(layout)
        found = gather_to(owner, Held(Form(shape, whole.dtype), layout, lambda held=part: held), stage)
        assert (found is None) == (rank != owner) and (found is None or torch.equal(found, whole)), str(layout)


def _to_all(rank, plans, root, seed):
    """Every mesh loads the checkpoint of every other; a hidden size of 31 is uneven on each."""
    _gather(rank, seed)
    runs = []
    for plan in plans:
        model = regressor(device_mesh(str(plan.mesh)), 31, plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        take_steps(model, optimizer)
        folder = f"{root}/{plan.mesh}"
        autopar.save_checkpoint(folder, model, optimizer, step=1, data={"rank": rank})
        moments = {name: optimizer.state[p]["exp_avg"] for name, p in model.named_parameters()}
        state = {name: (p.to_local().clone(), moments[name].to_local().clone()) for name, p in model.named_parameters()}
        runs.append((model, optimizer, folder, state, take_steps(model, optimizer)))
    for _, _, folder, _, losses in runs:
        for model, optimizer, *_ in runs:
            assert autopar.load_checkpoint(folder, model, optimizer).data == {"rank": rank}
            assert max(abs(a / b - 1) for a, b in zip(take_steps(model, optimizer), losses)) < 1e-6
    for model, optimizer, folder, state, _ in runs:  # back on its own mesh: the same bits
        for other, other_optimizer, *_ in runs:
            autopar.load_checkpoint(folder, other, other_optimizer)
            autopar.save_checkpoint(f"{root}/moved", other, other_optimizer, step=1)
            autopar.load_checkpoint(f"{root}/moved", model, optimizer)
            for name, p in model.named_parameters():
                assert torch.equal(p.to_local(), state[name][0]), name
                assert torch.equal(optimizer.state[p]["exp_avg"].to_local(), state[name][1]), name


@pytest.mark.gloo
@pytest.mark.parametrize("meshes", [("dp=4", "dp=2,tp=2"), pytest.param((*MESHES,), marks=pytest.mark.slow)])
def test_any_mesh_loads_any_checkpoint(tmp_path, meshes):
    x, y = tiny.Regressor.batch()
    model, inputs = tiny.Regressor(hidden=31, loss=True), dict(x=x, target=y)
    plans = [planned(model, mesh, inputs, pin=MESHES[mesh]) for mesh in meshes]
    seed = random.randrange(1 << 30)
    print(f"seed {seed}")
    gloo.run(4, _to_all, plans, str(tmp_path), seed)


def _with_dropout(rank, plans, root):
    """Dropout goes on where it stood: the same masks on the same mesh and on another one."""
    _, inputs = tiny.bert(dropout=0.1, layers=1)

    def steps(model, optimizer, count: int = 2) -> list[float]:
        return take_steps(model, optimizer, count, lambda: model(**inputs).loss)

    runs = []
    for plan in plans:
        source = tiny.bert(dropout=0.1, layers=1)[0].double()
        model = autopar.compile(source, device_mesh(str(plan.mesh)), inputs, plan=plan)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        steps(model, optimizer, 2)
        autopar.save_checkpoint(f"{root}/{plan.mesh}", model, optimizer, step=2)
        runs.append((model, optimizer, f"{root}/{plan.mesh}", steps(model, optimizer)))
    for number, (_, _, folder, losses) in enumerate(runs):
        for other, (model, optimizer, *_) in enumerate(runs):
            torch.manual_seed(rank)
            autopar.load_checkpoint(folder, model, optimizer)
            found = steps(model, optimizer)
            assert found == losses if number == other else max(abs(a / b - 1) for a, b in zip(found, losses)) <= 1e-12
            assert steps(model, optimizer) != losses


@pytest.mark.slow
@pytest.mark.gloo
def test_dropout_goes_on(tmp_path):
    model, inputs = tiny.bert(dropout=0.1, layers=1)
    options = {"dp=2": "fsdp", "tp=2": "megatron"}
    plans = [planned(model.double(), mesh, inputs, strategy=strategy) for mesh, strategy in options.items()]
    gloo.run(2, _with_dropout, plans, str(tmp_path))
