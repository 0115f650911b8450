"""Read what a user says of planning into `PlanOptions`: units of bytes, pins and forbidden layouts, the hardware of a
mesh."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch
from torch import nn

from ..cost.compute import COMPILED, EAGER
from ..errors import StrategyError
from ..frontend.precision import AUTO, precision_name
from ..hardware.profile import load as load_hardware
from ..hardware.schema import Hardware
from ..plans.expert_balance import ExpertBalance
from .spmd.plan_options import AUTO_EXPERTS, IN_DOUBT, PlanOptions

PIPELINES = "pipelines"  # of `baselines`: experts' pipelines are costed beside a plan without stages, too


def options_of(
    mesh,
    hardware,
    memory,
    optimizer,
    precision,
    strategy,
    pin,
    strict,
    fixed,
    baselines,
    forbid=None,
    micro_batches=1,
    offload="none",
    on_host=(),
    reduce_dtype=None,
    state_dtype=None,
    execution=EAGER,
    expert_load=1.0,
    expert_capacity=None,
    hot_experts=AUTO_EXPERTS,
) -> PlanOptions:
    """Read the arguments of `autopar.plan` and `compile` as PlanOptions, checked as far as they can be without a model.
    Raise StrategyError or HardwareError for what cannot be right."""
    for what, value in (("optimizer", optimizer), ("strategy", "" if strategy is None else strategy)):
        if not isinstance(value, str):
            raise StrategyError(f"{what} is a {type(value).__name__}, not text", fix="use a name: adamw, or fsdp")
    if not isinstance(baselines, bool) and baselines not in (PIPELINES, IN_DOUBT):
        raise StrategyError(f"cannot read baselines={baselines!r:.80}", fix=f'give True, False or "{PIPELINES}"')
    if pin is not None and not (
        isinstance(pin, Mapping) and all(isinstance(x, str) for pair in pin.items() for x in pair)
    ):
        raise StrategyError(
            f"cannot read {pin!r:.80} as pins", fix='map globs to layouts, such as {"*.c_fc.weight": "tp:S(0)"}'
        )
    forbidden = (
        {g: [x] if isinstance(x, str) else x for g, x in forbid.items()}
        if isinstance(forbid, Mapping)
        else forbid or {}
    )
    if not isinstance(forbidden, Mapping) or not all(
        isinstance(layouts, Sequence) and all(isinstance(x, str) for x in (glob, *layouts))
        for glob, layouts in forbidden.items()
    ):
        raise StrategyError(
            f"cannot read {forbid!r:.80} as what is forbidden", fix='map globs to layouts, such as {"*.bias": "R"}'
        )
    expert_load = _load_of(expert_load)
    if expert_capacity is not None:
        _check_number("expert_capacity", expert_capacity)
    if not isinstance(hot_experts, (int, str)):
        raise StrategyError(
            f"cannot copy hot_experts={hot_experts!r:.80} of each layer", fix='give a number, or "auto"'
        )
    profile = hardware_of(mesh, hardware)
    return PlanOptions(
        profile,
        memory_bytes=bytes_of_text(memory),
        optimizer=optimizer,
        precision=precision_on(mesh, profile, precision),
        strategy=strategy,
        pin=dict(pin or {}),
        forbid=tuple((glob, layout) for glob, layouts in forbidden.items() for layout in layouts),
        fixed=fixed,
        strict=strict,
        baselines=baselines,
        micro_batches=micro_batches,
        offload=offload,
        on_host=frozenset(on_host),
        reduce_dtype=None if reduce_dtype is None else precision_name(reduce_dtype),
        state_dtype=None if state_dtype is None else precision_name(state_dtype),
        execution=execution,
        expert_load=expert_load,
        expert_capacity=expert_capacity,
        hot_experts=hot_experts,
    )


def _load_of(value) -> float | tuple[float, ...]:
    """Read what is said of the rows of experts: the load of the busiest device, a measured balance that says it, or
    the rows of each expert. Raise StrategyError for anything else."""
    value = value.load if isinstance(value, ExpertBalance) else value
    if not isinstance(value, Sequence) or isinstance(value, str):
        _check_number("expert_load", value)
        return value
    for share in value:
        _check_number("expert_load", share)
    return tuple(map(float, value))


def _check_number(what: str, value) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise StrategyError(f"{what} is {value!r:.80}", fix="give a number, 1.0 for balanced routing")


def hardware_of(mesh, hardware: str | Path | Hardware | None) -> Hardware:
    """Return the profile that is asked for, by default that of a mesh's devices. Raise HardwareError if there is
    none."""
    if hardware is not None:
        return load_hardware(hardware)
    kind = device_type_of(mesh)
    if kind == "cpu":
        return load_hardware("cpu-gloo")
    return load_hardware(torch.cuda.get_device_name() if kind == "cuda" else "h100")


def execution_on(device_type: str | None, execution: str | None, offload: str) -> str:
    """Return how the graphs of a compiled module run on devices: as is asked, by default through torch.compile on GPUs,
    but where values wait on the host, whose copies Inductor does not place, and op by op on other devices."""
    if execution is not None:
        return execution
    return COMPILED if device_type == "cuda" and offload == "none" else EAGER


def device_type_of(mesh) -> str | None:
    """Return the type of the devices of a DeviceMesh, None of a mesh without devices."""
    return getattr(mesh, "device_type", None)


def precision_on(
    mesh, hardware: str | Path | Hardware | None, precision: str | torch.dtype, model: nn.Module | None = None
) -> str:
    """Return the name of a precision. "auto" is what the profile of the devices says, but the model's own types on a
    mesh of CPUs, whatever profile is planned with, and for a model that has parameters in another type than fp32. Raise
    StrategyError for an unknown one."""
    if precision != AUTO:
        return precision_name(precision)
    own = {p.dtype for p in model.parameters() if p.is_floating_point()} if model is not None else set()
    is_free = device_type_of(mesh) != "cpu" and own <= {torch.float32}
    return hardware_of(mesh, hardware).precision if is_free else "fp32"


def bytes_of_text(memory: float | str | None) -> float | None:
    """Return a memory limit in bytes, from a number or from text such as "40GiB" (binary) or "80GB", "80G" (decimal);
    None stays None. Raise StrategyError for anything else."""
    if memory is None:
        return None
    match = re.fullmatch(r"\s*((?:\d+\.?\d*|\.\d+)(?:e[+-]?\d{1,3})?)\s*(?:([kmgt])(i?))?b?\s*", str(memory), re.I)
    if not match or not 0 < float(match[1]) < math.inf:
        fix = 'give bytes, or text such as "40GiB" (2**30) or "80GB" (1e9)'
        raise StrategyError(f"cannot read {memory!r} as a memory limit", fix=fix)
    return float(match[1]) * (1024 if match[3] else 1000) ** " kmgt".index((match[2] or " ").lower())
