"""Measure what one rank of a large world does by itself for its start, for a save and when a rank is late, beside the
bytes that it sends and gets: none of it may grow faster than the number of ranks.

    OMP_NUM_THREADS=1 python benchmarks/many_ranks.py [--ranks 16 256 4096 16384]

The other ranks are simulated: collectives do nothing (torch's fake process group) or give every rank's value as this
one's, the store is in this process, and who is asked answers nothing. Prints CPU seconds of each part. Plans of so
many devices are measured by benchmarks/planner.py, starts on real processes by benchmarks/startup.py.
"""

from __future__ import annotations

import argparse
import pickle
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore

from autopar.ir.layout import Layout
from autopar.ir.mesh import Mesh
from autopar.processes import agree, meeting, peers, process_groups
from autopar.processes.meeting import Meeting
from autopar.processes.stage_mesh import StageMesh
from autopar.storage.gather import Held, gather_to
from autopar.storage.shards import owners_of
from autopar.storage.tensor_file import Form

TENSORS = 3 * (126 * 9 + 3)  # of Llama-3-405B and AdamW's state
COLLECTIVES = 126 * 12
GROUPS = ("dp", "tp", "dp,tp")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="*", default=[16, 256, 4096, 16384])
    args = parser.parse_args()
    for stages in (1, 16):
        rows: dict[str, list[float]] = {}
        meshes = [mesh_of(ranks, stages) for ranks in args.ranks if ranks >= 16 * stages]
        for mesh in meshes:
            for name, seconds in measured(mesh, stages).items():
                rows.setdefault(name, []).append(seconds)
        print(f"{'CPU seconds of rank 0 of':<42}", *(f"{mesh.devices:>9,}" for mesh in meshes))
        for name, row in rows.items():
            print(f"{name:<42}", *(f"{seconds:9.3f}" for seconds in row))
        print(f"{'in all':<42}", *(f"{sum(column):9.3f}" for column in zip(*rows.values())), "\n")


def mesh_of(ranks: int, stages: int) -> Mesh:
    return Mesh(("pp", "dp", "tp")[stages == 1 :], (stages, ranks // stages // 8, 8)[stages == 1 :])


def measured(mesh: Mesh, stages: int) -> dict[str, float]:
    dist.init_process_group("fake", rank=0, world_size=mesh.devices, store=FakeStore())
    try:
        return dict(parts_of(mesh, stages))
    finally:
        dist.destroy_process_group()


def parts_of(mesh: Mesh, stages: int):
    world = mesh.devices
    everyones: list[object] = []

    def gather(value: object) -> list:
        everyones.append(value)
        line = pickle.dumps(value)
        return [pickle.loads(line) for _ in range(world)]

    def group(ranks, *args) -> SimpleNamespace | None:
        made = dist.new_group(list(ranks), backend="fake")
        return SimpleNamespace(group_name="made") if made is not None else None

    process_groups._own_group = group
    agree._gather, agree.are_alike = gather, lambda value: stages == 1
    on_gloo = SimpleNamespace(mesh_dim_names=mesh.names)
    backend, dist.get_backend = dist.get_backend, lambda *args: "gloo"
    yield "process groups of dp, tp and both (gloo)", cpu(lambda: process_groups.bind(GROUPS, mesh, on_gloo, 0))
    dist.get_backend = backend

    plan = SimpleNamespace(mesh=mesh, hash="0" * 64, pipeline=SimpleNamespace(axis="pp" if stages > 1 else None))
    program = [(name, f"all_reduce {i}", (64,)) for i in range(COLLECTIVES) for name in GROUPS]
    yield "programs compared", cpu(lambda: agree.check_programs(plan, program))
    yield "20 gathers of 1 kB of each rank", cpu(lambda: [gather("x" * 1000) for _ in range(20)])

    inner = Mesh(mesh.names[-2:], mesh.sizes[-2:])
    ranks = tuple(tuple(range(p * inner.devices, (p + 1) * inner.devices)) for p in range(stages))
    stage = StageMesh(inner, SimpleNamespace(device_type="cpu"), inner.coordinate(0), 0, ranks)
    forms = {f"w{i}": Form((inner.devices, 1 + i % 7), torch.float32) for i in range(TENSORS)}
    holders = {name: (i * stages // TENSORS,) for i, name in enumerate(forms)}
    owners: dict[str, int] = {}
    yield "owners of a save's tensors", cpu(lambda: owners.update(owners_of(forms, holders, ranks)))

    def save() -> None:
        layout = Layout((("dp", "tp"), ()))
        for name, form in forms.items():
            part = torch.zeros(1, form.shape[1])
            gather_to(owners[name], Held(form, layout, lambda part=part: part, holders[name]), stage)

    yield "gathers of a save's tensors, its own too", cpu(save)

    store = dist.HashStore()
    for rank in range(1, world):
        store.set(f"key/{rank}", "here")
    for block in range(1, -(-world // meeting.BLOCK)):
        store.set(f"key/full {block}", "here")
    store.delete_key(f"key/{world - 2}")
    store.delete_key(f"key/full {(world - 2) // meeting.BLOCK}")
    meeting._torch.default_store = lambda: store
    met = Meeting("key", range(world))
    yield "who is missing, ten times", cpu(lambda: [met.missing() for _ in range(10)])

    peers._exchange = lambda *args: peers.SILENT
    asks = object.__new__(peers.Peers)
    vars(asks).update(
        rank=0, word="", machines=(0,) * world, unheard=frozenset(), addresses=[("", rank) for rank in range(world)]
    )
    yield "questions to all ranks, ten times", cpu(lambda: [asks.ask({}, range(world)) for _ in range(10)])


def cpu(run: Callable[[], object]) -> float:
    start = time.process_time()
    run()
    return time.process_time() - start


if __name__ == "__main__":
    main()
