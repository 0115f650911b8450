"""A module with fake parameters for as long as it is traced.

Tracing reads shapes only. With fake tensors on one device in place of its parameters, a model gives the same graph whether its
own are on the meta device, on a GPU or already taken over; nothing of the graph holds on to their memory; and a precision can
be tried without casting a weight. Buffers keep their values, from which constant attention masks are computed.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Form:
    """What tracing needs to know of a parameter."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


def forms_of(model: nn.Module) -> dict[str, Form]:
    """Form of every parameter, under its first name."""
    return {name: Form(tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}


def fake(mode, shape, dtype: torch.dtype) -> torch.Tensor:
    """A tensor of `mode` without memory."""
    with mode:
        return torch.empty(tuple(shape), dtype=dtype, device=DEVICE)


@contextmanager
def fake_state(model: nn.Module, mode, forms: Mapping[str, Form]) -> Iterator[None]:
    """Inside, the parameters of `model` are fake tensors of these forms, and its buffers are on the CPU (fake if they are
    meta). Shared ones stay shared. Afterwards everything is as it was."""
    stand_in: dict[int, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        form = forms[name]
        stand_in[id(parameter)] = nn.Parameter(fake(mode, form.shape, form.dtype), form.trainable)
    for buffer in model.buffers():
        is_meta = buffer.is_meta
        stand_in[id(buffer)] = fake(mode, buffer.shape, buffer.dtype) if is_meta else buffer.detach().to(DEVICE)
    tables = [table for m in model.modules() for table in (m._parameters, m._buffers)]
    before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.update({name: stand_in[id(value)] for name, value in table.items() if value is not None})
        yield
    finally:
        for table, values in zip(tables, before):
            table.clear()
            table.update(values)
