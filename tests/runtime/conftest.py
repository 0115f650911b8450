"""A process group of one, for all that needs no other process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh


@pytest.fixture(scope="package")
def alone(tmp_path_factory):
    """A mesh of one device, dp=1,tp=1."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def kept_here(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture
def kept(request, monkeypatch, kept_here) -> None:
    """Trace and lower once what a file compiles several times in one process, as at a user's second start."""
    if request.node.get_closest_marker("gloo") is None:  # the server of processes would hand the folder on to them all
        monkeypatch.setenv("AUTOPAR_CACHE", str(kept_here))
