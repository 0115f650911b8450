"""The process groups of a run, and that none of their threads outlives it."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh

from autopar import Mesh
from tests.helpers import gloo


def _threads_of_gloo() -> int:
    names = [(thread / "comm").read_text() for thread in Path("/proc/self/task").iterdir()]
    return sum(name.startswith(("gloo", "pt_gloo")) for name in names)


def _trained(rank: int, names: tuple[str, ...]) -> tuple[int, int]:
    """Return how many threads serve process groups after a step, and after the end of them all."""
    from autopar.api import entry
    from autopar.processes import process_groups

    def step() -> None:
        x = torch.ones(4, 8)
        source = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Linear(8, 8))
        mesh = init_device_mesh("cpu", (2,) * len(names), mesh_dim_names=names)
        model = entry.compile(source, mesh, {"input": x}, loss_fn=lambda y: y.square().mean())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(x).loss.backward()
        optimizer.step()
        next(model.parameters()).full_tensor()

    step()
    busy = _threads_of_gloo()
    process_groups.end()
    return busy, _threads_of_gloo()


@pytest.mark.gloo
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="threads are counted in /proc")
@pytest.mark.parametrize("names", [("dp",), pytest.param(("pp",), marks=pytest.mark.slow)])
def test_no_thread_outlives_the_groups(names):
    """A thread that lets go of a tensor while the interpreter ends takes the process down with SIGABRT."""
    for busy, left in gloo.run(2, _trained, names):
        assert busy > 0 and left == 0


def _compiles_late(rank: int, waits: str, over: Path) -> str:
    """Compile on rank 0; until that is over, rank 1 builds its model, or stops where rank 0 has traced and planned."""
    import os

    from autopar.api import entry
    from autopar.errors import CollectiveTimeout
    from autopar.processes import agree

    def wait(*args) -> None:
        while not over.exists():
            time.sleep(0.05)

    os.environ["AUTOPAR_TIMEOUT_S"] = "0.1"
    source, mesh = torch.nn.Linear(8, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    if rank == 1:
        if waits == "before":
            wait()
        agree.check_captures = wait
    try:
        entry.compile(source, mesh, {"input": torch.ones(4, 8)}, loss_fn=lambda y: y.square().mean())
    except CollectiveTimeout as error:
        return str(error)
    except Exception as error:  # rank 1 finds what rank 0 has given up
        return type(error).__name__
    finally:
        over.touch()
    return "compiled"


@pytest.mark.gloo
@pytest.mark.sampled(1)
@pytest.mark.parametrize(("waits", "said"), [
    ("before", "rank 1 did not come to a new process group of 2 ranks within 1 s"),
    ("inside", "rank 1 did not arrive in time at what ranks agree on before the first step: rank 1 is at"),
])  # fmt: skip
def test_a_compile_waits_ten_times_as_long_as_a_step(waits, said, tmp_path):
    """The process group that the user made waits for a minute."""
    start = time.monotonic()
    first, *_ = gloo.run(2, _compiles_late, waits, tmp_path / "over")
    assert said in first and time.monotonic() - start < 50


@pytest.mark.parametrize(("on_host", "backend"), [(False, "nccl"), (True, "gloo")])
def test_axes_without_a_group_of_the_mesh_get_one_of_its_backend(on_host, backend, monkeypatch):
    """A graph's tensors on GPUs cannot go through a group of gloo."""
    from autopar.processes import process_groups

    asked = []
    monkeypatch.setattr(process_groups.dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(process_groups, "_own_group", lambda ranks, lane, backend: asked.append((ranks, backend)))
    of_mesh = SimpleNamespace(
        mesh_dim_names=("dp", "cp", "tp"), get_group=lambda axis: SimpleNamespace(group_name=axis)
    )
    bound = process_groups.bind(["dp", "dp,cp"], Mesh.parse("dp=2,cp=2,tp=2"), of_mesh, 0, on_host=on_host)
    assert ((0, 2, 4, 6), backend) in asked and {found for _, found in asked} == {backend}
    assert on_host or bound["dp"] == "dp"


def test_reductions_have_communicators_of_their_own(monkeypatch):
    from autopar.processes import process_groups

    monkeypatch.setattr(process_groups.dist, "get_backend", lambda: "nccl")
    named = lambda ranks, lane, backend: SimpleNamespace(group_name=f"{lane} {backend} {ranks}")  # noqa: E731
    monkeypatch.setattr(process_groups, "_own_group", named)
    of_mesh = SimpleNamespace(mesh_dim_names=("dp",), get_group=lambda axis: SimpleNamespace(group_name=axis))
    mesh = Mesh.parse("dp=2")
    assert process_groups.bind(["dp"], mesh, of_mesh, 0) == {"dp": "dp"}
    found = process_groups.bind(["dp"], mesh, of_mesh, 0, process_groups.REDUCTIONS)
    assert found == {"dp": "reductions nccl (0, 1)"}
