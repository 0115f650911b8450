"""Find the parameters that may live on the host, and price those that a plan puts there.

A parameter on the host is a shard in the host's memory in one of its layouts: the user's optimizer makes its state
beside it and steps there. On the device stays the copy that computes, in that layout, as long as the step lasts; from
there on it is gathered like any other. So a layout on the host makes the same tensors travel as on the device, and
which of the two is better depends on the price of memory alone: the search has no more layouts than before.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ...cost.host import HostCost
from ...errors import MemoryInfeasibleError, StrategyError
from ...hardware.profile import Hardware
from ...ir.layout import largest_local_numel
from ...plans.entries import Offloaded
from .vertices import Vertex

if TYPE_CHECKING:
    from ..objective.evaluate import Evaluation
    from .problem import Problem
    from .strategies import Choices

NONE, AUTO, OPTIMIZER, ACTIVATIONS = "none", "auto", "optimizer", "activations"
LEVELS = (NONE, AUTO, OPTIMIZER, ACTIVATIONS)


def check(level: object, on_host: Collection[str], hardware: Hardware) -> None:
    """Raise StrategyError for an unknown level, or where there is no host to offload to."""
    if level not in LEVELS:
        raise StrategyError(f"no offload {level!r} is known", fix=f"use one of {', '.join(LEVELS)}")
    if (level in (OPTIMIZER, ACTIVATIONS) or on_host) and hardware.host is None:
        raise StrategyError(
            f"profile {hardware.name} says nothing of a host beside the device's own memory",
            fix="pass the hardware= that the plan was made for"
            if on_host
            else "leave offload out, or add a [host] table to the profile, as h100.toml has one",
        )


@dataclass(frozen=True)
class Offload:
    """The user's choice: trainable parameters on the host never, where memory is short ("auto"), or all of them
    ("optimizer"). `on_host`: placeholders of parameters that are there already. `cost`: None without a host. `is_one`:
    whether each pass of a step goes back as soon as it is there, and no stage of a pipeline runs it: then what the
    backward reads may wait on the host, where memory is short ("auto", "activations")."""

    level: str = NONE
    cost: HostCost | None = None
    on_host: Collection[str] = ()
    is_one: bool = False

    @property
    def activation_bytes_per_second(self) -> float:
        """Return the speed of the link for values that wait on the host, 0 where none may."""
        if self.cost is None or not self.is_one or self.level not in (AUTO, ACTIVATIONS):
            return 0.0
        return self.cost.host.link_bytes_per_second

    def memory_kinds(self, v: Vertex) -> tuple[bool, ...]:
        """Return the kinds of memory that a parameter may be in: on the device (False), on the host (True), or
        either."""
        if v.name in self.on_host or self.level == OPTIMIZER and v.node.meta["role"].trainable:
            return (True,)
        is_free = self.level == AUTO and self.cost is not None and v.node.meta["role"].trainable
        return (False, True) if is_free else (False,)


def on_device(options: Choices, k: int) -> int:
    """Return the strategy of a class that has the same layout on the device as the strategy `k` has anywhere; `k` where
    there is none."""
    here, there = ([i for i, s in enumerate(options.strategies) if s.on_host == kind] for kind in (False, True))
    return here[there.index(k)] if here and k in there else k


def break_even(problem: Problem, gradients: float) -> float | None:
    """Return the seconds a byte at which memory is as dear as keeping a parameter on the host, None where none may be
    in both. `gradients` says whether those are held when memory peaks (1) or not (0)."""
    prices = []
    for options in problem.classes.values():
        here = [k for k, s in enumerate(options.strategies) if not s.on_host]
        there = [k for k, s in enumerate(options.strategies) if s.on_host]
        if here and there:  # the same layouts in the same order, and the same price for all
            held = options.resident_bytes + gradients * options.gradient_bytes
            dearer = options.seconds[there[0]] - options.seconds[here[0]]
            prices.append(float(dearer / max(held[here[0]] - held[there[0]], 1.0)))
    return max(prices, default=None)


def offloaded(problem: Problem, e: Evaluation) -> Offloaded:
    """Return what an evaluated plan has on the host. Seconds are of a step, bytes of a device's share."""
    parameters, bytes_, copies, steps = 0, 0.0, 0.0, 0.0
    for v, times in zip(problem.vertices, problem.copies(e.first)):
        strategy = problem.choices(v.index).strategies[e.choice[v.index]]
        if not strategy.on_host:
            continue
        cost, state, trainable = problem.offload.cost, v.state_bytes(problem.optimizer), v.node.meta["role"].trainable
        elements = float(largest_local_numel(v.node.meta["val"].shape, strategy.outputs[0], problem.mesh))
        parameters += times
        bytes_ += times * elements * (state.master + (state.gradient + state.optimizer if trainable else 0))
        copies += times * cost.copy_seconds(elements, state, trainable) * cost.micro_batches
        steps += times * cost.optimizer_seconds(elements, state, trainable)
    return Offloaded(parameters, bytes_, copies, steps)


def update_seconds(problem: Problem, e: Evaluation) -> float:
    """Return the seconds of a pass that the optimizer takes on the device."""
    chosen = (
        (problem.choices(v.index), e.choice[v.index], times, v.kind)
        for v, times in zip(problem.vertices, problem.copies(e.first))
    )
    return sum(
        times * float(options.seconds[k])
        for options, k, times, kind in chosen
        if kind == "parameter" and not options.strategies[k].on_host
    )


def room_on_host(problem: Problem, e: Evaluation) -> float:
    """Return the bytes of a device's share of the host that parameters leave there for values."""
    cost = problem.offload.cost
    return float("inf") if cost is None else max(0.0, cost.host.memory_bytes - offloaded(problem, e).host_bytes)


def check_host(problem: Problem, e: Evaluation) -> None:
    """Raise MemoryInfeasibleError if a plan puts more on the host than the host has."""
    cost, need = problem.offload.cost, offloaded(problem, e).host_bytes + e.host_bytes
    if cost is not None and need > cost.host.memory_bytes:
        missing = need - cost.host.memory_bytes
        raise MemoryInfeasibleError(
            f"the plan keeps {need / 2**30:.3g} GiB on the host for each device, {missing / 2**30:.3g} GiB more than "
            f"there are",
            missing_bytes=int(missing),
            mesh=problem.mesh,
            fix='use more devices or hosts with more memory, or offload="none"',
        )
