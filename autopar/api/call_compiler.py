"""Compile a call of a model on all ranks together: capture it, plan it, lower it.

Rank 0 traces, and the others take its capture over (see autopar/frontend/capture_data.py). It plans too, and hands the
plan out. What each rank does by itself is to lower the one by the other.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from .._torch import OpenSizes
from ..adapt import order
from ..adapt.lora import LoRA
from ..adapt.order import Adaptation
from ..codegen import pass_manager
from ..codegen.rank_program import PipelineProgram, RankProgram
from ..compiler import open_sizes, trace, trace_to_plan
from ..errors import PlanIncompatible
from ..frontend.call_signature import CallSignature
from ..frontend.constants import text_of
from ..frontend.device import move
from ..frontend.export import Captured
from ..frontend.fake_parameters import Forms, forms_of
from ..ir.compiler_pass import Pass
from ..ir.graph import fingerprint
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..planner.options import options_of
from ..planner.pipeline.replan import plan_same_stages, with_owners
from ..planner.problem.hf_tp_plan import styles_of
from ..planner.problem.tiled import with_regions
from ..planner.remedies import planned_or_fixes
from ..planner.request import PlanRequest
from ..planner.spmd.batch import of_samples, samples_of
from ..planner.spmd.plan_options import IN_DOUBT, PlanOptions
from ..plans.pipeline import axis_of
from ..plans.plan import Plan
from ..processes import agree
from ..runtime.capture import Traced
from ..runtime.inputs import global_example
from ..storage.compile_cache import CompileCache
from .cache_keys import capture_key, plan_key, sources
from .kept_program import kept_or_lowered
from .shared_capture import shared_capture


@dataclass(eq=False)
class CallCompiler:
    """Traces, plans and lowers calls of one model, on all ranks together (see runtime/captures.py)."""

    model: nn.Module
    device_mesh: Any
    inputs: str
    given: Plan | str | Path | None
    loss_fn: Any
    options: dict
    adapt: Sequence[Adaptation] = ()
    passes: Sequence[Pass] = ()
    fp8: str = ""  # what a plan says that FP8("auto") became

    def __post_init__(self):
        self.mesh = Mesh.of(self.device_mesh)
        self.axis = axis_of(self.mesh)
        self.forms = forms_of(self.model)  # of the parameters before they are taken over
        self.programs = CompileCache.of_environment()
        self.cache = self.programs if dist.get_rank() == 0 else CompileCache(None)
        self.sources = sources(self.model) if self.cache.folder is not None else None

    def trace(
        self, example_inputs, gradients: bool, adapters: bool = True, trains: Mapping[str, bool] | None = None
    ) -> Traced:
        """Trace a call of the model. Without `gradients` no parameter trains; else `trains` says which do, by name,
        where that has changed. Without `adapters` LoRA's are left out."""
        forms = self.forms.training(trains or {}) if gradients else self.forms.without_gradients()
        whole = lambda: global_example(example_inputs, self.inputs, self.mesh)  # noqa: E731
        return self._agreed(whole, forms, adapters, True, gradients or torch.is_grad_enabled())

    def retrace(self, traced: Traced, adapters: bool = True, trains: Mapping[str, bool] | None = None) -> Traced:
        """Trace a capture's call again, for gradients of all differentiable outputs rather than of the loss alone."""
        forms = self.forms.training(trains or {})
        return self._agreed(lambda: (_example_of(traced.captured.signature), traced.fixed), forms, adapters, False)

    def trace_form(
        self,
        like: Traced,
        signature: CallSignature,
        gradients: bool,
        adapters: bool = True,
        trains: Mapping[str, bool] | None = None,
    ) -> Traced:
        """Trace a call of this form as `trace` has traced one of other sizes."""
        forms = self.forms.training(trains or {}) if gradients else self.forms.without_gradients()
        call = lambda: (_example_of(signature), like.fixed)  # noqa: E731
        return self._agreed(call, forms, adapters, True, gradients or torch.is_grad_enabled())

    def open_sizes(
        self, traced: Traced, dims: Mapping[str, Mapping[int, int]], gradients: bool, trains: Mapping[str, bool]
    ) -> OpenSizes:
        """Return for which sizes of these dims the user's code takes the way that it took in a capture, and its
        numbers. One rank calls it, in the modes of the call."""
        forms = self.forms.training(trains) if gradients else self.forms.without_gradients()
        how = self.loss_fn, forms, self.options["precision"], gradients or torch.is_grad_enabled()
        return open_sizes(self.model, _example_of(traced.captured.signature), dims, traced.captured, *how)

    def _agreed(
        self, example: Callable[[], tuple], forms: Forms, adapters: bool, loss_alone: bool, with_gradients: bool = True
    ) -> Traced:
        """Trace the same graph on all ranks; `example` gives the call on global shapes, and the layouts that the user's
        tensors fix."""
        adapt = [a for a in self.adapt if adapters or not isinstance(a, LoRA)]
        whole, given = agree.everywhere(example)
        options = self.options["precision"], adapt, loss_alone, with_gradients
        call = self.model, whole, self.loss_fn, forms
        captured, content = shared_capture(
            lambda: trace(*call, *options, self.passes),
            *call,
            self.cache,
            capture_key(self.sources, *call, *options) if self.sources is not None and not self.passes else None,
        )
        signature = captured.signature
        shapes = [
            f"{n} {tuple(s)}" if s is not None else f"{n}={text_of(c)}"
            for n, s, c in zip(signature.names, signature.shapes, signature.constants)
        ]
        found = fingerprint(captured.graph)
        agree.check_captures(shapes, found)
        return Traced(captured, given, found, content)

    def plan(
        self,
        traced: Traced,
        first: Plan | None = None,
        layouts: Mapping[str, Layout] | None = None,
        like: Plan | None = None,
    ) -> Plan:
        """Return the plan of a traced call, made or loaded on rank 0 and the same on all ranks. For a later call
        `first` is the plan of the first one, and parameters keep their `layouts`, by name; the decisions of `like` are
        taken if they can be."""
        captured = traced.captured

        def made() -> dict:
            if like is not None:
                with contextlib.suppress(PlanIncompatible):
                    plan = _with_decisions(like, captured)
                    plan.check_fits(captured.graph, self.mesh)
                    return plan.to_json()
            if first is None and self.given is not None:
                return owned(self.given if isinstance(self.given, Plan) else Plan.load(self.given)).to_json()
            if first is None:
                request = self._request(traced)
                key = plan_key(traced.content, request)
            else:
                options = self._options_of_later(traced, first, layouts)
                key = plan_key(traced.content, options, first, layouts)
            if (kept := self.cache.get(key)) is not None:
                return json.loads(kept[0])
            if first is None:
                plan = planned_or_fixes(request, captured, bool(self.adapt), self._retrace_of(traced)).plan
            else:
                plan = plan_same_stages(captured, first, options, type(self.model).__name__)
            data = owned(plan).to_json()
            self.cache.put(key, json.dumps(data))
            return data

        def owned(plan: Plan) -> Plan:
            if plan.pipeline.owners or plan.pipeline.is_one_program:
                return plan
            plan.check_fits(captured.graph, self.mesh)
            return with_owners(captured, plan)

        agreed = Plan.from_json(agree.from_rank_zero(made))
        agreed = replace(agreed, fp8=self.fp8 or agreed.fp8)
        agreed.check_fits(captured.graph, self.mesh)
        pass_manager.planned(agreed)
        move(captured, torch.device(self.device_mesh.device_type))
        return agreed

    def plan_alike(self, traced: Traced, like: Plan) -> Plan:
        """Return the plan of a traced call with the decisions of the plan of another one. Raises PlanIncompatible."""

        def made() -> Plan:
            plan = _with_decisions(like, traced.captured)
            plan.check_fits(traced.captured.graph, self.mesh)
            return plan

        plan = agree.everywhere(made)
        move(traced.captured, torch.device(self.device_mesh.device_type))
        return plan

    def lower(self, traced: Traced, plan: Plan) -> RankProgram | PipelineProgram:
        """Return this rank's graphs of a plan, lowered or kept. Raises DesyncError if those of the ranks do not fit
        together."""
        device = torch.device(self.device_mesh.device_type)
        program = agree.everywhere(lambda: kept_or_lowered(self.programs, traced, plan, dist.get_rank(), device))
        agree.check_programs(plan, program.collectives())
        return program

    def _request(self, traced: Traced) -> PlanRequest:
        """Return what is asked of the plan of the first call."""
        captured, options = traced.captured, self.options
        is_cut = self.axis is not None or options["micro_batches"] not in (None, 1)
        # micro-batches are cut from the whole batch on every rank, whatever is passed
        fixed = {} if is_cut else _by_node(captured, {"input": traced.fixed})
        # nothing to choose from where a recipe was asked for
        unasked = IN_DOUBT if options["strategy"] is None and self.axis is None else False
        asked = options | {"baselines": options["baselines"] or unasked}
        return PlanRequest.of(
            self.device_mesh, type(self.model).__name__, **asked, fixed=fixed, styles=styles_of(self.model)
        )

    def _retrace_of(self, traced: Traced) -> Callable[[Sequence[Adaptation]], Captured]:
        """Return what traces the same call with more adaptations."""
        signature = traced.captured.signature

        def retrace(more: Sequence[Adaptation]) -> Captured:
            with order.attached(self.model, more):
                return trace_to_plan(
                    self.model,
                    of_samples(signature, samples_of(signature)),
                    self.loss_fn,
                    forms_of(self.model),
                    self.options["precision"],
                    (*self.adapt, *more),
                    self.passes,
                )

        return retrace

    def _options_of_later(self, traced: Traced, first: Plan, layouts: Mapping[str, Layout] | None) -> PlanOptions:
        """Return what is asked of the plan of a later call, in which parameters stay where they are."""
        captured = traced.captured
        known = {"parameter": layouts or {}, "input": traced.fixed}
        leaves = {n.meta["role"]: n.name for n in captured.graph.nodes if n.op == "placeholder"}
        # gradients and optimizer state stay in memory when a graph has no backward
        trains = any(role.kind == "parameter" and role.trainable for role in leaves)
        held = 0.0 if trains else first.memory.get("gradients", 0.0) + first.memory.get("optimizer", 0.0)
        here = first.sharding.on_host & set(leaves.values())  # parameters stay where they are
        asked = {
            k: self.options[k]
            for k in ("hardware", "optimizer", "precision", "execution", "expert_load", "strategy", "strict")
        }
        if self.given is not None:
            asked |= {"strategy": first.strategy, "execution": first.execution}
        asked_again = options_of(
            self.device_mesh,
            **asked,
            memory=first.memory_limit_bytes - held,
            pin=None,
            on_host=here,
            fixed=_by_node(captured, known),
            baselines=False,
            reduce_dtype=first.reduce_dtype,
            state_dtype=first.state_dtype,
            expert_capacity=first.expert_capacity,
            hot_experts=first.hot_experts,
        )
        tile = with_regions(self.options["tile"], captured.graph)
        return replace(asked_again, tile=tile, loops=self.options["loops"])


def _with_decisions(like: Plan, captured: Captured) -> Plan:
    return replace(like, fingerprint=fingerprint(captured.graph), samples=samples_of(captured.signature))


def _example_of(signature: CallSignature) -> tuple[tuple, dict]:
    """Return a call of global shapes, without values."""
    form = zip(signature.shapes, signature.dtypes, signature.differentiated, signature.numbers)
    return signature.rebuild(
        [n or torch.empty(s, dtype=d, device="meta", requires_grad=g) for s, d, g, n in form if s is not None]
    )


def _by_node(captured: Captured, known: Mapping[str, Mapping[str, Layout]]) -> dict[str, Layout]:
    """Return layouts by the name of a placeholder, from those by kind and name of what it takes."""
    leaves = [n for n in captured.graph.nodes if n.op == "placeholder"]
    roles = ((n.name, n.meta["role"]) for n in leaves)
    return {name: known[r.kind][r.name] for name, r in roles if r.name in known.get(r.kind, ())}
