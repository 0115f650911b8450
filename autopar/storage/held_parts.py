"""One rank's hold of a run behind a step: notes, and its parts of parameters, buffers and the optimizer's state.

They can be left in a folder, or packed into one tensor of bytes that another rank keeps.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import CheckpointError
from ..ir.layout import Layout, local_ranges
from ..processes.stage_mesh import StageMesh
from . import generators, optimizer_state
from .durable import disk_errors, write_file
from .model_folder import local, tensors_of, write_config
from .opened import MODEL, OPTIMIZER, RNG
from .plain import canonical, encode
from .tensor_file import DTYPES, NAMES, Form, TensorFileWriter, bytes_of, in_order
from .weights import persistent_buffers

PARTS, NOTES, CONFIG = "parts.safetensors", "notes.json", "config"
ALIGNED_BYTES = 64


@dataclass(frozen=True)
class Noted:
    """Keeps what a rank notes behind a step, besides parameters and the optimizer's state, which only steps change."""

    step: int
    values: dict[str, object]  # of a checkpoint's state.json
    buffers: Mapping[str, Tensor]
    generators: Mapping[str, Tensor]
    run: str | None = None


def noted(model: nn.Module, step: int, data: object, scaler, run: str | None) -> Noted:
    """Return what is to be noted of a compiled model behind `step`. `data`, `scaler`: as in save_checkpoint."""
    random = getattr(model, "random", None)
    values = {
        "data": encode(data, "data"), "scheduler": None, "scaler": encode(scaler.state_dict(), "scaler"),
        "dropout": None if random is None else {"seed": int(random.seed), "offset": int(random.offset)},
    }  # fmt: skip
    buffers = {name: local(buffer).clone() for name, buffer in persistent_buffers(model)}
    return Noted(step, values, buffers, generators.states(), run)


@dataclass(frozen=True)
class HeldParts:
    """The parts of one rank. `notes`: plain values, among them the names of all tensors that the rank knows of, and of
    those that it has parts of their global shape and the part's ranges."""

    notes: dict
    tensors: Mapping[str, Tensor]

    @staticmethod
    def of(model: Any, optimizer: torch.optim.Optimizer, noted: Noted, lost: Collection[int] = ()) -> HeldParts:
        """Return what is this rank's to keep of what it holds, which stays where it is: of a part that several ranks of
        its stage hold alike one keeps it, which is not `lost`. Raises CheckpointError if the optimizer has state that
        only all ranks together can give."""
        stage = model.stage_mesh
        of_optimizer, plain = optimizer_state.describe(model, optimizer)
        if optimizer_state.is_collective(plain):
            raise CheckpointError(f"{type(optimizer).__name__} has state that no rank alone can give")
        held = {f"{MODEL}/{name}": one for name, one in tensors_of(model, adapters=True).items()}
        held |= {f"{OPTIMIZER}/{name}": one for name, one in of_optimizer.items()}
        names = [*held, *(f"{MODEL}/{name}" for name in model.elsewhere)]
        mine = _share({key: (one.form, one.layout) for key, one in held.items()}, stage, lost)
        held = {key: held[key] for key in mine}
        tensors = {f"{RNG}/{name}": state for name, state in noted.generators.items()}
        for key, one in held.items():
            part = noted.buffers.get(key.removeprefix(f"{MODEL}/"))
            if part is None and one.part is not None:
                part = one.part()
            if part is not None:
                tensors[key] = part
        notes = {
            "step": noted.step, "rank": dist.get_rank(), "values": noted.values, "optimizer": plain, "run": noted.run,
            "names": names,
            "tensors": {
                key: [one.form.shape, local_ranges(one.form.shape, one.layout, stage.mesh, stage.coordinate)]
                for key, one in held.items()
            },
        }  # fmt: skip
        return HeldParts(notes, tensors)

    def packed(self) -> Tensor:
        """Return a copy of all of it as one tensor of bytes on the host."""
        places: dict[str, list] = {}
        end = 0
        for name, tensor in self.tensors.items():
            places[name] = [NAMES[tensor.dtype], list(tensor.shape), end]
            end += -(-tensor.numel() * tensor.element_size() // ALIGNED_BYTES) * ALIGNED_BYTES
        header = canonical({"notes": self.notes, "places": places})
        begin = -(-(8 + len(header)) // ALIGNED_BYTES) * ALIGNED_BYTES
        result = torch.empty(begin + end, dtype=torch.uint8)
        bytes_of(result)[: 8 + len(header)] = len(header).to_bytes(8, "little") + header
        for name, (_, shape, offset) in places.items():
            tensor = self.tensors[name].detach()
            _view(result, begin + offset, tensor.dtype, shape).copy_(tensor)
        return result

    @staticmethod
    def unpacked(packed: Tensor) -> HeldParts:
        """Return what `packed` has made, whose memory it shares."""
        length = int.from_bytes(bytes(bytes_of(packed)[:8]), "little")
        header = json.loads(bytes(bytes_of(packed)[8 : 8 + length]))
        begin = -(-(8 + length) // ALIGNED_BYTES) * ALIGNED_BYTES
        places = header["places"].items()
        tensors = {name: _view(packed, begin + at, DTYPES[dtype], shape) for name, (dtype, shape, at) in places}
        return HeldParts(header["notes"], tensors)

    def leave(self, folder: Path, model: nn.Module) -> None:
        """Write it into a folder of its own in `folder`, whose parts are whole when there are notes. Raises
        CheckpointError if it cannot be written."""
        rank, by = self.notes["rank"], dist.get_rank()
        mine = folder / f"step-{self.notes['step']:08d}" / f"rank-{rank:05d}{'' if rank == by else f'-of-{by:05d}'}"
        with disk_errors(mine):
            (mine / CONFIG).mkdir(parents=True)
            write_config(model, mine / CONFIG)
            forms = {name: Form(tuple(tensor.shape), tensor.dtype) for name, tensor in self.tensors.items()}
            writer = TensorFileWriter(mine / PARTS, forms)
            for key in in_order(forms):
                writer.append(self.tensors[key])
            writer.close()
            write_file(mine / "unfinished", canonical(self.notes))
            os.replace(mine / "unfinished", mine / NOTES)


def _share(held: Mapping[str, tuple[Form, Layout]], stage: StageMesh, lost: Collection[int]) -> list[str]:
    """Return the names of the tensors whose parts are this rank's to keep. Ranks that hold the same part take turns,
    largest tensors first, and the next one is there for one that is lost."""
    ranks, mine = stage.ranks[stage.pp_rank], []
    here, turns = ranks.index(dist.get_rank()), Counter[tuple[str, ...]]()
    for name in sorted(held, key=lambda name: (-held[name][0].bytes_, name)):
        sharding = held[name][1].sharding_axes
        alike = tuple(axis for axis in stage.mesh.names if axis not in sharding)
        holders = [ranks[at] for at in stage.mesh.group(alike, here)]
        turn = turns[alike] % len(holders)
        turns[alike] += 1
        if next((r for r in holders[turn:] + holders[:turn] if r not in lost), None) == ranks[here]:
            mine.append(name)
    return mine


def _view(packed: Tensor, offset: int, dtype: torch.dtype, shape: list[int]) -> Tensor:
    return packed[offset : offset + math.prod(shape) * dtype.itemsize].view(dtype).view(shape)
