"""Find the modules of a model that an adaptation is for, by PEFT's rules: a name, the end of one, or a regular
expression for all of it.

The rules are those of `LoraConfig` (https://huggingface.co/docs/peft/package_reference/lora): `["q_proj", "v_proj"]`
matches every module whose dotted name is one of these or ends in one, a text is a regular expression that the whole
name must match.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from torch import nn

from ..errors import AdaptError, nearest

Targets = str | Sequence[str]
ALL_LINEAR = "all-linear"


def listed(value: Sequence[str] | str | None) -> tuple[str, ...]:
    """Return names as a tuple; one alone, or none, may be given as it is."""
    return () if value is None else (value,) if isinstance(value, str) else tuple(value)


def check_targets(kind: str, *targets: Targets | None) -> None:
    """Raise AdaptError if an adaptation of this kind names no layer at all."""
    if not any(targets):
        fix = 'name layers, such as ["q_proj", "v_proj"], or "all-linear"'
        raise AdaptError(f"{kind} has no target_modules", fix=fix)


def is_number(value: object) -> bool:
    """Return whether a value is a finite int or float; a bool is none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def is_conv1d(module: nn.Module) -> bool:
    """Return whether a module is transformers' linear layer with an (i, o) weight, as in GPT-2."""
    return type(module).__name__ == "Conv1D"


def layer_kind(module: nn.Module) -> str | None:
    """Return "linear" or "embedding" for a layer that has one such weight, None for others."""
    if not isinstance(getattr(module, "weight", None), nn.Parameter):
        return None
    if isinstance(module, nn.Embedding):
        return "embedding"
    return "linear" if isinstance(module, nn.Linear) or is_conv1d(module) else None


def checked_kind(path: str, module: nn.Module, done: str, fix: str) -> str:
    """Return the `layer_kind` of a module. Raises AdaptError if it has none; `done` says what is done to layers
    that have one."""
    if (kind := layer_kind(module)) is None:
        raise AdaptError(
            f"{path} is a {type(module).__name__}, and linear layers, Conv1D and embeddings are {done}", fix=fix
        )
    return kind


def has_plain_forward(module: nn.Module) -> bool:
    """Return whether a layer computes the product with its weight and nothing else (or scales an embedding)."""
    return type(module).forward in (nn.Linear.forward, nn.Embedding.forward) or is_conv1d(module)


def all_linear(model: nn.Module) -> list[str]:
    """Return the names of all linear layers but the output embedding of a language model, the head of a classifier, and
    what nn.MultiheadAttention keeps in one without calling it."""
    head = getattr(model, "get_output_embeddings", lambda: None)()
    modules = dict(model.named_modules())
    inner = {id(m.out_proj) for m in modules.values() if isinstance(m, nn.MultiheadAttention)}
    linear = {n: m for n, m in modules.items() if n and (isinstance(m, nn.Linear) or is_conv1d(m))}
    names = [n for n, m in linear.items() if m is not head and id(m) not in inner]
    if head is None:
        heads = tuple(n for n in names if n.partition(".")[0] in ("classifier", "score"))
        names = [n for n in names if n not in heads]
    return names


def chosen(model: nn.Module, targets: Targets, excluded: Targets = ()) -> list[str]:
    """Return the names of the modules that targets are for, in the order of the model. Raises AdaptError for a target,
    or an exception, that is the name of none."""
    names = [name for name, _ in model.named_modules() if name]
    check_found("module", excluded, names)
    if targets != ALL_LINEAR:
        check_found("module", targets, names)
    found = all_linear(model) if targets == ALL_LINEAR else [name for name in names if matches(targets, name)]
    return [name for name in found if not (excluded and matches(excluded, name))]


def chosen_parameters(model: nn.Module, targets: Sequence[str]) -> list[tuple[str, str]]:
    """Return (module, name in it) of the parameters that targets are the ends of, in the order of the model. Raises
    AdaptError for a target that is the name of none."""
    modules = [(path, module) for path, module in model.named_modules() if path]
    held = [(path, leaf) for path, m in modules for leaf, p in m._parameters.items() if p is not None]
    check_found("parameter", list(targets), [".".join(pair) for pair in held])
    return [pair for pair in held if matches(list(targets), ".".join(pair))]


def matches(targets: Targets, name: str) -> bool:
    """Return whether a qualified name is among the targets. Raises AdaptError for a text that is no regular
    expression."""
    if isinstance(targets, str):
        return re.fullmatch(pattern(targets), name) is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


def pattern(text: str) -> re.Pattern:
    """Compile a regular expression. Raises AdaptError for a text that is none."""
    try:
        return re.compile(text)
    except re.error as error:
        raise AdaptError(
            f"{text!r} is not a regular expression: {error}",
            fix=r'give the ends of names as a list, or such as r".*\.q_proj"',
        ) from error


def number_in_list(name: str, patterns: Targets | None) -> int | None:
    """Return the number of the block that a module lies in: the first one in its name, or the one behind one of
    `patterns`; None if there is none."""
    if not patterns:
        found = re.match(r".*?\.[^.]*\.(\d+)\.", f".{name}")
        return int(found.group(1)) if found else None
    for words in (patterns,) if isinstance(patterns, str) else patterns:
        if found := re.match(rf"(?:^|.*?\.){words}\.(\d+)\.", name):
            return int(found.group(1))
    return None


def check_found(what: str, targets: Targets, names: Iterable[str]) -> None:
    """Raise AdaptError for targets that are none of `names`, with the ones that look like them."""
    names = list(names)
    wanted = [targets] if isinstance(targets, str) and targets else list(targets)
    missing = [
        t for t in wanted if not any(matches(targets if isinstance(targets, str) else [t], name) for name in names)
    ]
    if missing:
        ends = {name.rpartition(".")[2] for name in names} | {name for name in names if name.count(".") < 2}
        near = "; ".join(f"{t}: {nearest(t.rpartition('.')[2].strip('*'), ends)}" for t in missing[:4])
        raise AdaptError(
            f"no {what} of the model is called {', '.join(map(repr, missing))}", fix=f"use one of these: {near}"
        )
