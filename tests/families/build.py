"""From a configuration of transformers to a tiny model and a call of it, offline, with nothing random in the forward
but inside of `as_shipped()`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass

import torch
from torch import Tensor, nn

RANDOM = ("drop", "mask_time_prob", "mask_feature_prob", "jitter")  # in the names of options that draw numbers

VOCAB, LABELS = 128, 3
_SHIPPED: ContextVar[bool] = ContextVar("shipped", default=False)


@contextmanager
def as_shipped() -> Iterator[None]:
    """Inside, models are made with the dropout, LayerDrop and masking that their configurations have by default."""
    token = _SHIPPED.set(True)
    try:
        yield
    finally:
        _SHIPPED.reset(token)


@dataclass(frozen=True)
class Family:
    """One architecture. `family(batch, seq)` gives a new model in training mode and the keyword arguments of a call,
    labels included; `seq` counts tokens and is left aside by families that read images or sounds."""

    name: str
    kind: str
    make: Callable[[int, int], tuple[nn.Module, dict[str, Tensor]]]

    def __call__(self, batch: int = 8, seq: int = 16) -> tuple[nn.Module, dict[str, Tensor]]:
        model, inputs = self.make(batch, seq)
        return model.train(), inputs


def model_of(name: str, auto: str, **options) -> nn.Module:
    """The model that transformers makes of the configuration `name` with these options, under its class `auto`."""
    import transformers

    config = transformers.AutoConfig.for_model(name, **options)
    if not _SHIPPED.get():
        without_randomness(config)
    made = getattr(transformers, auto)
    return made.from_config(config) if auto.startswith("Auto") else made(config)


def without_randomness(config) -> None:
    """Every probability of dropping or masking in a configuration and the ones inside it becomes 0."""
    from transformers import PreTrainedConfig

    for name, value in list(vars(config).items()):
        if isinstance(value, PreTrainedConfig):
            without_randomness(value)
        elif isinstance(value, float) and any(word in name for word in RANDOM):
            setattr(config, name, 0.0)
        elif isinstance(value, list) and "drop" in name:
            setattr(config, name, [0.0] * len(value))


def integers(below: int, *size: int) -> Tensor:
    return torch.randint(1, below, size)


def tokens(batch: int, seq: int) -> dict[str, Tensor]:
    """Token numbers, and labels equal to them."""
    ids = integers(100, batch, seq)
    return {"input_ids": ids, "labels": ids.clone()}


def classes(batch: int, count: int = LABELS) -> dict[str, Tensor]:
    return {"labels": torch.randint(0, count, (batch,))}
