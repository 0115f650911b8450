"""Check which adaptations go together, and order their passes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
from torch import nn

from ..errors import AdaptError, InputError
from .attach import Attachment
from .fake_quant import FakeQuant
from .fp8 import FP8
from .lora import LoRA
from .qlora import QLoRA


class Adaptation(Protocol):
    """A value that `adapt=` takes. `name` is that of the pass that changes the graph."""

    name: str

    def attach(self, to: Attachment) -> None:
        """Add to a model what the pass needs, and say what trains. Raises AdaptError."""


KINDS = (LoRA, QLoRA, FakeQuant, FP8)  # in the order of their passes: what LoRA adds beside a layer is not quantized
# Names of two that exclude each other, and what to do instead.
EXCLUDED = {
    ("lora", "qlora"): "QLoRA has LoRA's arguments too: give it alone",
    ("fake_quant", "qlora"): "train with fake-quantization, or adapters on a base that is quantized already",
    ("fp8", "fake_quant"): "FP8 to train fast, FakeQuant to train for integers",
    ("fp8", "qlora"): "FP8 multiplies weights that are stored whole: LoRA instead of QLoRA",
}


def checked(adapt: object) -> tuple[Adaptation, ...]:
    """Return the value of `adapt=` as a tuple, with QLoRA as the two adaptations that it is made of. Raises AdaptError
    for anything else, and for adaptations that exclude each other."""
    given = (adapt,) if isinstance(adapt, KINDS) else adapt
    if not isinstance(given, Sequence) or isinstance(given, str) or not all(isinstance(a, KINDS) for a in given):
        names = ", ".join(kind.__name__ for kind in KINDS)
        raise AdaptError(
            f"adapt is {adapt!r:.80}", fix=f"a list of autopar's {names}, such as [autopar.LoRA(target_modules=...)]"
        )
    names = [a.name for a in given]
    if twice := next((n for n in names if names.count(n) > 1), None):
        raise AdaptError(
            f"adapt has {twice} twice", fix="one of a kind; rank_pattern and alpha_pattern differ by layer"
        )
    for pair, fix in EXCLUDED.items():
        if names.count(pair[0]) and names.count(pair[1]):
            raise AdaptError(f"adapt has both {pair[0]} and {pair[1]}", fix=fix)
    lora, fake_quant = (next((a for a in given if a.name == name), None) for name in ("lora", "fake_quant"))
    if lora and fake_quant:
        _check_both(lora, fake_quant)
    ordered = sorted(given, key=lambda a: KINDS.index(type(a)))
    return tuple(part for a in ordered for part in (a.parts if isinstance(a, QLoRA) else (a,)))


def _check_both(lora: LoRA, fake_quant: FakeQuant) -> None:
    if lora.use_dora or lora.target_parameters:
        raise AdaptError(
            "DoRA and adapters of target_parameters change the base's weight itself, and FakeQuant quantizes it as it "
            "is",
            fix="LoRA of target_modules without use_dora",
        )
    if fake_quant.range_learning:
        raise AdaptError("LoRA freezes the base, and range_learning trains its scales", fix="range_learning=False")


def attach(
    model: nn.Module,
    adapt: Sequence[Adaptation],
    device: str | torch.device = "meta",
    seed: int = 0,
    reads_files: bool = False,
) -> Attachment:
    """Attach all adaptations, or none if one cannot be. The other arguments are those of Attachment."""
    to = Attachment(model, device, seed, reads_files)
    if adapt and not isinstance(model, nn.Module):
        raise InputError(
            f"the model is a {type(model).__name__}, not a torch.nn.Module", fix="wrap it in a torch.nn.Module"
        )
    try:
        for adaptation in adapt:
            adaptation.attach(to)
    except BaseException:
        to.undo()
        raise
    return to


@contextmanager
def attached(model: nn.Module, adapt: Sequence[Adaptation]) -> Iterator[Attachment]:
    """Inside, the model is adapted, without values; afterwards it is as it was."""
    to = attach(model, adapt)
    try:
        yield to
    finally:
        to.undo()
