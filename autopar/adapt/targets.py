"""Which modules of a model an adaptation is for, by PEFT's rules: a name, the end of one, or a regular expression for all of it.

The rules are those of `LoraConfig` (https://huggingface.co/docs/peft/package_reference/lora): `["q_proj", "v_proj"]` matches every
module whose dotted name is one of these or ends in one, a text is a regular expression that the whole name must match.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from torch import nn

from ..errors import AdaptError, nearest

Targets = str | Sequence[str]
ALL_LINEAR = "all-linear"


def is_conv1d(module: nn.Module) -> bool:
    """transformers' linear layer with an (i, o) weight, as in GPT-2."""
    return type(module).__name__ == "Conv1D"


def layer_kind(module: nn.Module) -> str | None:
    """"linear" or "embedding" of a layer that has one such weight, None of others."""
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "linear" if isinstance(module, nn.Linear) or is_conv1d(module) else None


def all_linear(model: nn.Module) -> list[str]:
    """Every linear layer but the output embedding of a language model or the head of a classifier."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    names = [n for n, m in modules.items() if n and (isinstance(m, nn.Linear) or is_conv1d(m)) and m is not head]
    if head is None:
        heads = tuple(n for n in names if n.partition(".")[0] in ("classifier", "score"))
        names = [n for n in names if n not in heads]
    return names


def matches(targets: Targets, name: str) -> bool:
    """Whether a qualified name is among the targets. Raises AdaptError for a text that is no regular expression."""
    if isinstance(targets, str):
        return re.fullmatch(_pattern(targets), name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def _pattern(text: str) -> re.Pattern:
    try:
        return re.compile(text)
    except re.error as error:
        raise AdaptError(
            f"{text!r} is not a regular expression: {error}", fix=r'give the ends of names as a list, or such as r".*\.q_proj"'
        ) from error


def number_in_list(name: str, patterns: Targets | None) -> int | None:
    """The number of the block that a module lies in: the first one in its name, or the one behind one of `patterns`."""
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", f".{name}")
        return int(found.group(1)) if found else None
    for pattern in (patterns,) if isinstance(patterns, str) else patterns:
        if found := re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", name):
            return int(found.group(1))
    return None


def check_found(what: str, targets: Targets, names: Iterable[str]) -> None:
    """Raises AdaptError for targets that are none of `names`, with the ones that look like them."""
    names = list(names)
    wanted = [targets] if isinstance(targets, str) else list(targets)
    missing = [t for t in wanted if not any(matches(targets if isinstance(targets, str) else [t], name) for name in names)]
    if missing:
        ends = {name.rpartition(".")[2] for name in names} | {name for name in names if name.count(".") < 2}
        near = "; ".join(f"{t}: {nearest(t.rpartition('.')[2].strip('*'), ends)}" for t in missing[:4])
        raise AdaptError(f"no {what} of the model is called {', '.join(map(repr, missing))}", fix=f"use one of these: {near}")
