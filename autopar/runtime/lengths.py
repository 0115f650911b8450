"""Ranks with lengths of their own: with inputs="local" each pads its samples to its own longest, and a program has one
length for all.

Before a call the ranks say how long their tensors are, and each pads its own to the longest of all. So the call is that
of the whole batch padded to its longest sample, as one process would make it, and each rank has its outputs in its own
length. It takes one small collective on the host a call. Without `pad`, lengths that differ are an error on all ranks.
"""

from __future__ import annotations

import inspect
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._torch import tree_flatten, tree_unflatten
from ..errors import InputError
from ..frontend.call_signature import describe_call, leaf_names
from ..passes.pipeline.lengths import Found, Source, places_of
from ..processes import agree

DIMS = 3  # of a tensor, behind its first, that ranks may have in sizes of their own


Padding = Mapping[str, float | tuple[float, str]]  # by the name of an input, the value, or (value, "left")


@dataclass(frozen=True)
class Length:
    """The length of a dim on all ranks, and this rank's part of it: `own` places from `start` on."""

    whole: int
    own: int
    start: int
    side: str

    @classmethod
    def of(cls, own: int, whole: int, side: str) -> Length:
        """Return the length where this rank has `own` of `whole` places, with padding on a side."""
        return cls(whole, own, whole - own if side == "left" else 0, side)

    def without(self, before: int, behind: int) -> Length:
        """Return the length without so many places at its begin and end, whoever has them."""
        missing = before + behind
        return Length(self.whole - missing, max(self.own - missing, 0), self.start, self.side)

    @property
    def around(self) -> tuple[int, int]:
        """Return how many places are added before and behind this rank's."""
        return self.start, self.whole - self.own - self.start


@dataclass(frozen=True)
class OwnLengths:
    """The lengths of a call's inputs in which ranks differ, by name and dim."""

    lengths: Mapping[Source, Length]

    @property
    def inputs(self) -> frozenset[str]:
        """Return the names of the inputs."""
        return frozenset(name for name, _ in self.lengths)

    def shortened(self, tensor: Tensor, found: Found, shape: torch.Size, name: str) -> Tensor:
        """Return this rank's samples of an output in this rank's own lengths. `shape`: of the output, global. Raises
        InputError where the rules of the ops do not say in which places they are."""
        places, lost = places_of(found, self.lengths)
        if any(self.lengths[source].side == "right" for source in found.from_end & {*self.lengths}):
            raise InputError(
                f"output {name} is computed from places counted from the end, which are padding where a rank has fewer "
                "than the others",
                fix='pad on the left, pad={"input_ids": (0, "left"), ...}, or take them from the whole output',
            )
        for (dim, parts), pieces in places:
            lengths = {self.lengths[p.source].without(p.before, p.behind) for p in pieces}
            length = lengths.pop()
            inner, rest = divmod(shape[dim], parts * length.whole)
            if lengths or rest or [d for (d, _), _ in places].count(dim) > 1:
                lost.append(dim)
                continue
            split = tensor.unflatten(dim, (-1, length.whole, inner))
            tensor = split.narrow(dim + 1, length.start, length.own).flatten(dim, dim + 2)
        if lost:
            raise InputError(
                f"ranks have lengths of their own, and the model does not say which places of output {name} are those "
                f"of this rank",
                shape=tuple(shape),
                fix="return it as long as the inputs and shorten it outside of the model, or pad "
                "all batches to the same length",
            )
        return tensor


class Lengths:
    """The padding for ranks with lengths of their own. `pad`: by the name of an input, the value that it is padded
    with, or (value, "left"). `takes`: the functions that take the inputs; `parts`: of the batch, ranks with the same
    one pass the same."""

    def __init__(self, pad: Padding | None, takes: Sequence[Callable | None], parts: int):
        self.parts, self.pad = parts, dict(pad or {})
        parameters = [p for function in takes if function for p in inspect.signature(function).parameters.values()]
        self.names = {f"args[{i}]": p.name for i, p in enumerate(parameters)}
        self.is_open = any(p.kind in (p.VAR_KEYWORD, p.VAR_POSITIONAL) for p in parameters)

    def check(self) -> None:
        """Raise InputError for a name that the functions do not take."""
        unknown = [name for name in self.pad if name not in (*self.names, *self.names.values())]
        if unknown and not self.is_open:
            raise InputError(
                f"pad has a value for {unknown[0]}, which the forward does not take",
                fix=f"use names among {', '.join(self.names.values())}",
            )

    def agreed(self, args: tuple, kwargs: dict, may_differ: bool) -> tuple[tuple, dict, OwnLengths | None]:
        """Return a call with tensors as long as on the rank with the longest, and where ranks differ, this rank's own
        lengths. `may_differ`: whether to compare shapes where nothing is padded. Raises InputError on all ranks if they
        differ otherwise. All ranks call this together."""
        if self.parts == 1 or not (self.pad or may_differ):
            return args, kwargs, None
        leaves, spec = tree_flatten((args, kwargs))
        named = list(zip(leaf_names(args, kwargs), leaves))
        at = {key: i for i, (n, leaf) in enumerate(named) if self._is_padded(n, leaf) and (key := self._key(n))}
        slots = [(key, dim) for key in self.pad for dim in range(1, DIMS + 1)]
        sizes = [leaves[at[key]].shape[d] if key in at and d < leaves[at[key]].dim() else 0 for key, d in slots]
        forms = [(n, x.dim(), x.shape[:1] if self._is_padded(n, x) else x.shape) for n, x in named if _is_plain(x)]
        least, most = agree.extremes([zlib.crc32(repr(forms).encode()), *sizes])
        if least[0] != most[0]:
            agree.check_calls(describe_call(args, kwargs), agree.SAME_CALL)
        whole = dict(zip(slots, most[1:]))
        differ = {slot for slot, a, b in zip(slots, least[1:], most[1:]) if a != b}
        own: dict[Source, Length] = {}
        for key, i in at.items():
            value, side = fill if isinstance(fill := self.pad[key], tuple) else (fill, "right")
            lengths = [Length.of(size, whole[key, dim], side) for dim, size in enumerate(leaves[i].shape) if dim]
            leaves[i] = F.pad(leaves[i], [n for length in reversed(lengths) for n in length.around], value=value)
            own |= {(named[i][0], d): length for d, length in enumerate(lengths, 1) if (key, d) in differ}
        args, kwargs = tree_unflatten(leaves, spec)
        return args, kwargs, OwnLengths(own) if own else None

    def _key(self, name: str) -> str | None:
        """Return the name by which `pad` has a leaf of a call, None if it has none."""
        return next((key for key in (name, self.names.get(name)) if key in self.pad), None)

    def _is_padded(self, name: str, leaf: object) -> bool:
        return self._key(name) is not None and _is_plain(leaf) and 1 < leaf.dim() <= DIMS + 1


def _is_plain(leaf: object) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor) and not isinstance(leaf, DTensor)
