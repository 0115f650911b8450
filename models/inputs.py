"""Example inputs and fresh weights: empty on the meta device, elsewhere a function of the seed alone."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import ModelError


def integers(shape: Sequence[int], below: int, device: torch.device, seed: int) -> Tensor:
    """Draw int64 in [0, below), on the CPU, so that every device gets the same numbers."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=torch.int64, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(below, tuple(shape), generator=generator).to(device)


def floats(shape: Sequence[int], dtype: torch.dtype, device: torch.device, seed: int) -> Tensor:
    """Draw Normal(0, 1) in `dtype`, on the CPU in fp32, so that every device and dtype gets the same numbers."""
    if device.type == "meta":
        return torch.empty(tuple(shape), dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(tuple(shape), generator=generator, dtype=torch.float32).to(device, dtype)


def tokens(config, batch: int, seq: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return `input_ids` (B, S) below config.vocab, and `labels` equal to them (the model shifts). Raises ModelError if
    the sequence is longer than config.seq."""
    if seq > config.seq:
        raise ModelError(f"seq {seq} is longer than the model's {config.seq}", fix=f"add the option seq={seq}")
    ids = integers((batch, seq), config.vocab, device, seed)
    return {"input_ids": ids, "labels": ids.clone()}


def features(config, batch: int, seq: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return `x` and an unrelated `target`, both (B, S, config.hidden)."""
    shape = (batch, seq, config.hidden)
    return {"x": floats(shape, dtype, device, seed), "target": floats(shape, dtype, device, seed + 1)}


def images(config, batch: int, seq: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return `pixel_values` (B, 3, config.image, config.image) of noise and random `labels` (B); `seq` says nothing of
    images."""
    shape = (batch, 3, config.image, config.image)
    return {
        "pixel_values": floats(shape, dtype, device, seed),
        "labels": integers((batch,), config.classes, device, seed + 1),
    }


def pictures(config, batch: int, seq: int, dtype: torch.dtype, device: torch.device, seed: int) -> dict[str, Tensor]:
    """Return `pixel_values` and an unrelated `target`, both (B, config.channels, config.image, config.image) of
    noise."""
    shape = (batch, config.channels, config.image, config.image)
    return {"pixel_values": floats(shape, dtype, device, seed), "target": floats(shape, dtype, device, seed + 1)}


@contextmanager
def fresh_weights(dtype: torch.dtype, device: torch.device, seed: int) -> Iterator[None]:
    """Let modules made inside live on `device` in `dtype`, initialised from `seed`. The caller's random state is
    kept."""
    default = torch.get_default_dtype()
    with torch.random.fork_rng([device] if device.type == "cuda" else []), device:
        torch.manual_seed(seed)
        torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(default)
