"""Tiny models of many architectures of transformers: `FAMILIES[name](batch, seq)` is (model, keyword arguments of a
call).

They are built from configurations alone, without a download, and have no dropout or other randomness in the forward.
"""

from __future__ import annotations

from . import audio, decoders, encoders, mixed, vision
from .build import Family

FAMILIES: dict[str, Family] = {
    family.name: family for kind in (decoders, encoders, vision, audio, mixed) for family in kind.FAMILIES
}

__all__ = ["FAMILIES", "Family"]
