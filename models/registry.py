"""Build a model and example inputs from one line of text. The text is one of

    gpt2                               a published size
    gpt:hidden=64,layers=2             a builder with options
    llama3-8b:layers=4                 a published size with options changed
    hf:FOLDER, or a path with a slash  a Hugging Face config.json, or the folder that holds one
    org/name                           the same from the cache of Hugging Face, if it is there
    path/model.py:function             a user's function that returns (model, example_inputs)

An option that is left out keeps the value of the published size or the builder's default; the longest sequence is at
least the one that is asked for, but of a published size that has learned so many positions. Names are known without
torch, which builders need.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, NamedTuple

from ..errors import ModelError, nearest
from .hub import folder_of, is_hub

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


class Builder(NamedTuple):
    """A config dataclass, the module made from it, and `inputs(config, batch, seq, dtype, device, seed)`."""

    config: type
    module: Callable[..., nn.Module]
    inputs: Callable[..., dict[str, Tensor]]


@cache
def builders() -> dict[str, Builder]:
    """Return the builders by name."""
    from . import gpt, llama, mlp, moe, resnet, unet, vit
    from .inputs import features, images, pictures, tokens

    return {
        "gpt": Builder(gpt.Config, gpt.GPT, tokens),
        "llama": Builder(llama.Config, llama.Llama, tokens),
        "mlp": Builder(mlp.Config, mlp.MLP, features),
        "moe": Builder(moe.Config, moe.MoE, tokens),
        "resnet": Builder(resnet.Config, resnet.ResNet, images),
        "unet": Builder(unet.Config, unet.UNet, pictures),
        "vit": Builder(vit.Config, vit.ViT, images),
    }


# Sources: GPT-2, Radford et al. 2019, table 2, with heads and vocabulary from the released checkpoints' hparams.json
# (github.com/openai/gpt-2); GPT-3, arXiv 2005.14165, table 2.1; Llama 2, arXiv 2307.09288 and the released config.json;
# Llama 3, arXiv 2407.21783, table 3, with the longest sequence of the 3.0 release (8B, 70B) and of 3.1 (405B).
# GPT of 1.7 to 1008 billion parameters: Megatron-LM on GPUs, arXiv 2104.04473, table 1, with a vocabulary of 51,200.
# Mixtral, arXiv 2401.04088, table 1, and the released config.json of 8x22B; ViT, arXiv 2010.11929, table 1; ResNet,
#
# arXiv 1512.03385, table 1.
# The sizes named tiny are for tests and demonstrations on a CPU.
PUBLISHED: dict[str, tuple[str, dict[str, object]]] = {
    "gpt2": ("gpt", dict(hidden=768, layers=12, heads=12, vocab=50257, seq=1024)),
    "gpt2-medium": ("gpt", dict(hidden=1024, layers=24, heads=16, vocab=50257, seq=1024)),
    "gpt2-large": ("gpt", dict(hidden=1280, layers=36, heads=20, vocab=50257, seq=1024)),
    "gpt2-xl": ("gpt", dict(hidden=1600, layers=48, heads=25, vocab=50257, seq=1024)),
    "gpt3-6.7b": ("gpt", dict(hidden=4096, layers=32, heads=32, vocab=50257, seq=2048)),
    "gpt3-175b": ("gpt", dict(hidden=12288, layers=96, heads=96, vocab=50257, seq=2048)),
    "gpt-1.7b": ("gpt", dict(hidden=2304, layers=24, heads=24, vocab=51200, seq=2048)),
    "gpt-3.6b": ("gpt", dict(hidden=3072, layers=30, heads=32, vocab=51200, seq=2048)),
    "gpt-7.5b": ("gpt", dict(hidden=4096, layers=36, heads=32, vocab=51200, seq=2048)),
    "gpt-18.4b": ("gpt", dict(hidden=6144, layers=40, heads=48, vocab=51200, seq=2048)),
    "gpt-39.1b": ("gpt", dict(hidden=8192, layers=48, heads=64, vocab=51200, seq=2048)),
    "gpt-76.1b": ("gpt", dict(hidden=10240, layers=60, heads=80, vocab=51200, seq=2048)),
    "gpt-145.6b": ("gpt", dict(hidden=12288, layers=80, heads=96, vocab=51200, seq=2048)),
    "gpt-310.1b": ("gpt", dict(hidden=16384, layers=96, heads=128, vocab=51200, seq=2048)),
    "gpt-529.6b": ("gpt", dict(hidden=20480, layers=105, heads=128, vocab=51200, seq=2048)),
    "gpt-1008b": ("gpt", dict(hidden=25600, layers=128, heads=160, vocab=51200, seq=2048)),
    "llama2-7b": ("llama", dict(hidden=4096, layers=32, heads=32, ffn=11008, vocab=32000, seq=4096)),
    "llama2-13b": ("llama", dict(hidden=5120, layers=40, heads=40, ffn=13824, vocab=32000, seq=4096)),
    "llama2-70b": ("llama", dict(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=32000, seq=4096)),
    "llama3-8b": (
        "llama",
        dict(hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, seq=8192, rope_theta=500000.0),
    ),
    "llama3-70b": (
        "llama",
        dict(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocab=128256, seq=8192, rope_theta=500000.0),
    ),
    "llama3-405b": (
        "llama",
        dict(hidden=16384, layers=126, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=131072, rope_theta=500000.0),
    ),
    "mixtral-8x7b": (
        "moe",
        dict(
            hidden=4096,
            layers=32,
            heads=32,
            kv_heads=8,
            ffn=14336,
            vocab=32000,
            seq=32768,
            rope_theta=1e6,
            experts=8,
            active=2,
        ),
    ),
    "mixtral-8x22b": (
        "moe",
        dict(
            hidden=6144,
            layers=56,
            heads=48,
            kv_heads=8,
            ffn=16384,
            vocab=32000,
            seq=65536,
            rope_theta=1e6,
            experts=8,
            active=2,
        ),
    ),
    "resnet-18": ("resnet", dict(depth=18)),
    "resnet-50": ("resnet", dict(depth=50)),
    "resnet-101": ("resnet", dict(depth=101)),
    "resnet-152": ("resnet", dict(depth=152)),
    "vit-b": ("vit", dict(hidden=768, layers=12, heads=12, patch=16)),
    "vit-l": ("vit", dict(hidden=1024, layers=24, heads=16, patch=16)),
    "vit-h": ("vit", dict(hidden=1280, layers=32, heads=16, patch=14)),
    "gpt2-tiny": ("gpt", dict(hidden=64, layers=2, heads=4, vocab=256, seq=128)),
    "llama-tiny": ("llama", dict(hidden=64, layers=2, heads=4, kv_heads=2, ffn=192, vocab=256, seq=128)),
    "mlp-tiny": ("mlp", dict(hidden=64, layers=2)),
    "moe-tiny": (
        "moe",
        dict(hidden=64, layers=2, heads=4, kv_heads=2, ffn=96, vocab=256, seq=128, experts=4, active=2),
    ),
    "resnet-tiny": ("resnet", dict(depth=10, width=8, image=32, classes=10)),
    "unet-tiny": ("unet", dict(width=8, levels=3, groups=4, image=16)),
    "vit-tiny": ("vit", dict(hidden=64, layers=2, heads=4, image=32, patch=8, classes=10)),
}


def names() -> list[str]:
    """Return every builder and every published size."""
    return [*sorted({builder for builder, _ in PUBLISHED.values()}), *PUBLISHED]


def check(text: str) -> None:
    """Raise ModelError, with the nearest names, if `text` names a model that is not known; a path is not looked at."""
    if is_hub(text):
        folder_of(text)
    elif ".py:" not in text:
        _name_and_options(text)


def _name_and_options(text: str) -> tuple[str, str]:
    name, _, options = text.partition(":")
    name = name.strip().lower()
    if name not in names():
        raise ModelError(
            f"there is no model named {name!r}",
            fix=f"use {nearest(name, names())}, hf:FOLDER with a config.json, org/name, or file.py:function",
        )
    return name, options


def build(
    text: str,
    *,
    batch: int,
    seq: int,
    device: str | torch.device = "meta",
    dtype: torch.dtype | None = None,
    seed: int = 0,
) -> tuple[nn.Module, dict[str, Tensor]]:
    """Build the model that `text` names and keyword inputs for one call, with labels or a target where the model takes
    them.

    batch and seq are global sizes. On the meta device nothing is allocated; elsewhere weights and inputs follow from
    `seed` alone, so every process builds the same ones. `dtype` is that of weights and float inputs, torch's default if
    None. Raises ModelError, with the nearest names, on an unknown name or option or a value that does not fit."""
    for label, value in (("batch", batch), ("seq", seq)):
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{label}={value!r} is not a positive integer", fix=f"set {label} to 1 or more")
    import torch

    from .inputs import fresh_weights
    from .sizes import bounded

    device, dtype = torch.device(device), dtype or torch.get_default_dtype()
    if is_hub(text):
        from .huggingface import build_from_config

        return build_from_config(folder_of(text), batch, seq, dtype, device, seed)
    if ".py:" in text:
        from .user_file import build_from_file

        return build_from_file(text, seed, batch=batch, seq=seq, device=device, dtype=dtype)
    name, config = resolve(text, seq)
    builder = builders()[name]
    with bounded():
        inputs = builder.inputs(config, batch, seq, dtype, device, seed)
        with fresh_weights(dtype, device, seed):
            return builder.module(config), inputs


def resolve(text: str, seq: int = 1) -> tuple[str, object]:
    """Resolve a text such as `"llama3-8b:layers=4"` to ("llama", its Config), for sequences of length `seq` if they are
    the text's to choose: a published size that learns its positions has so many. Raises ModelError as `build` does."""
    name, given = _name_and_options(text)
    builder, published = PUBLISHED.get(name, (name, {}))
    config, asked = builders()[builder].config, _options(builder, given)
    options = {field.name: field.default for field in dataclasses.fields(config)} | published | asked
    learns_positions = "rope_theta" not in options
    if "seq" in options and "seq" not in asked and not (published and learns_positions):
        options["seq"] = max(options["seq"], seq)
    return builder, config(**options)


def _options(builder: str, text: str) -> dict[str, object]:
    """Read `"hidden=64,tied=false"` as values of the types that the builder's config declares."""
    kinds = {field.name: str(field.type) for field in dataclasses.fields(builders()[builder].config)}
    options: dict[str, object] = {}
    for word in filter(None, (part.strip() for part in text.split(","))):
        name, equals, value = (part.strip() for part in word.partition("="))
        if not equals:
            raise ModelError(f"cannot read {word!r} as an option", fix="write options as name=value, such as layers=2")
        if name not in kinds:
            raise ModelError(f"{builder} has no option {name!r}", fix=f"use {nearest(name, kinds)}")
        if name in options:
            raise ModelError(f"option {name!r} is given twice", fix=f"give {name} once")
        options[name] = _value(name, value, kinds[name])
    return options


def _value(name: str, text: str, kind: str) -> object:
    try:
        if kind == "bool":
            return {"true": True, "false": False}[text.lower()]
        return float(text) if kind == "float" else int(text)
    except (KeyError, ValueError):
        wanted = {"bool": "true or false", "float": "a number"}.get(kind, "a whole number")
        raise ModelError(f"{name}={text} is not {wanted}", fix=f"set {name} to {wanted}") from None
