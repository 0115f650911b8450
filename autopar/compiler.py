"""The front end's passes in the order they run: export -> casts -> regions -> canonicalize -> adapt -> differentiate ->
clean."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import nn

from .adapt.lora import LoRA
from .adapt.order import Adaptation
from .codegen import pass_manager
from .errors import CaptureError
from .frontend import autocast, export
from .frontend.dtypes import check_types
from .frontend.export import Captured
from .frontend.fake_parameters import Form
from .frontend.output_gradients import differentiable_outputs
from .frontend.precision import compute_dtype
from .frontend.unroll import tower_of, unroll
from .passes.adapt.fake_quant import fake_quant
from .passes.adapt.lora import check_gradients, lora
from .passes.adapt.quantize import quantize
from .passes.canonicalize.autocast_kernels import traced_as
from .passes.canonicalize.clean import clean
from .passes.canonicalize.explicit_casts import explicit_casts
from .passes.canonicalize.grad_regions import grad_regions
from .passes.canonicalize.rewrite import canonicalize
from .passes.canonicalize.upcast import widen
from .utils.gc_pause import paused_collector

ADAPT_PASSES = {"lora": lora, "quantize": quantize, "fake_quant": fake_quant}  # by the name of an adaptation


@paused_collector()
def trace(
    model: nn.Module, example_inputs, loss_fn: Callable | None = None, forms: Mapping[str, Form] | None = None,
    precision: str = "fp32", adapt: Sequence[Adaptation] = (), loss_alone: bool = True, with_gradients: bool = True,
) -> Captured:  # fmt: skip
    """Return the annotated joint graph of a model's call, in canonical ops. `forms`: shapes and dtypes of the
    parameters, if not their own; `precision`: as in autopar/frontend/precision.py; `adapt`: what is attached to the
    model (see autopar/adapt/order.py); `loss_alone`: of the outputs, the loss alone has a tangent if there is one, not
    all that are differentiable; `with_gradients`: whether the call is made where gradients are recorded. Raises
    CaptureError, InputError, UnsupportedOpError, AdaptError."""
    around = autocast.ambient()
    device = autocast.device_of(model, around)
    with torch.inference_mode(False), torch.enable_grad():  # a first call may be an evaluation
        with traced_as(device, around):
            exported = pass_manager.run_pass(
                "export",
                export.export,
                model,
                example_inputs,
                loss_fn,
                forms,
                compute_dtype(precision),
                loss_alone,
                with_gradients,
            )
        pass_manager.run_pass("explicit_casts", explicit_casts, exported.graph_module, around, device)
        check_types(exported.graph_module.graph, export.source_line)
        pass_manager.run_pass("grad_regions", grad_regions, exported.graph_module)
        pass_manager.run_pass("canonicalize", canonicalize, exported.graph_module)
        for adaptation in adapt:
            pass_manager.run_pass(adaptation.name, ADAPT_PASSES[adaptation.name], exported, model)
        if adapt:
            returns = exported.returns
            loss = returns.loss if returns.loss_alone else None
            returns.differentiable = differentiable_outputs(exported.graph_module, exported.inputs, loss)[
                : returns.count
            ]
        captured = pass_manager.run_pass("differentiate", export.differentiate, exported)
        if any(isinstance(a, LoRA) for a in adapt):
            check_gradients(captured)
        if compute_dtype(precision) is not None:
            pass_manager.run_pass("widen", widen, captured.graph_module)
        pass_manager.run_pass("clean", clean, captured.graph_module)
    return captured


def trace_to_plan(
    model: nn.Module, example_inputs, loss_fn: Callable | None, forms: Mapping[str, Form], precision: str = "fp32",
    adapt: Sequence[Adaptation] = (),
) -> Captured:  # fmt: skip
    """Return the same graph as `trace` does, in less time where the model has many equal blocks (see
    autopar/frontend/unroll.py)."""
    if tower := tower_of(model):
        with contextlib.suppress(CaptureError):  # a model may count its blocks, or read them all: then all are traced
            with tower.shortened():
                short = trace(model, example_inputs, loss_fn, forms, precision, adapt)
            return pass_manager.run_pass("unroll", unroll, short, tower, export.tie_map(model))
    return trace(model, example_inputs, loss_fn, forms, precision, adapt)
