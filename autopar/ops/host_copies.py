"""Copies of values that wait on the host for the backward: started in one node, waited for in another.

    ticket = to_host(x);           ...compute...;  host = on_host(ticket, x)
    ticket = to_device(host, ...); ...compute...;  x = on_device(ticket, host, ...)

A device of its own copies beside compute, from and to pinned memory, on one stream for each direction; the second op
lets the stream that computes wait for that copy alone, so that `x` may be freed behind it. A ticket is an empty tensor
that stands for what is being copied: no op returns memory that another one has returned, as torch.compile wants it. On
a CPU the copies are made at once.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.library import custom_op
from torch.utils.weak import WeakTensorKeyDictionary

HOST = torch.device("cpu")
_copied: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # (copy, event or None) by ticket
_streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}  # by direction and device


@custom_op("autopar::to_host", mutates_args=())
def to_host(x: Tensor) -> Tensor:
    """Start to copy a tensor into the host's memory, and return the ticket of the copy."""
    if x.is_cuda:
        return _started(torch.empty_like(x, device=HOST, pin_memory=True), x, "to host", x.device)
    return _ticket(x.clone(), None)


@custom_op("autopar::on_host", mutates_args=())
def on_host(ticket: Tensor, x: Tensor) -> Tensor:
    """Wait for a copy of x into the host's memory, and return it; until then x must live."""
    return _arrived(ticket, x.device)


@custom_op("autopar::to_device", mutates_args=())
def to_device(host: Tensor, device: torch.device) -> Tensor:
    """Start to copy a tensor of the host's memory to a device, and return the ticket of the copy."""
    if device.type == "cuda":
        copy = torch.empty_like(host, device=device, pin_memory=False)
        return _started(copy, host, "to device", copy.device)
    return _ticket(host.clone(), None)


@custom_op("autopar::on_device", mutates_args=())
def on_device(ticket: Tensor, host: Tensor, device: torch.device) -> Tensor:
    """Wait for a copy of a tensor of the host's memory to a device, and return it."""
    return _arrived(ticket, device)


def _started(copy: Tensor, source: Tensor, direction: str, device: torch.device) -> Tensor:
    """Copy behind what the device was told to compute so far, beside what it is told from now on."""
    stream = _streams.setdefault((direction, device), torch.cuda.Stream(device))
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        copy.copy_(source, non_blocking=True)
        event = stream.record_event()
    return _ticket(copy, event)


def _ticket(copy: Tensor, event: torch.cuda.Event | None) -> Tensor:
    ticket = torch.empty(0, dtype=torch.uint8)
    _copied[ticket] = copy, event
    return ticket


def _arrived(ticket: Tensor, device: torch.device) -> Tensor:
    copy, event = _copied.pop(ticket)
    if event is not None:
        torch.cuda.current_stream(device).wait_event(event)
    return copy


to_host.register_fake(lambda x: x.new_empty(0, dtype=torch.uint8, device=HOST))
on_host.register_fake(lambda ticket, x: torch.empty_like(x, device=HOST))
to_device.register_fake(lambda host, device: host.new_empty(0, dtype=torch.uint8))
on_device.register_fake(lambda ticket, host, device: torch.empty_like(host, device=device))
