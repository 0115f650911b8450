"""Resident bytes of a parameter: master, gradient, optimizer state, and the copy that computes under mixed precision.

An fp32 parameter takes 4 bytes four times under AdamW: parameter, gradient and two moments, 16 in all; an fp64 one
twice that, a bf16 one half; an fp32 one with its moments in bf16 (`state_dtype`) 12. With precision="bf16" master,
gradient and moments stay fp32 and a 2-byte copy computes, 18 bytes a parameter (Megatron-LM's count, 16 in the ZeRO
paper, arXiv 1910.02054, which keeps the gradient in half precision).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..errors import OptimizerError, StrategyError, check_new

NEARLY_ALL = 7 / 8  # of a tensor: slices of it that are saved and are less are copied, so that it can be let go of


@dataclass(frozen=True)
class Optimizer:
    """The bytes that an optimizer holds and how often it goes through memory: see `register_optimizer`."""

    tensors: float
    bytes_per_element: float
    sweeps: float
    state_bytes: int | None = None  # of an element of its tensors, where that is less than the parameter's
    orthogonalizes: bool = False  # matrices, and leaves all else to AdamW (see orthogonalize.py)

    @staticmethod
    def of(name: str, state_bytes: int | None = None) -> Optimizer:
        """Return a known optimizer, which keeps its tensors in so many bytes an element. Raise StrategyError for an
        unknown one."""
        if name not in OPTIMIZERS:
            raise StrategyError(f"no optimizer {name!r} is known", fix=f"use one of {', '.join(sorted(OPTIMIZERS))}")
        return replace(OPTIMIZERS[name], state_bytes=state_bytes)


OPTIMIZERS: dict[str, Optimizer] = {}


def register_optimizer(
    name: str,
    *,
    tensors: float = 0,
    bytes_per_element: float = 0,
    sweeps: float = 1,
    orthogonalizes: bool = False,
    replace: bool = False,
) -> None:
    """Let `optimizer=name` make room for an optimizer's state, from the next plan on.

    tensors: how many it keeps that are like the parameter, in its shape and type: two moments for AdamW.
    bytes_per_element: what it keeps besides for each element of a parameter, whatever the parameter's type.
    sweeps: how often a step reads and writes parameter, gradient and state; 1 if it is fused.
    orthogonalizes: whether matrices step as under Muon, gathered and multiplied (orthogonalize.py), and all other
        parameters as under AdamW.

    Raises OptimizerError for numbers that cannot be, and for a name that is taken, unless it is to `replace` that."""
    check_new(OptimizerError, "optimizer", name, OPTIMIZERS, replace)
    for what, value in (("tensors", tensors), ("bytes_per_element", bytes_per_element), ("sweeps", sweeps)):
        if not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise OptimizerError(f"optimizer {name} has {what}={value!r}", fix="give a number from 0 on")
    OPTIMIZERS[name] = Optimizer(tensors, bytes_per_element, sweeps, orthogonalizes=orthogonalizes)


register_optimizer("adamw", tensors=2)
register_optimizer("adam", tensors=2)
register_optimizer("sgd")
register_optimizer("sgd_momentum", tensors=1)
register_optimizer("none", sweeps=0)
register_optimizer("muon", tensors=1, orthogonalizes=True)


@dataclass(frozen=True)
class StateBytes:
    """Bytes for each element of a parameter; gradient and optimizer only if it is trained. `sweeps` of a step go
    through them."""

    master: int
    copy: int
    gradient: int
    optimizer: float
    sweeps: float = 1
    widening: float = 0.0  # read and written more in a step, where that goes through wide copies of narrow state

    @property
    def computing(self) -> int:
        """Return the bytes of an element of the tensor that computes."""
        return self.copy or self.master

    @staticmethod
    def of(optimizer: Optimizer, master: int, copy: int) -> StateBytes:
        """Return the bytes for a parameter of `master` bytes an element that computes in a copy of `copy` bytes, 0 if
        in itself."""
        kept = min(master, optimizer.state_bytes or master)
        held = optimizer.tensors * kept + optimizer.bytes_per_element
        moved = optimizer.sweeps * (master - kept) + (master + kept if kept < master else 0)  # each way
        return StateBytes(master, copy, master, held, optimizer.sweeps, 2 * optimizer.tensors * moved)

    def updated(self, trainable: bool) -> float:
        """Return the bytes that the optimizer's step reads and writes of an element, 0 if it is not trained."""
        swept = self.sweeps * (self.gradient + 2 * (self.master + self.optimizer))
        return swept + self.widening if trainable else 0.0

    def resident(self, trainable: bool) -> float:
        """Return the bytes that an element takes all through training. The copy that computes comes and goes; a
        gradient lives from the backward to the optimizer's step alone."""
        return self.master + (self.optimizer if trainable else 0)
