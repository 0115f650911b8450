"""Two nodes, made of network namespaces, whose link is cut where no step runs."""

from __future__ import annotations

import multiprocessing
import os
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.errors import AutoparError
from autopar.processes.process_groups import FIRST_STEP
from tests.helpers.two_nodes import TwoNodes, has_namespaces

TIMEOUT_SECONDS, RANKS = 3.0, 4


def _main(rank: int, nodes: TwoNodes, folder: Path, moment: str) -> None:
    """Compile and save; the ranks meet at a moment in the middle of it when the link is gone."""
    from autopar.processes import agree, process_groups
    from autopar.storage import checkpoint

    os.environ["AUTOPAR_TIMEOUT_S"] = str(TIMEOUT_SECONDS)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=nodes.enter(rank, os.getppid()), rank=rank, world_size=RANKS)

    def after_the_cut(run):
        def wrapped(*args, **options):
            (folder / f"here-{rank}").touch()
            while not (folder / "cut").exists():
                time.sleep(0.02)
            return run(*args, **options)

        return wrapped

    if moment == "compile":
        agree.check_captures = after_the_cut(agree.check_captures)
    elif moment == "addresses":
        process_groups.all_or_broken = after_the_cut(process_groups.all_or_broken)
    else:
        checkpoint.check_shared = after_the_cut(checkpoint.check_shared)
    said = "nothing"
    try:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        model = autopar.compile(torch.nn.Linear(8, 8), mesh, (torch.ones(4, 8),), strategy="ddp")
        autopar.save_checkpoint(folder / "checkpoints", model, step=1)
    except AutoparError as error:
        said = f"{type(error).__name__}: {error}"
    (folder / f"said-{rank}").write_text(said)
    os._exit(0)


@pytest.mark.skipif(not has_namespaces(), reason="network namespaces need root, iproute2 and unshare")
@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("moment", ["addresses", "compile", "save"])
def test_a_cut_cable_is_told_on_both_sides(moment, tmp_path):
    """The process group that the user made would wait for half an hour."""
    context = multiprocessing.get_context("spawn")
    with TwoNodes(RANKS) as nodes:
        processes = [
            context.Process(target=_main, args=(r, nodes, tmp_path, moment), daemon=True) for r in range(RANKS)
        ]
        try:
            for process in processes:
                process.start()
            end = time.monotonic() + 90
            while not all((tmp_path / f"here-{rank}").exists() for rank in range(RANKS)):
                assert time.monotonic() < end and not [*tmp_path.glob("said-*")]
                time.sleep(0.05)
            nodes.link("down")
            start = time.monotonic()
            (tmp_path / "cut").touch()
            for process in processes:
                process.join(90)
            seconds = time.monotonic() - start
            said = [(tmp_path / f"said-{rank}").read_text() for rank in range(RANKS)]
        finally:
            for process in processes:
                process.kill()
                process.join()
    if moment == "addresses":  # nobody can be asked yet, and the store is on the first machine
        first, second = "ranks 2, 3 did not come to", "ranks did not come to"
        for rank, text in enumerate(said):
            expected = f"CollectiveTimeout: {first if rank < 2 else second} the exchange of addresses"
            assert text.startswith(expected), said
        assert seconds < FIRST_STEP * TIMEOUT_SECONDS + 10, (seconds, said)
        return
    for rank, text in enumerate(said):
        other = "machine 1 (ranks 2, 3)" if rank < 2 else "machine 0 (ranks 0, 1)"
        assert text.startswith("CollectiveTimeout") and f"{other} cannot be reached: cut off" in text, said
    assert seconds < TIMEOUT_SECONDS + 5, (seconds, said)
