"""`autopar.compile` and `autopar.plan`: the compiler's steps in the order they run.

    export -> canonicalize -> differentiate -> clean -> plan -> lower (localize, recompute, lower_ops, partition) -> run

Everything up to the plan is the same for both; `plan` stops there and needs no process group, no device and no weights.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from . import capture, debug, hardware
from ._torch import tree_map
from .calls import split_example
from .capture import Captured
from .errors import AutoparError, InputError, MeshError, StrategyError
from .hardware import Hardware
from .layout import Layout
from .mesh import Mesh
from .passes.canonicalize import canonicalize
from .passes.clean import clean
from .plan import Plan
from .planner.make import PlanOptions, make_plan

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}


def trace(model: nn.Module, example_inputs, loss_fn: Callable | None = None) -> Captured:
    """The annotated joint graph of a model's call, in canonical ops. Raises CaptureError, InputError, UnsupportedOpError."""
    exported = debug.run_pass("export", capture.export, model, example_inputs, loss_fn)
    debug.run_pass("canonicalize", canonicalize, exported.graph_module)
    captured = debug.run_pass("differentiate", capture.differentiate, exported)
    debug.run_pass("clean", clean, captured.graph_module)
    return captured


def plan(
    model: nn.Module,
    mesh,
    example_inputs,
    *,
    hardware: str | Path | Hardware | None = None,
    memory: float | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    strategy: str | None = None,
    pin: Mapping[str, str] | None = None,
    loss_fn: Callable | None = None,
    strict: bool = False,
    baselines: bool = True,
    name: str | None = None,
    report: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan a model for a mesh without running anything: `model` and `example_inputs` may be on the meta device.

    `mesh`: text ("dp=8,tp=8"), autopar.Mesh, or a DeviceMesh. `hardware`: a profile's name, a device's own name, a TOML file
    (default h100, or the DeviceMesh's own device). `memory`: bytes or text such as "40GiB" (default the hardware's). `pin`:
    glob of a parameter's name -> layout, "tp:S(0)" or "R". `baselines=False` leaves the expert strategies out.
    Raises subclasses of AutoparError."""
    checked = _mesh(mesh)
    report("tracing the model")
    captured = trace(_in_precision(model, precision), _example_in_precision(example_inputs, precision), loss_fn)
    options = _options(mesh, hardware, memory, optimizer, precision, strategy, pin, strict, {}, baselines)
    return make_plan(captured, checked, options, name or type(model).__name__, report)


def compile(
    model: nn.Module,
    mesh,
    example_inputs=None,
    *,
    inputs: str = "global",
    plan: Plan | str | Path | None = None,
    hardware: str | Path | Hardware | None = None,
    memory: float | str | None = None,
    optimizer: str = "adamw",
    precision: str = "fp32",
    strategy: str | None = None,
    pin: Mapping[str, str] | None = None,
    adapt=(),
    loss_fn: Callable | None = None,
    weights=None,
    strict: bool = False,
) -> nn.Module:
    """A drop-in module that runs `model` on all devices of a DeviceMesh: same call, same gradients for the same global batch.

    `inputs="global"`: every rank passes the same global batch; "local": each rank its own part of it (example_inputs too).
    `plan`: a Plan or the path of one, instead of planning. Other arguments as in `autopar.plan`. The source model's
    parameters are taken over. Without example_inputs the model is compiled at its first call.
    Raises subclasses of AutoparError, the same one on every rank."""
    if inputs not in ("global", "local"):
        raise InputError(f"inputs is {inputs!r}", fix='use "global" or "local"')
    for value, what in ((adapt, "adapt="), (weights, "weights=")):
        if value:
            raise StrategyError(f"{what} is not available in this version", fix="see the README's status table")
    if precision != "fp32":
        raise StrategyError(
            f"compile runs in the model's own dtype, precision={precision!r} can only be planned",
            fix="leave precision out",
        )
    if not hasattr(mesh, "get_group"):
        raise MeshError(
            f"compile needs a DeviceMesh, got {type(mesh).__name__}",
            fix='torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))',
        )
    arguments = dict(
        inputs=inputs, plan=plan, hardware=hardware, memory=memory, optimizer=optimizer, precision=precision,
        strategy=strategy, pin=pin, loss_fn=loss_fn, strict=strict,
    )  # fmt: skip
    if example_inputs is None:
        return _CompiledAtFirstCall(model, mesh, arguments)
    return _compile(model, mesh, example_inputs, **arguments)


def _compile(model, device_mesh, example_inputs, *, inputs, plan, hardware, memory, optimizer, precision, strategy, pin,
             loss_fn, strict):  # fmt: skip
    from .runtime import agree, process_groups
    from .runtime.module import ParallelModule

    mesh = Mesh.of(device_mesh)
    process_groups.check_world(mesh, device_mesh)
    example, fixed_inputs = _global_example(example_inputs, inputs, mesh)
    captured = trace(model, example, loss_fn)
    fixed = {
        n.name: fixed_inputs[n.meta["role"].name]
        for n in captured.graph.nodes
        if n.op == "placeholder" and n.meta["role"].kind == "input" and n.meta["role"].name in fixed_inputs
    }

    def make() -> dict:
        if plan is not None:
            return (plan if isinstance(plan, Plan) else Plan.load(plan)).to_json()
        options = _options(device_mesh, hardware, memory, optimizer, precision, strategy, pin, strict, fixed, True)
        return make_plan(captured, mesh, options, type(model).__name__).to_json()

    agreed = Plan.from_json(agree.from_rank_zero(make))
    agreed.check_fits(captured.graph, mesh)
    debug.planned(agreed)
    return ParallelModule(model, captured, agreed, mesh, device_mesh, inputs)


class _CompiledAtFirstCall(nn.Module):
    """What `compile(model, mesh)` returns without example_inputs."""

    def __init__(self, model: nn.Module, device_mesh, arguments: dict):
        super().__init__()
        object.__setattr__(self, "_pending", (model, device_mesh, arguments))

    def forward(self, *args, **kwargs):
        if "compiled" not in self._modules:
            model, device_mesh, arguments = self._pending
            self.compiled = _compile(model, device_mesh, (args, kwargs), **arguments)
        return self.compiled(*args, **kwargs)

    def named_parameters(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True):
        if "compiled" not in self._modules:
            raise InputError(
                "the model is compiled at its first call and has no parameters before it",
                fix="pass example_inputs to autopar.compile, then build the optimizer",
            )
        return self.compiled.named_parameters(prefix, recurse, remove_duplicate)

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            if "compiled" in self.__dict__.get("_modules", {}):
                return getattr(self._modules["compiled"], name)
            raise


def _options(mesh, profile, memory, optimizer, precision, strategy, pin, strict, fixed, baselines) -> PlanOptions:
    return PlanOptions(
        hardware.load(profile if profile is not None else _default_hardware(mesh)),
        memory_bytes=_bytes(memory), optimizer=optimizer, precision=precision, strategy=strategy, pin=dict(pin or {}),
        fixed=fixed, strict=strict, baselines=baselines,
    )  # fmt: skip


def _mesh(mesh) -> Mesh:
    if isinstance(mesh, int):
        raise MeshError(
            "planning for a number of devices without a mesh is not available in this version",
            fix=f'name the axes, such as "dp={mesh}"',
        )
    return Mesh.of(mesh)


def _default_hardware(mesh) -> str:
    kind = getattr(mesh, "device_type", None)
    if kind == "cpu":
        return "cpu-gloo"
    return torch.cuda.get_device_name() if kind == "cuda" else "h100"


def _bytes(memory: float | str | None) -> float | None:
    if memory is None:
        return None
    match = re.fullmatch(r"\s*([0-9.]+(?:[eE][+-]?\d+)?)\s*([A-Za-z]*)\s*", str(memory))
    if not match or match.group(2).lower() not in _UNITS or float(match.group(1)) <= 0:
        raise StrategyError(f"cannot read {memory!r} as a memory limit", fix='give bytes, or text such as "40GiB"')
    return float(match.group(1)) * _UNITS[match.group(2).lower()]


def _in_precision(model: nn.Module, precision: str) -> nn.Module:
    """A copy on the meta device that computes in the given precision; the model itself for fp32."""
    if precision != "bf16":
        return model
    memo: dict[int, object] = {}
    for p in model.parameters():
        memo[id(p)] = nn.Parameter(torch.empty_like(p, device="meta", dtype=torch.bfloat16), p.requires_grad)
    for b in model.buffers():
        memo[id(b)] = b.detach()
    return copy.deepcopy(model, memo)


def _example_in_precision(example_inputs, precision: str):
    if precision != "bf16":
        return example_inputs
    return tree_map(
        lambda x: x.to(torch.bfloat16) if isinstance(x, torch.Tensor) and x.is_floating_point() else x, example_inputs
    )


def _global_example(example_inputs, inputs: str, mesh: Mesh):
    """The example with global shapes, and the layouts that the user's own tensors fix, by input name."""
    from .calls import CallSignature
    from .runtime.dtensors import layout_of

    args, kwargs = split_example(example_inputs)
    signature, tensors = CallSignature.of(args, kwargs)
    fixed: dict[str, Layout] = {}
    whole = []
    axes = tuple(a for a in mesh.names if a.startswith("dp") or a == "data") or mesh.names[:1]
    count = 1
    for axis in axes:
        count *= mesh.size(axis)
    for name, x in zip(signature.tensor_names, tensors):
        if isinstance(x, DTensor):
            fixed[name] = layout_of(x.placements, x.dim(), mesh, name)
            x = torch.empty(x.shape, dtype=x.dtype)
        elif inputs == "local" and x.dim():
            fixed[name] = Layout((axes, *((),) * (x.dim() - 1)))
            x = torch.cat([x] * count)
        elif inputs == "local":
            fixed[name] = Layout(())
        if x.requires_grad:
            raise AutoparError(
                f"{name} requires a gradient, which a compiled model does not give", fix="detach the input"
            )
        whole.append(x)
    return signature.rebuild(whole), fixed
