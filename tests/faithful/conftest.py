"""A process group of one, for programs on a single process."""

from __future__ import annotations

import pytest
import torch.distributed as dist


@pytest.fixture(scope="package")
def alone(tmp_path_factory):
    """The mesh dp=1,tp=1 can be made."""
    store = tmp_path_factory.mktemp("gloo") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield "dp=1,tp=1"
    dist.destroy_process_group()
