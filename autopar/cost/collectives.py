"""Seconds of a collective over axes of a mesh, by the best that the hardware profile knows.

    "measured"     points that `autopar calibrate` measured (autopar/cost/measured.py)
    "nccl"         NCCL's own model of its algorithms and protocols (autopar/cost/nccl.py)
    "alpha-beta"   a latency, and the bytes that a device sends at the speed of its link (Hardware.links_for)

A profile may know one axis better than another. `model` replaces the all-reduce by one of the textbooks' on alpha-beta
links (autopar/cost/textbook.py). What takes several axes is one collective over the group of all their devices. An
all-reduce, all-gather or reduce-scatter that leaves a tier of links goes tier by tier where that is faster
(autopar/cost/hierarchy.py), as it is emitted.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property

import numpy as np

from ..errors import HardwareError
from ..hardware.profile import KINDS, Curve, Hardware
from ..ir.mesh import Mesh, joined
from . import measured, nccl
from .hierarchy import STEPS, Hierarchy, InSteps, Key, inner_axes, sizes_that_gain, step_seconds
from .textbook import ALL_REDUCES

Price = Callable[[np.ndarray], np.ndarray]
MODELS = ("auto", *ALL_REDUCES)
SEVERAL_AXES = tuple(STEPS)  # kinds that take more than one axis
TRUST = ("measured", "nccl", "alpha-beta", "textbook")  # best first

# Relative errors to expect where nothing was measured: the aim of the NCCL model on nodes it was not calibrated on, and
# what one latency and one speed miss of it (tests/cost/test_nccl.py).
ERRORS = {"nccl": 0.35, "alpha-beta": 0.5, "textbook": 0.5}


class CollectiveCost:
    """Prices collectives on one mesh. `by_tier`: whether some may go tier by tier. Raises HardwareError for an unknown
    `model`."""

    def __init__(self, hardware: Hardware, mesh: Mesh, model: str = "auto", by_tier: bool = True):
        if model not in MODELS:
            raise HardwareError(f"there is no model {model!r} of collectives", fix=f"use one of {', '.join(MODELS)}")
        self.hardware, self.mesh, self.model = hardware, mesh, model
        self._by_links = hardware.split_by_tier(mesh)  # no axis of it is on two tiers
        self._prices: dict[Key, Price] = {}
        # beside compute a group of collectives that wait for each other hides less than one, so there is none
        self._goes_by_tier = by_tier and model == "auto"
        self._steps: dict[Key, InSteps | None] = {}

    @cached_property
    def hierarchy(self) -> Hierarchy:
        """Return which collectives go tier by tier, as `seconds` prices them."""
        axes = self._active(self.mesh.names)
        groups = [some for n in range(1, len(axes) + 1) for some in itertools.combinations(axes, n)]
        left, found = [(kind, some) for kind in STEPS for some in groups], {}
        while left:
            steps = self._in_steps(*(key := left.pop(0)))
            if key not in found and steps is not None:
                found[key] = steps
                left.append((steps.kind, steps.outer))  # which may be parts of axes
        return found

    @cached_property
    def at_once(self) -> CollectiveCost:
        """Return the prices of collectives that are emitted elsewhere, none of which goes by tier."""
        return CollectiveCost(self.hardware, self.mesh, self.model, by_tier=False)

    def seconds(self, kind: str, axes: tuple[str, ...], held_bytes: float | np.ndarray) -> float | np.ndarray:
        """Return the seconds of one collective, `held_bytes` being those of a device before it. It is never less for
        more bytes, and 0 in a group of one.

        `kind`: all_gather, reduce_scatter, all_to_all, all_reduce, broadcast or send (to the next of the group).
        Several axes are only for SEVERAL_AXES. Raise HardwareError for another kind, or for several axes of one that
        takes only one."""
        key = (kind, axes)
        if key not in self._prices:
            self._prices[key] = self._price(kind, self._active(axes))
        if isinstance(held_bytes, np.ndarray):
            return self._prices[key](held_bytes.astype(float))
        return float(self._prices[key](np.array(float(held_bytes))))

    def tier_of(self, kind: str, axes: tuple[str, ...]) -> str:
        """Return which of TRUST the price comes from."""
        axes = self._active(axes)
        if kind == "all_reduce" and self.model != "auto":
            return "textbook"
        if axes and self._curve(kind, axes):
            return "measured"
        return "nccl" if self.hardware.nccl else "alpha-beta"

    @property
    def tier(self) -> str:
        """Return the least trusted of TRUST that any axis of the mesh needs for an all-reduce."""
        axes = [(axis,) for axis in self._active(self.mesh.names)] or [()]
        return max((self.tier_of("all_reduce", a) for a in axes), key=TRUST.index)

    @property
    def relative_error(self) -> float:
        """Return the relative error to expect of `tier`: 0.35 is 35 %."""
        return self.hardware.curves_error if self.tier == "measured" else ERRORS[self.tier]

    def _active(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return the axes of more than one device, in the order of the mesh."""
        order = self.mesh.with_parts(axes).names
        return tuple(sorted((a for a in axes if self.mesh.size(a) > 1), key=order.index))

    def _parts(self, axes: tuple[str, ...]) -> tuple[str, ...]:
        """Return these axes, each that leaves a tier of links as its parts inside and across."""
        return tuple(part for part in self._by_links.names if any(_is_part(part, axis) for axis in axes))

    def _price(self, kind: str, axes: tuple[str, ...]) -> Price:
        if kind not in KINDS:
            raise HardwareError(f"there is no collective {kind!r}", fix=f"use one of {', '.join(KINDS)}")
        if len(axes) > 1 and kind not in SEVERAL_AXES:
            raise HardwareError(
                f"{kind} over {', '.join(axes)}: only {', '.join(SEVERAL_AXES)} take several axes",
                fix="price axes one by one",
            )
        if not axes:
            return np.zeros_like
        tier = self.tier_of(kind, axes)
        if tier == "textbook":
            return self._textbook(axes)
        flat, steps = self._at_once(kind, axes, tier), self._in_steps(kind, axes)
        if steps is None:
            return flat
        return lambda held: np.where(steps.takes(held), self._by_tier(steps, held), flat(held))

    def _at_once(self, kind: str, axes: tuple[str, ...], tier: str) -> Price:
        if tier == "alpha-beta":
            return self._alpha_beta(kind, axes)
        return self._measured(kind, axes) if tier == "measured" else self._nccl(kind, axes)

    def _in_steps(self, kind: str, axes: tuple[str, ...]) -> InSteps | None:
        """Return for which bytes a collective over these axes, in the order of the mesh, goes tier by tier."""
        if (kind, axes) not in self._steps:
            self._steps[kind, axes] = self._found_steps(kind, axes) if self._goes_by_tier and kind in STEPS else None
        return self._steps[kind, axes]

    def _found_steps(self, kind: str, axes: tuple[str, ...]) -> InSteps | None:
        parts = self._parts(axes)
        inner = inner_axes(parts, self.hardware.tiers_for(self._by_links))
        if len(inner) == len(parts):
            return None
        flat = self._at_once(kind, axes, self.tier_of(kind, axes))
        steps = InSteps(kind, joined(parts[: -len(inner)]), inner, 0, 0)
        ends = sizes_that_gain(lambda held: self._by_tier(steps, held) < float(flat(np.array(float(held)))))
        return ends and replace(steps, from_bytes=ends[0], to_bytes=ends[1])

    def _by_tier(self, steps: InSteps, held):
        return step_seconds(steps.steps, self._devices, self._unordered, held) + self._order_seconds(steps, held)

    def _unordered(self, kind: str, axes: tuple[str, ...], held):
        """Return the seconds of a collective as one step of several, whose copy puts in order what this one brings."""
        steps, seconds = self._in_steps(kind, self._active(axes)), self.seconds(kind, axes, held)
        if steps is None:
            return seconds
        return seconds - np.where(steps.takes(held), self._order_seconds(steps, held), 0.0)

    def _order_seconds(self, steps: InSteps, held):
        """Return the seconds of the copy that puts blocks in order."""
        copied = {"all_gather": held * self._devices(steps.axes), "reduce_scatter": held}.get(steps.kind, 0.0)
        return 2 * copied / self.hardware.reached_memory_bytes_per_second

    def _measured(self, kind: str, axes: tuple[str, ...]) -> Price:
        curve, devices = self._curve(kind, axes), self._devices(axes)
        return lambda held: measured.seconds(curve, devices, held)

    def _curve(self, kind: str, axes: tuple[str, ...]) -> Curve | None:
        mesh = self.mesh.with_parts(axes)
        outer, inner = (mesh.names.index(axis) for axis in (axes[0], axes[-1]))
        span, stride = math.prod(mesh.sizes[outer:]), math.prod(mesh.sizes[inner + 1 :])
        return measured.curve_for(self.hardware, kind, self._devices(axes), stride, span)

    def _nccl(self, kind: str, axes: tuple[str, ...]) -> Price:
        group = self._group(axes)
        return lambda held: nccl.seconds(kind, group, self.hardware.nccl, held)

    def _group(self, axes: tuple[str, ...]) -> nccl.Group:
        """Return where the group of rank 0 lies; the others lie alike."""
        node, *outer = self.hardware.links
        n, ranks = self._devices(axes), self.mesh.group(axes, 0)
        blocks = [
            Counter(rank // tier.devices if tier.devices else 0 for rank in ranks) for tier in self.hardware.links
        ]
        per_node = min(blocks[0].values())
        # what leads out of the node, and of each group of switches that the group does not lie in
        ways = [(min(inside.values()), tier.bytes_per_second) for inside, tier in zip(blocks, outer) if len(inside) > 1]
        card = min([members * speed / per_node for members, speed in ways], default=node.bytes_per_second)
        direct = min([speed * (n - per_node) / (n - members) for members, speed in ways], default=card)
        return nccl.Group(n, len(blocks[0]), per_node, node.bytes_per_second, card, direct)

    def _alpha_beta(self, kind: str, axes: tuple[str, ...]) -> Price:
        """Price a collective by a latency and the bytes that a device sends; over several axes as one ring."""
        mesh = self.mesh.with_parts(axes)
        links, tiers = self.hardware.links_for(mesh), self.hardware.tiers_for(mesh)
        latency = max(links[axis].latency_seconds for axis in axes)
        if len(axes) > 1:
            group = self._group(axes)
            return lambda held: latency + measured.SENT[kind](group.ranks) * held / group.bus
        link, tier = links[axes[0]], tiers[axes[0]]
        speeds = {"all_to_all": link.all_to_all_bytes_per_second, "send": tier.bytes_per_second}
        speed, sent = speeds.get(kind) or link.bytes_per_second, measured.SENT[kind](self.mesh.size(axes[0]))
        return lambda held: latency + sent * held / speed

    def _textbook(self, axes: tuple[str, ...]) -> Price:
        """Price an all-reduce over the group of all axes, on the slowest of their links."""
        algorithm, n = ALL_REDUCES[self.model], self._devices(axes)
        links = self.hardware.links_for(self.mesh)
        latency = max(links[axis].latency_seconds for axis in axes)
        speed = min(links[axis].bytes_per_second for axis in axes)
        return lambda held: algorithm.seconds(n, held, latency, speed)

    def _devices(self, axes: tuple[str, ...]) -> int:
        return math.prod(self.mesh.size(axis) for axis in axes)


def _is_part(part: str, axis: str) -> bool:
    return part == axis or part.startswith((f"{axis}//", f"{axis}%"))
