"""Compile calls of a module at other sizes than those that it is called with, for the families of calls that follow
their sizes (see sizes.py)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .._torch import OpenSizes
from ..errors import AutoparError
from ..frontend.call_signature import CallSignature
from ..plans.plan import Plan
from .capture import Point, Traced
from .sized_calls import Dims

if TYPE_CHECKING:
    from .captures import Captures


class Maker:
    """Compiles calls of the module of some captures, in the state in which it is. Its methods are called, and raise, on
    all ranks together, but for `open_sizes`, which rank 0 alone calls."""

    def __init__(self, captures: Captures, gradients: bool):
        self.captures, self.gradients = captures, gradients
        self.trains = captures.by_name(captures.trainable())

    def trace_form(self, like: Traced, signature: CallSignature) -> Traced:
        """Trace a call of this form, as another one was traced."""
        adapters = self.captures.modes.adapters
        self.captures.traces += 1
        return self.captures.compiler.trace_form(like, signature, self.gradients, adapters, self.trains)

    def open_sizes(self, traced: Traced, dims: Dims) -> OpenSizes:
        """Return for which sizes of these dims the user's code takes one way."""
        return self.captures.compiler.open_sizes(traced, dims, self.gradients, self.trains)

    def point(self, traced: Traced, like: Plan) -> Point | None:
        """Lower a call by the decisions of a plan; return None if it cannot have them."""
        captures = self.captures
        try:
            plan = captures.compiler.plan_alike(traced, like)
            return Point(traced, plan, captures.step_of(traced, plan, captures.compiler.lower(traced, plan)))
        except AutoparError:
            return None
