"""One capture of a module: the graph of a call, what runs it, and when it serves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from ..codegen.follow_size import Sizes
from ..frontend.call_signature import CallSignature, Returns
from ..frontend.export import Captured
from ..frontend.guards import Guards
from ..ir.layout import Layout
from ..plans.plan import Plan
from .ambient import Ambient
from .inputs import Inputs
from .step import Step


@dataclass(frozen=True)
class Traced:
    """The joint graph of a call, and the layouts by input name in which the user passes tensors that are not whole.
    `content`: a hash of all that is said of the graph, None if it has none."""

    captured: Captured
    fixed: Mapping[str, Layout]
    fingerprint: str
    content: str | None = None

    def computes_as(self, other: Traced) -> bool:
        """Return whether the same program serves both."""
        mine, theirs = self.captured.returns, other.captured.returns
        is_same = self.fingerprint == other.fingerprint and self.fixed == other.fixed and mine.outputs == theirs.outputs
        return is_same and _constants_equal(self.captured.graph_module, other.captured.graph_module)


def _constants_equal(a: fx.GraphModule, b: fx.GraphModule) -> bool:
    """Return whether two graphs with the same nodes have the same tensors among their constants."""
    constants = [[getattr(g, n.target) for n in g.graph.nodes if n.op == "get_attr"] for g in (a, b)]
    return all(
        type(x) is type(y) and torch.equal(x, y) for x, y in zip(*constants, strict=True) if isinstance(x, torch.Tensor)
    )


@dataclass(frozen=True, eq=False)
class Point:
    """A call that was lowered so that programs may follow its sizes (see following.py)."""

    traced: Traced
    plan: Plan
    step: Any  # a Step or a PipelineStep


@dataclass(eq=False)
class Capture:
    """`call` is its text; `flags`, `hooks`, `trainable`, `ambient`, `gradients`, `guards` and the forms of `buffers`
    are when it serves, `returns` what it gives. `is_met`: all ranks were seen to make this call; `used`: the number of
    the last call that it served; `sizes`: of what its step follows, if it does; `planned_for`: the call that the plan
    was made for."""

    call: str
    flags: list[bool]
    hooks: list[object]
    trainable: list[bool]
    ambient: Ambient
    gradients: bool
    guards: Guards
    buffers: list[tuple[dict, str, torch.Size, torch.dtype]]
    returns: Returns
    inputs: Inputs
    step: Step
    plan: Plan
    traced: Traced
    planned_for: CallSignature
    sizes: Sizes | None = None
    is_met: bool = False
    used: int = 0

    @property
    def follows_size(self) -> bool:
        """Return whether it is no capture of its own, but served by the program of others."""
        return self.sizes is not None

    @property
    def state(self) -> tuple:
        """Return the state of the module and of torch that the capture is for."""
        return self.flags, self.hooks, self.trainable, self.ambient

    def holds(self) -> bool:
        """Return whether the Python state is the one that was traced, and the buffers have the forms that the graphs
        take."""
        for table, leaf, shape, dtype in self.buffers:
            tensor = table.get(leaf)
            if (
                not isinstance(tensor, torch.Tensor)
                or tensor.shape != shape
                or tensor.dtype != dtype
                or tensor.requires_grad
            ):
                return False
        return self.guards.hold()


def fix_of_many(signature: CallSignature, others: Sequence[CallSignature]) -> str:
    """Return what to do where a call is compiled again and again: numbers that always change are no constants."""
    known = [dict(zip(other.names, other.values)) for other in others]
    numbers = [
        f"{name}=torch.tensor({constant!r})"
        for name, constant, value in zip(signature.names, signature.constants, signature.values)
        if type(constant) in (int, float) and sum(value != other.get(name, value) for other in known) > 1
    ]
    if numbers:
        return f"pass {', '.join(numbers)}, which may have any value, or raise the module's capture_limit"
    return "keep what changes in every call in buffers or inputs, or raise the module's capture_limit"
