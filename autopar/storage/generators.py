"""The states of random generators as tensors: torch's, Python's `random` and numpy's of before `default_rng`."""

from __future__ import annotations

import random
from collections.abc import Mapping
from typing import cast

import numpy
import torch
from torch import Tensor

NUMPY = "MT19937"  # the only kind that is kept


def states() -> dict[str, Tensor]:
    """Return the states of this process's generators by name."""
    found = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_initialized():
        found["cuda"] = torch.cuda.get_rng_state()
    version, words, normal = random.getstate()
    found["python"] = torch.tensor([version, *words], dtype=torch.int64)
    found["python normal"] = torch.tensor([] if normal is None else [normal], dtype=torch.float64)
    kind, keys, position, has_normal, normal = cast(tuple, numpy.random.get_state())
    if kind == NUMPY:
        found["numpy"] = torch.tensor([position, has_normal, *keys.tolist()], dtype=torch.int64)
        found["numpy normal"] = torch.tensor([normal], dtype=torch.float64)
    return found


def check(saved: Mapping[str, Tensor]) -> None:
    """Raise ValueError or the like if these are no states that `restore` can take."""
    torch.Generator().set_state(saved["cpu"])
    if "python" in saved:
        random.Random().setstate(_of_python(saved))
    if "numpy" in saved:
        numpy.random.RandomState().set_state(_of_numpy(saved))


def restore(saved: Mapping[str, Tensor]) -> None:
    """Set this process's generators to what `states` returned; those that it lacks stay as they are."""
    torch.set_rng_state(saved["cpu"])
    if "cuda" in saved and torch.cuda.is_initialized():
        torch.cuda.set_rng_state(saved["cuda"])
    if "python" in saved:
        random.setstate(_of_python(saved))
    if "numpy" in saved:
        numpy.random.set_state(_of_numpy(saved))


def _of_python(saved: Mapping[str, Tensor]) -> tuple:
    version, *words = saved["python"].tolist()
    return version, tuple(words), next(iter(saved["python normal"].tolist()), None)


def _of_numpy(saved: Mapping[str, Tensor]) -> tuple:
    position, has_normal, *keys = saved["numpy"].tolist()
    return NUMPY, numpy.array(keys, dtype=numpy.uint32), position, has_normal, saved["numpy normal"].item()
