"""Declare what a module's captures ask of the compiler, so that the runtime does not import it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from .._torch import OpenSizes
from ..codegen.rank_program import PipelineProgram, RankProgram
from ..frontend.call_signature import CallSignature
from ..frontend.fake_parameters import Forms
from ..ir.layout import Layout
from ..plans.plan import Plan
from .capture import Traced
from .sized_calls import Dims


class Compiler(Protocol):
    """An interface to what compiles calls of one model: see autopar/api/entry.py. Its methods are called, and raise, on
    all ranks together. `forms`: of the model's tensors, before they were taken over."""

    forms: Forms
    loss_fn: Callable | None

    def trace(
        self, example_inputs, gradients: bool, adapters: bool = True, trains: Mapping[str, bool] | None = None
    ) -> Traced:
        """Trace a call. `trains`: whether parameters train, by name, if not as when the model was taken over."""

    def retrace(self, traced: Traced, adapters: bool = True, trains: Mapping[str, bool] | None = None) -> Traced:
        """Trace the same call with tangents for all outputs that require a gradient."""

    def trace_form(
        self,
        like: Traced,
        signature: CallSignature,
        gradients: bool,
        adapters: bool = True,
        trains: Mapping[str, bool] | None = None,
    ) -> Traced:
        """Trace a call of this form as `trace` has traced one of other sizes."""

    def open_sizes(self, traced: Traced, dims: Dims, gradients: bool, trains: Mapping[str, bool]) -> OpenSizes:
        """Return for which sizes of these dims the user's code takes one way. One rank calls it."""

    def plan(
        self,
        traced: Traced,
        first: Plan | None = None,
        layouts: Mapping[str, Layout] | None = None,
        like: Plan | None = None,
    ) -> Plan:
        """Plan a traced call. `first`: the plan of the first capture; `layouts`: of the parameters by name, which the
        plan is to keep; `like`: a plan whose decisions are to be taken if they can be."""

    def plan_alike(self, traced: Traced, like: Plan) -> Plan:
        """Return the plan of a traced call with the decisions of the plan of another one. Raises PlanIncompatible."""

    def lower(self, traced: Traced, plan: Plan) -> RankProgram | PipelineProgram:
        """Return this rank's graphs of a plan. Raises DesyncError if those of the ranks do not fit together."""
