"""Read what Hugging Face's transformers knows of its models and the files they come in: other names of tensors, tensors
stored in other forms, names to pass over, buffers to compute. A model of any other kind is stored under its own
names."""

from __future__ import annotations

import copy
import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from .tensor_file import Form

# tensors of old files that no model holds any more (transformers computes them)
PASSED_OVER = (r"rotary_emb\.inv_freq$", r"(^|\.)position_ids$")


@dataclass(eq=False)
class Group:
    """Tensors of a file that together make tensors of a model, by one of transformers' converters. `forms`: the
    results."""

    converter: Any  # of transformers
    first_name: str
    model: nn.Module
    sources: list[tuple[str, str]] = field(default_factory=list)  # (pattern, name in the file)
    forms: dict[str, Form] = field(default_factory=dict)

    def convert(self, read: Callable[[str], Tensor]) -> dict[str, Tensor]:
        """Return the results by their names in the model, of what `read` gives for names in the file."""
        converter = copy.deepcopy(self.converter)
        for pattern, name in self.sources:
            converter.add_tensor(self.first_name, name, pattern, read(name))
        results = converter.convert(self.first_name, model=self.model, config=self.model.config)
        return {name: value[0] if isinstance(value, list) else value for name, value in results.items()}


@dataclass
class Names:
    """The names that a model's tensors have in a file. `alone`: name in the model -> name in the file."""

    alone: dict[str, str] = field(default_factory=dict)
    groups: list[Group] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)


def names_in(model: nn.Module, stored: Mapping[str, Form], wanted: Mapping[str, tuple[int, ...]]) -> Names:
    """Find which tensors of a file are which of a model. A name that is wanted as it is stands for itself; else
    transformers' renaming rules for this kind of model apply, and the prefix by which a model with a head differs from
    one without."""
    renamings, converters = _rules(model)
    prefix = getattr(model, "base_model_prefix", "")
    ignored = (*PASSED_OVER, *(getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()))
    result = Names()
    groups: dict[object, Group] = {}
    for name in sorted(stored, key=_by_number):
        target, pattern, converter = _with_prefix(name, prefix, wanted), None, None
        if target not in wanted:
            for renaming in renamings:
                target, _ = renaming.rename_source_key(target)
            for converter in converters:
                target, pattern = converter.rename_source_key(target)
                if pattern is not None:
                    break
            target = _with_prefix(target, prefix, wanted)
        if pattern is not None:
            group = groups.setdefault(target, Group(converter, target, model))
            group.sources.append((pattern, name))
        elif target in wanted:
            result.alone.setdefault(target, name)
        elif not any(re.search(p, name) for p in ignored):
            result.unexpected.append(name)
    for group in groups.values():
        _add_group(result, group, stored, wanted)
    return result


def _add_group(result: Names, group: Group, stored: Mapping[str, Form], wanted: Mapping) -> None:
    """Add a group with the forms of its results, which a conversion on the meta device finds; if it fails, or gives
    what is not wanted, its tensors are unexpected."""

    def read(name: str) -> Tensor:
        return torch.empty(stored[name].shape, dtype=stored[name].dtype, device="meta")

    try:
        made = group.convert(read)
    except Exception:  # of any kind: tensors of other numbers or shapes than the converter was written for
        made = {}
    if made and all(name in wanted for name in made):
        group.forms = {name: Form(tuple(t.shape), t.dtype) for name, t in made.items()}
        result.groups.append(group)
    else:
        result.unexpected += [name for _, name in group.sources]


def _rules(model: nn.Module) -> tuple[list, list]:
    """Return transformers' renamings and converters for a model; none before its version 5, and none for models of
    others."""
    if not _is_pretrained(model):
        return [], []
    try:
        from transformers.conversion_mapping import get_model_conversion_mapping
        from transformers.core_model_loading import WeightConverter
    except ImportError:
        return [], []
    rules = get_model_conversion_mapping(model)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    return [rule for rule in rules if not isinstance(rule, WeightConverter)], converters


def _is_pretrained(model: nn.Module) -> bool:
    known = sys.modules.get("transformers.modeling_utils")  # whoever made such a model has imported it, for seconds
    return known is not None and isinstance(model, known.PreTrainedModel)


def _with_prefix(name: str, prefix: str, wanted: Mapping) -> str:
    """Add or remove the prefix if that makes a wanted name: a file of a bare model has names without the prefix that it
    has inside a model with a head, and the other way round."""
    if not prefix or name in wanted:
        return name
    for other in (f"{prefix}.{name}", name.removeprefix(f"{prefix}.")):
        if other in wanted:
            return other
    return name


def _by_number(name: str) -> list:
    """Return a key that sorts layer 10 after layer 9."""
    return [(int(word), "") if word.isdigit() else (-1, word) for word in re.split(r"(\d+)", name)]


# buffers
# -----------------------------------------------------------------------------------------------------------------


def fill_unsaved_buffers(model: nn.Module) -> list[str]:
    """Give meta buffers that no state dict holds the values that transformers' own initialization computes for them.
    Returns the names of those that it does not write."""
    left = []
    for path, module in model.named_modules():
        names = [
            n
            for n in module._non_persistent_buffers_set
            if module._buffers.get(n) is not None and module._buffers[n].is_meta
        ]
        if not names:
            continue
        owner = _initializer_of(model, path)
        values = [_initialized(module, names, owner, fill) for fill in (0, 1)]
        for name in sorted(names):
            if owner is not None and torch.equal(values[0][name], values[1][name]):
                module._buffers[name] = values[0][name]
            else:
                left.append(f"{path}.{name}" if path else name)
    return left


def _initializer_of(model: nn.Module, path: str) -> nn.Module | None:
    """Return the innermost transformers model that the module at `path` is in."""
    words = path.split(".") if path else []
    for length in range(len(words), -1, -1):
        module = model.get_submodule(".".join(words[:length]))
        if _is_pretrained(module):
            return module
    return None


@torch.no_grad()
def _initialized(module: nn.Module, names: list[str], owner: nn.Module | None, fill: int) -> dict[str, Tensor]:
    """Return the buffers `names`, full of one number and then initialized: what depends on the number was not
    written."""
    before = dict(module._buffers)
    try:
        for name in names:
            module._buffers[name] = torch.full_like(before[name], fill, device="cpu")
        if owner is not None:
            owner._init_weights(module)  # leaves no trace on parameters that are on the meta device
        return {name: module._buffers[name] for name in names}
    finally:
        module._buffers.update(before)
