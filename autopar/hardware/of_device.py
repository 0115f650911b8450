"""Make a profile for a GPU that no profile names, from what its driver says of it.

    FLOPs a second = multiprocessors * clock * FLOPs that one of them does in a clock
    bytes a second = 2 * clock of the memory * width of its bus

The rest, what share of that kernels reach and how devices are linked, is that of the profile of the nearest
architecture. FLOPs a clock, dense, with sums in fp32: the CUDA programming guide's table of arithmetic throughput and
NVIDIA's papers on Volta, Turing, Ampere, Ada, Hopper and Blackwell; GeForce cards do half of it in half precision.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace

from .schema import Hardware

GEFORCE = "geforce"
INSTRUCTIONS = 128  # of single lanes, that a multiprocessor begins in a clock


@dataclass(frozen=True)
class Architecture:
    """The FLOPs that a multiprocessor does in a clock, and the profile that says the rest."""

    half: int  # fp16, and bf16 but where a device has no products of bf16
    fp32: int
    fp64: int
    profile: str
    has_bf16: bool = True


ARCHITECTURES = {
    (7, 0): Architecture(1024, 128, 64, "v100", has_bf16=False),
    (7, 5): Architecture(1024, 128, 4, "v100", has_bf16=False),
    (8, 0): Architecture(2048, 128, 128, "a100-pcie"),
    (8, 6): Architecture(1024, 256, 4, "l40s"),
    (8, 9): Architecture(1024, 256, 4, "l40s"),
    (9, 0): Architecture(4096, 256, 256, "h100-pcie"),
    (10, 0): Architecture(8192, 256, 128, "b200"),
    (10, 3): Architecture(8192, 256, 4, "b200"),
    (12, 0): Architecture(1024, 256, 4, "l40s"),
}


def profile_of(properties, load: Callable[[str], Hardware]) -> Hardware:
    """Return a profile of a GPU with the properties of `torch.cuda.get_device_properties`, with a warning that says
    what it is made of. `load` gives a profile by its name. Clocks that the driver does not tell are the nearest
    profile's."""
    has = properties.major, properties.minor
    near = max((known for known in ARCHITECTURES if known <= has), default=min(ARCHITECTURES))
    architecture = ARCHITECTURES[near]
    is_geforce = GEFORCE in properties.name.lower()
    base = load("rtx4090" if is_geforce and architecture.profile == "l40s" else architecture.profile)
    processors = properties.multi_processor_count or base.kernels.multiprocessors
    clock_hz = 1e3 * getattr(properties, "clock_rate", 0)
    if not clock_hz:
        clock_hz = base.flops_per_second["fp32"] / (base.kernels.multiprocessors * ARCHITECTURES[near].fp32)
    by_clock = processors * clock_hz
    half = by_clock * architecture.half * (0.5 if is_geforce and near[0] in (8, 12) else 1.0)
    speeds = {"fp16": half, "fp32": by_clock * architecture.fp32, "fp64": by_clock * architecture.fp64}
    speeds["bf16"] = half if architecture.has_bf16 else speeds["fp32"]
    bytes_per_second = (
        2e3 * getattr(properties, "memory_clock_rate", 0) * getattr(properties, "memory_bus_width", 0) / 8
    )
    if not bytes_per_second:
        bytes_per_second = base.memory_bytes_per_second * processors / base.kernels.multiprocessors
    made = _scaled(base, speeds, bytes_per_second)
    warnings.warn(
        f"there is no hardware profile for {properties.name!r}: it is planned for as {processors} multiprocessors at "
        f"{clock_hz / 1e9:.2f} GHz, {speeds['bf16'] / 1e12:.0f} TFLOP/s in bf16, {bytes_per_second / 1e9:.0f} GB/s and "
        f"{properties.total_memory / 1e9:.0f} GB, kernels and links as of {base.name}; `autopar calibrate` measures it",
        stacklevel=2,
    )
    return replace(
        made,
        name=properties.name,
        description=f"{properties.name}, from its properties, kernels and links as of {base.name}",
        memory_bytes=int(0.94 * properties.total_memory),  # as h100's 80e9 of the driver's 85.5e9: fragmentation
        kernels=replace(base.kernels, multiprocessors=processors, instructions_per_second=INSTRUCTIONS * by_clock),
    )


def _scaled(base: Hardware, speeds: dict[str, float], bytes_per_second: float) -> Hardware:
    """Return the profile with these speeds, and its kernels' as much faster. Nothing of it was measured."""
    faster = speeds["fp16"] / base.flops_per_second["fp16"]
    wider = bytes_per_second / base.memory_bytes_per_second
    products = {
        kind: replace(
            own,
            tile_bytes_per_second=own.tile_bytes_per_second * faster,
            memory_bytes_per_second=own.memory_bytes_per_second * wider,
        )
        for kind, own in base.products.items()
        if not kind.startswith("fp8")
    }
    return replace(
        base,
        flops_per_second=speeds,
        memory_bytes_per_second=bytes_per_second,
        products=products,
        curves=(),
        curves_error=0.0,
        errors={},
        published_utilization={},
    )
