"""What all ranks must agree on before the first step: one graph, one plan, one program of collectives, one batch.

Rank 0 plans; the others receive its plan. Whatever fails on one rank fails on all of them, and all compare what they are going
to run: a disagreement is a typed error on every rank instead of a hang or a wrong number later.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist

from ..errors import AutoparError, DesyncError, InputError
from . import watch

T = TypeVar("T")


def everywhere(run: Callable[[], T]) -> T:
    """What `run` returns on this rank. If it fails on some rank, every rank raises: its own error, else the first rank's."""
    result, error = None, None
    try:
        result = run()
    except Exception as caught:
        error = caught
    failures = _gather(_portable(error))
    if error is not None:
        raise error
    for rank, failure in enumerate(failures):
        _raise(failure, rank)
    return result


def from_rank_zero(make: Callable[[], object]) -> object:
    """The value that rank 0 makes, on every rank; if that fails, every rank raises."""
    box, error = [None, None], None
    if dist.get_rank() == 0:
        try:
            box[0] = make()
        except Exception as caught:
            error = caught
            box[1] = _portable(caught)
    with watch.meeting("the plan of rank 0"):
        dist.broadcast_object_list(box, src=0)
    if error is not None:
        raise error
    _raise(box[1], 0)
    return box[0]


def check_captures(inputs: Sequence[str], fingerprint: str) -> None:
    """Raises InputError or DesyncError if ranks traced other input shapes ("x (4, 8)") or another graph than rank 0."""
    everyone = _gather((list(inputs), fingerprint))
    first_inputs, first = everyone[0]
    for rank, (others, found) in enumerate(everyone):
        if others != first_inputs:
            raise InputError(
                f"rank {rank} compiles for {', '.join(others)} and rank 0 for {', '.join(first_inputs)}",
                fix="pass example_inputs of the same structure and shape on every rank",
            )
        if found != first:
            raise DesyncError(
                f"rank {rank} traced another graph ({found[:12]}) than rank 0 ({first[:12]})",
                fix="build the same model on every rank; what it computes must not depend on the rank",
            )


def check_programs(plan_hash: str, collectives: list[str]) -> None:
    """Raises DesyncError naming the first collective, or the plan, in which ranks differ."""
    everyone = _gather((plan_hash, collectives))
    first_hash, first = everyone[0]
    for rank, (other_hash, others) in enumerate(everyone):
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
    everyone = _gather([_checksum(t) for t in tensors])
    for rank, others in enumerate(everyone):
        for name, a, b in zip(names, everyone[0], others):
            if a != b:
                raise InputError(
                    f"rank {rank} passes another {name} than rank 0, but inputs='global' wants the same global batch on every rank",
                    fix="pass the same batch everywhere, or compile with inputs='local' if each rank loads its own part",
                )


def _checksum(tensor: torch.Tensor) -> int:
    return zlib.crc32(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())


def _gather(value: object) -> list:
    everyone: list = [None] * dist.get_world_size()
    with watch.meeting("what ranks agree on before the first step"):
        dist.all_gather_object(everyone, value)
    return everyone


def _portable(error: Exception | None) -> tuple | None:
    """An error as plain data. Its traceback stays on the rank that it belongs to."""
    if error is None:
        return None
    if not isinstance(error, AutoparError):
        return None, f"{type(error).__name__}: {error}", {}
    return type(error), error.message, {k: _plain(v) for k, v in error.__dict__.items() if k != "message"}


def _plain(value: object) -> object:
    return value if value is None or isinstance(value, (str, int, float, dict)) else str(value)


def _raise(failure: tuple | None, rank: int) -> None:
    if failure is not None:
        kind, message, fields = failure
        if kind is None:
            raise DesyncError(f"rank {rank} failed with {message}", fix="see the traceback of that rank")
        raise kind(message, **fields)
