"""Price processes that share the cores of a CPU.

Of as many processes as cores each computes, copies and sends as it was measured. Of twice as many each has half a core,
and takes twice as long for all that it does there: launches, products, copies and collectives within the machine, in
which gloo's processes copy too. What passes between machines waits for the network, and stays as it is.
"""

from __future__ import annotations

from dataclasses import replace

from .schema import Hardware


def on_cores(hardware: Hardware, cores_per_device: float) -> Hardware:
    """Return the profile of devices that have so many cores each, at most one; the same where it was measured so, or is
    of devices that share no cores."""
    if not hardware.cores_per_device:
        return hardware
    share = min(1.0, cores_per_device) / hardware.cores_per_device
    if share == 1.0:
        return hardware
    closest, *farther = hardware.links
    closest = replace(
        closest,
        latency_seconds=closest.latency_seconds / share,
        bytes_per_second=closest.bytes_per_second * share,
    )
    kernels = replace(hardware.kernels, functions_per_second=hardware.kernels.functions_per_second * share)
    curves = tuple(
        replace(curve, seconds=tuple(seconds / share for seconds in curve.seconds))
        if closest.devices is None or curve.span <= closest.devices
        else curve
        for curve in hardware.curves
    )
    return replace(
        hardware,
        name=f"{hardware.name} at {cores_per_device:.2g} cores a process",
        flops_per_second={dtype: speed * share for dtype, speed in hardware.flops_per_second.items()},
        memory_bytes_per_second=hardware.memory_bytes_per_second * share,
        launch_seconds=hardware.launch_seconds / share,
        cores_per_device=min(1.0, cores_per_device),
        links=(closest, *farther),
        kernels=kernels,
        curves=curves,
    )
