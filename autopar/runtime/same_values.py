"""All ranks start with the values of one model: those of rank 0, where ranks built theirs with other random numbers.

Each rank computes a 64-bit checksum of every parameter, buffer and tensor attribute, and compares with rank 0's.
Tensors that differ on some rank are broadcast from rank 0, as torch's DDP does with all of them, one after the other,
so that a rank never holds more than the largest of them beside its model. Checksums take 0.14 s a GB on one CPU thread
(measured, 40 us a small tensor), and where nothing differs only they travel.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Collection, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DesyncError, InputError
from ..processes import agree, process_groups, watch

WORDS = 1 << 16  # int64 numbers of a tensor that are multiplied at once: what fits into a core's cache
STEP = 0x9E3779B97F4A7C15 - 2**64  # odd, so that no difference is lost when the sum of a chunk is multiplied by it
BROADCAST_BYTES = 256 << 20
SHOWN = 8

_log = logging.getLogger("autopar")


def share_values(source: nn.Module, device: str, skipped: Collection[str] = ()) -> None:
    """Give `source` rank 0's values on all ranks, in place; `skipped` are names of tensors that get theirs from
    elsewhere. All ranks call it together; `device` is the type of device that collectives run on.

    Raises DesyncError, on all ranks, for a tensor of another shape or dtype than rank 0's, InputError for one that has
    values on some ranks and not on others."""
    if dist.get_world_size() == 1:
        return
    tensors = agree.everywhere(lambda: {name: t for name, t in tensors_of(source) if name not in skipped})
    mine = agree.everywhere(lambda: checksums(tensors))
    first = agree.from_rank_zero(lambda: mine)
    differing = agree.union(agree.everywhere(lambda: _differing(mine, first)))
    for name in differing:
        _broadcast(tensors[name], torch.device(device))
    if differing and dist.get_rank() == 0:
        shown = ", ".join(differing[:SHOWN]) + (" and others" if len(differing) > SHOWN else "")
        _log.warning(
            "%d of %d parameters and buffers differed between ranks; all have the values of rank 0 now: %s",
            len(differing),
            len(mine),
            shown,
        )


def tensors_of(source: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the parameters, buffers and the tensors in attributes of a model, each once, with their names."""
    seen: set[int] = set()
    attributes = (
        (f"{path}.{name}".lstrip("."), value)
        for path, module in source.named_modules()
        for name, value in vars(module).items()
        if not name.startswith("_")
    )
    for name, value in (*source.named_parameters(), *source.named_buffers(), *attributes):
        for inner, tensor in _inside(name, value):
            if id(tensor) not in seen:
                seen.add(id(tensor))
                yield inner, tensor


def _inside(name: str, value: object, depth: int = 2) -> Iterator[tuple[str, Tensor]]:
    """Iterate over the tensors of an attribute: itself, or those in its lists and dicts."""
    if isinstance(value, nn.Parameter) or type(value) is Tensor:
        if value.layout is torch.strided:
            yield name, value
    elif type(value) in (list, tuple, dict) and depth:
        for key, item in value.items() if type(value) is dict else enumerate(value):
            yield from _inside(f"{name}[{key!r}]", item, depth - 1)


def checksums(tensors: dict[str, Tensor]) -> dict[str, tuple]:
    """Return (shape, dtype, 64-bit checksum) of every tensor; the checksum is None without values."""
    sums = {name: checksum(t) for name, t in tensors.items() if not t.is_meta}
    found = {name: s.item() for name, s in sums.items()}  # once all are computed: reading one waits for the device
    return {name: (tuple(t.shape), str(t.dtype), found.get(name)) for name, t in tensors.items()}


@torch.no_grad()
def checksum(tensor: Tensor) -> Tensor:
    """Return an int64 scalar: the bytes as int64 numbers, each times its own odd number, summed modulo 2**64. Tensors
    that differ in one number never have the same, others with a probability of about 2**-63."""
    flat = _bytes(tensor.detach().contiguous())
    flat = flat if flat.storage_offset() % 8 == 0 else flat.clone()  # an int64 begins at a multiple of its size
    whole = len(flat) // 8 * 8
    rest = torch.zeros(8, dtype=torch.uint8, device=flat.device)
    rest[: len(flat) - whole] = flat[whole:]
    factors, total = _factors(flat.device), torch.zeros((), dtype=torch.int64, device=flat.device)
    products = torch.empty_like(factors)
    for numbers in (rest.view(torch.int64), *flat[:whole].view(torch.int64).split(WORDS)):
        count = len(numbers)
        total = total * STEP + torch.mul(numbers, factors[:count], out=products[:count]).sum()
    return total


@functools.cache
def _factors(device: torch.device) -> Tensor:
    """Return the same odd numbers on every rank."""
    generator = torch.Generator().manual_seed(1)
    return (torch.randint(-(2**63), 2**63 - 1, (WORDS,), generator=generator) | 1).to(device)


def _bytes(tensor: Tensor) -> Tensor:
    """Return the memory of a contiguous tensor as bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _differing(mine: dict[str, tuple], first: dict[str, tuple]) -> list[str]:
    """Return the names of tensors with other values than rank 0's. Raises DesyncError or InputError as `share_values`
    says."""
    rank = dist.get_rank()
    if odd := sorted({*mine} ^ {*first}):
        raise DesyncError(
            f"{odd[0]} is in the model of rank {rank if odd[0] in mine else 0} and not of rank "
            f"{0 if odd[0] in mine else rank}",
            fix="build the same model on every rank",
        )
    for name, (shape, dtype, found) in mine.items():
        if (shape, dtype) != first[name][:2]:
            raise DesyncError(
                f"{name} is {shape} {dtype} on rank {rank} and {first[name][0]} {first[name][1]} on rank 0",
                fix="build the same model on every rank",
            )
        if (found is None) != (first[name][2] is None):
            raise InputError(
                f"{name} has values on rank {0 if found is None else rank} and is on the meta device on "
                f"rank {rank if found is None else 0}",
                fix="give it values on every rank, or on none",
            )
    return [name for name in mine if mine[name] != first[name]]


@torch.no_grad()
def _broadcast(tensor: Tensor, device: torch.device) -> None:
    """Overwrite a tensor with rank 0's values."""
    target = tensor.detach()
    for dim, stride in enumerate(target.stride()):
        if stride == 0 and target.shape[dim] > 1:  # expanded: all its elements along dim are one in memory
            target = target.narrow(dim, 0, 1)
    sent = target.contiguous()
    flat = _bytes(sent)
    for start in range(0, len(flat), BROADCAST_BYTES):
        part = flat[start : start + BROADCAST_BYTES]
        moved = part.to(device)
        with watch.collective("the values of rank 0"):
            watch.patiently(functools.partial(dist.broadcast, moved, src=0, group=process_groups.tensor_group()))
        if moved is not part and dist.get_rank():
            part.copy_(moved)
    if dist.get_rank() and sent is not target:
        target.copy_(sent)
