"""Ranks stay equal: every so many calls that train they compare what must be the same on them.

The parameters that train are summed up bit by bit (same_values.checksum), and ranks that hold the same part of one must
have the same sum. On GPUs ranks are compared along the axes of the batch, over which gradients are reduced: what other
axes compute several times may differ there by the order of a sum. Parameters in shards cannot be compared, but the
settings of the optimizers that step them are. Batches are compared as in the first call, and a parameter with NaN or
infinity is an error. Where all is well a few numbers travel; who differs is asked only then.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import defaultdict
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..errors import DesyncError, NotFiniteError
from ..processes import agree, watch
from ..processes.causes import named
from ..storage.model_folder import local
from .call import Call
from .inputs import data_axes
from .optimizers import settings_of
from .same_values import checksum

EVERY = 200  # calls
SETTINGS = "settings of optimizers"  # what is compared beside parts
Part = tuple  # which part of its parameters a rank holds: its pipeline rank, and (axis, coordinate) pairs


class EqualRanks:
    """Compares ranks before every `every`-th call that trains; None: never."""

    def __init__(self, every: int | None):
        self.every, self.calls = every, 0

    def before(self, module: nn.Module, call: Call) -> None:
        """Count a call, and compare if it is time. Raises DesyncError, NotFiniteError or InputError on every rank."""
        if self.every is None or dist.get_world_size() == 1 or not torch.is_grad_enabled():
            return
        self.calls += 1
        if self.calls % self.every == 0:
            with watch.asking("the check that ranks are equal"):
                agree.check_alike()
                self._compare(module)
                call.inputs.check(call.tensors)

    def _compare(self, module: Any) -> None:
        here = {name: local(p) for name, p in module.named_parameters() if p.requires_grad}
        sums = _sums(here)
        digests: dict[Part, Any] = defaultdict(hashlib.sha256)
        parts = {name: _part(module, name) for name in here}
        for name in here:
            digests[parts[name]].update(sums[name].to_bytes(8, "little", signed=True))
        settings = settings_of(module)
        stage = module.stage_mesh.pp_rank
        digests[stage, SETTINGS].update(repr(settings).encode())
        finite = _are_finite([*here.values()])
        everyone = agree.from_all(lambda: ({part: digest.digest() for part, digest in digests.items()}, finite))
        first: dict[Part, bytes] = {}
        same = all(first.setdefault(part, d) == d for theirs, _ in everyone for part, d in theirs.items())
        if same and all(are_finite for _, are_finite in everyone):
            return
        strange = [name for name, tensor in here.items() if not _are_finite([tensor])]
        details = agree.from_all(lambda: ({name: (parts[name], sums[name]) for name in here}, strange, stage, settings))
        raise (
            self._not_finite([names for _, names, *_ in details])
            or self._otherwise_set([(stage, settings) for *_, stage, settings in details])
            or self._unequal([found for found, *_ in details])
        )

    def _not_finite(self, by_rank: list[list[str]]) -> NotFiniteError | None:
        names = dict.fromkeys(name for names in by_rank for name in names)
        if not names:
            return None
        name = next(iter(names))
        ranks = [rank for rank, theirs in enumerate(by_rank) if name in theirs]
        return NotFiniteError(
            f"{name}{_others(len(names))} has values that are not finite on {named(ranks)} before call {self.calls}; "
            f"{self._since()}",
            fix="go on from a checkpoint of before; clip_grad_norm_, a smaller learning rate or a look at the batches "
            "since then may help; check_every=1 finds the call, None leaves the check out",
        )

    def _otherwise_set(self, by_rank: list[tuple[int, list[dict[str, str]]]]) -> DesyncError | None:
        first: dict[int, int] = {}
        nothing: dict[str, str] = {}
        for rank, (stage, settings) in enumerate(by_rank):
            other = first.setdefault(stage, rank)
            for theirs, mine in itertools.zip_longest(by_rank[other][1], settings, fillvalue=nothing):
                names = [name for name in theirs | mine if theirs.get(name) != mine.get(name)]
                if names:
                    here, there = (", ".join(f"{n} {of.get(n, 'none')}" for n in names) for of in (mine, theirs))
                    return DesyncError(
                        f"rank {rank} steps with {here} and rank {other} with {there} before call {self.calls}; "
                        f"{self._since()}",
                        ranks=(rank,),
                        fix="give optimizers and schedulers the same settings on every rank, and go on from a "
                        "checkpoint of before",
                    )
        return None

    def _unequal(self, by_rank: list[dict[str, tuple[Part, int]]]) -> DesyncError:
        sides: dict[str, dict[tuple[Part, int], list[int]]] = defaultdict(lambda: defaultdict(list))
        for rank, found in enumerate(by_rank):
            for name, (part, total) in found.items():
                sides[name][part, total].append(rank)
        differ: dict[str, list[list[int]]] = {}
        for name, by_value in sides.items():
            for part in {part for part, _ in by_value}:
                of_part = [ranks for (other, _), ranks in by_value.items() if other == part]
                if len(of_part) > 1:
                    differ.setdefault(name, sorted(of_part, key=lambda ranks: (len(ranks), ranks)))
        name, (fewest, *rest) = next(iter(differ.items()))
        return DesyncError(
            f"{name}{_others(len(differ))} has other values on {named(fewest)} than on "
            f"{named(sorted(rank for ranks in rest for rank in ranks))} before call {self.calls}; {self._since()}",
            ranks=tuple(fewest),
            fix="step optimizers on every rank with the same settings, change parameters on all alike, and go on from "
            "a checkpoint of before; check_every=1 finds the call, None leaves the check out",
        )

    def _since(self) -> str:
        last = self.calls - (self.every or 0)
        return f"it had not before call {last}" if last else "this is the first check"


def _part(module, name: str) -> Part:
    """Return which part of a parameter this rank holds, and what else may make its values others."""
    stage, layout = module.stage_mesh, module.layouts.get(name)
    axes = {*(layout.sharding_axes if layout is not None else ())}
    if stage.device.type != "cpu":
        axes |= {*stage.mesh.names} - {*data_axes(stage.mesh)}
    return stage.pp_rank, tuple((axis, stage.coordinate[axis]) for axis in sorted(axes))


def _sums(tensors: dict[str, Tensor]) -> dict[str, int]:
    """Return the checksums of tensors, read from their device at once."""
    sums = [checksum(tensor) for tensor in tensors.values()]
    return dict(zip(tensors, torch.stack([s.to(sums[0].device) for s in sums]).tolist())) if sums else {}


def _are_finite(tensors: list[Tensor]) -> bool:
    found = [tensor for tensor in tensors if tensor.numel() and tensor.is_floating_point()]
    return not found or bool(torch.nn.utils.get_total_norm(found, float("inf")).isfinite())


def _others(count: int) -> str:
    return f" (and {count - 1} more)" if count > 1 else ""
