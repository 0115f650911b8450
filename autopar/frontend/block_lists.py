"""Lists of modules of which many are alike, and how they are divided into equal blocks.

Modules are alike if they have the same parameters, buffers and classes inside, or, more strictly, the same settings as
well. Of all runs of modules that are alike at a distance, the period, the one is taken that leaves out most of them
when but five blocks are traced.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import nn

from .block_names import BlockNames
from .fake_parameters import Form

TRACED = 5  # blocks 0, 1, 2 and the last two
DROPPED_FROM, KEPT_AT_END = 3, 2
FEWEST = 8  # blocks; of fewer, leaving some out saves too little
GATHERS = "gathers"  # key of an exported module's meta, see `Captured.gathers`

Modules = nn.ModuleList | nn.Sequential
Alike = Callable[[int, int], bool]  # of two modules of a list, by their numbers


@dataclass(frozen=True)
class RepeatedBlocks:
    """A list of modules that make up equal blocks."""

    modules: Modules
    names: BlockNames

    @contextmanager
    def shortened(self) -> Iterator[None]:
        """Inside, the list has the modules of blocks 0, 1, 2 and the last two."""
        whole = dict(self.modules._modules)
        traced = [
            block for i, block in enumerate(whole.values()) if is_kept(self.names.number_of_module(i), self.names)
        ]
        try:
            self.modules._modules.clear()
            self.modules._modules.update({str(i): block for i, block in enumerate(traced)})
            yield
        finally:
            self.modules._modules.clear()
            self.modules._modules.update(whole)


def is_kept(number: int | None, names: BlockNames) -> bool:
    """Return whether what lies in a block, or in none, is in the shortened model."""
    return number is None or number < DROPPED_FROM or number >= names.count - KEPT_AT_END


def name_if_kept(name: str, names: BlockNames) -> str | None:
    """Return what a name is in the shortened model, None if it is not there."""
    number = names.number(name)
    if number is None or number < DROPPED_FROM:
        return name
    return names.renamed(name, number - names.count + TRACED) if is_kept(number, names) else None


def repeated_blocks_of(model: nn.Module) -> RepeatedBlocks | None:
    """Return the model's list of blocks whose settings are alike, None unless there is just one, all blocks but the
    first continue the pattern to the end, and there are neither forward hooks nor containers of other kinds."""
    lists = [(n, m) for n, m in _lists(model) if type(m) in (nn.ModuleList, nn.Sequential)]
    others = [m for m in model.modules() if isinstance(m, (nn.ParameterList, nn.ParameterDict, nn.ModuleDict))]
    if len(lists) != 1 or others or any(m._forward_hooks or m._forward_pre_hooks for m in model.modules()):
        return None
    name, modules = lists[0]
    tensors = [id(t) for module in modules for t in (*module.parameters(), *module.buffers())]
    if len(set(tensors)) != len(tensors):
        return None
    names = divided(name, len(modules), _alike_in_settings(modules), to_the_end=True)
    return RepeatedBlocks(modules, names) if names else None


def candidates(model: nn.Module, forms: Mapping[str, Form]) -> Iterator[RepeatedBlocks]:
    """Yield the lists of a model that may consist of equal blocks, `forms` having those of its parameters and buffers:
    with modules that are alike in what they hold, and in their settings as well."""
    for name, modules in _lists(model):
        inside = {n[len(name) + 1 :]: form for n, form in forms.items() if n.startswith(f"{name}.")}
        looser = divided(name, len(modules), _alike_in_tables(modules, inside))
        if looser is not None:
            yield RepeatedBlocks(modules, looser)
            stricter = divided(name, len(modules), _alike_in_settings(modules))
            if stricter not in (looser, None):
                yield RepeatedBlocks(modules, stricter)


def divided(list_name: str, length: int, alike: Alike, to_the_end: bool = False) -> BlockNames | None:
    """Return the division of a list of so many modules of which most are left out when five blocks are traced, None if
    there is none with FEWEST blocks. `to_the_end`: the last block continues the pattern, as far as it goes."""
    best, most, period = None, 0, 0
    while length - 2 - (TRACED - KEPT_AT_END) * (period := period + 1) > most:  # else no division leaves out more
        for start, stop in _runs(length, period, alike):
            first = max(start, 1)
            count = (min(stop, length - 1) - first) // period + 2
            left_out = (count - TRACED) * period
            if count >= FEWEST and left_out > most and (stop == length or not to_the_end):
                best, most = BlockNames(list_name, count, first, period), left_out
    return best


def _runs(length: int, period: int, alike: Alike) -> Iterator[tuple[int, int]]:
    """Yield the first and the last but one of modules that follow each other, each like the one a period before."""
    start = 0
    for i in range(length):
        if i - start >= period and not alike(start + (i - start) % period, i):
            yield start, i
            start = i - period + 1
    yield start, length


def _lists(model: nn.Module) -> list[tuple[str, Modules]]:
    """Return the outermost lists of many modules, by name."""
    found = [(n, m) for n, m in model.named_modules() if isinstance(m, (nn.ModuleList, nn.Sequential))]
    long = [(n, m) for n, m in found if n and len(m) >= FEWEST and list(m._modules) == [str(i) for i in range(len(m))]]
    return [(n, m) for n, m in long if not any(n.startswith(f"{outer}.") for outer, _ in long)]


def _alike_in_tables(modules: Modules, forms: Mapping[str, Form]) -> Alike:
    """Return whether two modules of a list hold the same parameters and buffers, whose `forms` are those by their names
    in the list, in modules of the same classes."""
    held: list[dict[str, Form]] = [{} for _ in range(len(modules))]
    for name, form in forms.items():
        number, _, inner = name.partition(".")
        if int(number) < len(held):  # the list may be shortened
            held[int(number)][inner] = form
    classes = [_classes(module) for module in modules]
    return lambda i, j: held[i] == held[j] and classes[i] == classes[j]


def _classes(block: nn.Module) -> list[tuple]:
    return [
        (path, type(m), tuple(m._parameters), tuple(m._buffers), frozenset(m._non_persistent_buffers_set))
        for path, m in block.named_modules(remove_duplicate=False)
    ]


def _alike_in_settings(modules: Modules) -> Alike:
    blocks = list(modules)
    return lambda i, j: _alike(blocks[i], blocks[j], j - i)


def _alike(first: nn.Module, other: nn.Module, distance: int) -> bool:
    """Return whether two modules have the same structure and settings; an integer may count the modules."""
    pairs = list(itertools.zip_longest(first.named_modules(), other.named_modules()))
    for left, right in pairs:
        if left is None or right is None or left[0] != right[0] or type(left[1]) is not type(right[1]):
            return False
        a, b = left[1], right[1]
        for table in ("_parameters", "_buffers"):
            if _forms(getattr(a, table)) != _forms(getattr(b, table)):
                return False
        if {k for k in vars(a)} != {k for k in vars(b)}:
            return False
        for key, value in vars(a).items():
            if not key.startswith("_") and not _equal(value, vars(b)[key], distance):
                return False
    return True


def _forms(tensors: dict[str, torch.Tensor | None]) -> dict:
    return {name: t if t is None else (t.shape, t.dtype, t.requires_grad) for name, t in tensors.items()}


def _equal(a: object, b: object, distance: int) -> bool:
    if a is b:
        return True
    if type(a) is int and type(b) is int:
        return b - a in (0, distance)
    if isinstance(a, (bool, float, str, tuple, list, dict, torch.dtype, torch.Size, type(None))):
        return type(a) is type(b) and a == b
    return type(a) is type(b) and callable(a)  # activations and the like
