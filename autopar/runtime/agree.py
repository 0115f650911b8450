"""What all ranks must agree on before the first step: one plan, one program of collectives, one batch.

Rank 0 plans; the others receive its plan, or the error it ended with. All ranks then compare what they are going to run. A
disagreement is a typed error on every rank instead of a hang or a wrong number later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable

import torch
import torch.distributed as dist

from ..errors import AutoparError, DesyncError, InputError


def from_rank_zero(make: Callable[[], object]) -> object:
    """The value that rank 0 makes, on every rank; if it raises an AutoparError, every rank raises it."""
    box: list = [None, None]
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except AutoparError as error:
            box[1] = (type(error), error.message, {k: _text(v) for k, v in error.__dict__.items() if k != "message"})
    dist.broadcast_object_list(box, src=0)
    if box[1] is not None:
        kind, message, fields = box[1]
        raise kind(message, **fields)
    return box[0]


def _text(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float, dict)) else str(value)


def check_programs(plan_hash: str, collectives: list[str]) -> None:
    """Raises DesyncError naming the first collective, or the plan, in which ranks differ."""
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, (plan_hash, collectives))
    for rank, (other_hash, others) in enumerate(everyone):
        first_hash, first = everyone[0]
        if other_hash != first_hash:
            raise DesyncError(
                f"rank {rank} has plan {other_hash[:12]}, rank 0 has {first_hash[:12]}",
                fix="pass the same plan on every rank",
            )
        if others != first:
            where = next((i for i, (a, b) in enumerate(zip(first, others)) if a != b), min(len(first), len(others)))
            a, b = ((x[where] if where < len(x) else "nothing") for x in (first, others))
            raise DesyncError(
                f"collective {where} is {a} on rank 0 and {b} on rank {rank}", fix="use one model on all ranks"
            )


def check_batches(names: list[str], tensors: list[torch.Tensor]) -> None:
    """Raises InputError on every rank if ranks pass different global batches."""
    sums = [
        zlib.crc32(t.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes()) if t.numel() else 0
        for t in tensors
    ]
    everyone: list = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, sums)
    for rank, others in enumerate(everyone):
        for name, a, b in zip(names, everyone[0], others):
            if a != b:
                raise InputError(
                    f"rank {rank} passes another {name} than rank 0, but inputs='global' wants the same global batch on every rank",
                    fix="pass the same batch everywhere, or compile with inputs='local' if each rank loads its own part",
                )
