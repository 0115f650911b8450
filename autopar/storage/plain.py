"""Python values as JSON and back: what optimizers, schedulers and data loaders keep besides tensors. Nothing is ever
unpickled."""

from __future__ import annotations

import json
import math
from collections import Counter

import torch
from torch.distributed.tensor import DTensor

from ..errors import CheckpointError

LARGEST_TENSOR = 4096  # elements: larger ones belong into a tensor file


def canonical(value: object) -> bytes:
    """Return JSON of which equal values have equal bytes."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def encode(value: object, what: str) -> object:
    """Return a value that JSON can hold. Objects become {"!kind": ...}. Raises CheckpointError with `what` for other
    types."""
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else {"!float": repr(value)}
    if isinstance(value, list):
        return [encode(v, f"{what}[{i}]") for i, v in enumerate(value)]
    if type(value) is tuple:
        return {"!tuple": [encode(v, f"{what}[{i}]") for i, v in enumerate(value)]}
    if isinstance(value, dict):
        if all(type(k) is str and not k.startswith("!") for k in value) and not isinstance(value, Counter):
            return {k: encode(v, f"{what}[{k!r}]") for k, v in value.items()}
        pairs = [[encode(k, f"a key of {what}"), encode(v, f"{what}[{k!r}]")] for k, v in value.items()]
        return {"!counter" if isinstance(value, Counter) else "!dict": pairs}
    is_whole = isinstance(value, torch.Tensor) and not isinstance(value, DTensor)
    if is_whole and value.numel() <= LARGEST_TENSOR and not value.is_complex():
        flat = [encode(v, what) for v in value.detach().reshape(-1).tolist()]
        return {"!tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), flat]}
    raise CheckpointError(
        f"{what} is a {type(value).__name__}, which a checkpoint cannot hold",
        fix="keep numbers, text, lists, tuples, dicts and small tensors there",
    )


def decode(value: object) -> object:
    """Return the value that `encode` was given."""
    if isinstance(value, list):
        return [decode(v) for v in value]
    if not isinstance(value, dict):
        return value
    match value:
        case {"!float": text}:
            return float(text)
        case {"!tuple": items}:
            return tuple(decode(items))
        case {"!dict": pairs}:
            return {decode(k): decode(v) for k, v in pairs}
        case {"!counter": pairs}:
            return Counter({decode(k): decode(v) for k, v in pairs})
        case {"!tensor": [dtype, shape, flat]}:
            return torch.tensor(decode(flat), dtype=getattr(torch, dtype)).reshape(shape)
    return {k: decode(v) for k, v in value.items()}
