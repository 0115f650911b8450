"""Make instances of ops of their parts: small real tensors, and `op`, which enters a pair of (args, kwargs) into
INSTANCES[name].

Sizes are even and uneven over 2 and 3 devices, and factors of one op differ in size where equality could hide a mix-up.
"""

from __future__ import annotations

from collections import defaultdict

import torch

import autopar.ops  # noqa: F401  (registers autopar::*)
from autopar.rules.register import full_name

INSTANCES: dict[str, list[tuple[tuple, dict]]] = defaultdict(list)
generator = torch.Generator().manual_seed(0)


def real(*size: int, dtype=torch.float64) -> torch.Tensor:
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def between(low: float, high: float, *size: int) -> torch.Tensor:
    return torch.rand(size, generator=generator, dtype=torch.float64) * (high - low) + low


def whole(high: int, *size: int) -> torch.Tensor:
    return torch.randint(0, high, size, generator=generator)


def mask(*size: int) -> torch.Tensor:
    return whole(2, *size).bool()


def op(names: str, *args, **kwargs) -> None:
    """One instance of each of the named ops, written as in the table."""
    for name in names.split():
        INSTANCES[full_name(name)].append((args, kwargs))


def overload(full: str):
    namespace, name, kind = full.split(".")
    return getattr(getattr(getattr(torch.ops, namespace), name), kind)


def positional(full: str) -> list[str]:
    return [str(a.type) for a in overload(full)._schema.arguments if not a.has_default_value() and not a.kwarg_only]
