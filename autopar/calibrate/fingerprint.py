"""Identify the machine that a profile was measured on, and tell whether it is this one."""

from __future__ import annotations

import platform
from pathlib import Path

import torch

from ..hardware.profile import Hardware


def fingerprint(backend: str) -> dict[str, str]:
    """Describe this machine: its devices, torch, and the backend with its version."""
    if backend == "nccl":
        device, backend = torch.cuda.get_device_name(), "nccl " + ".".join(map(str, torch.cuda.nccl.version()))
    else:
        device = _processor()
    return {"device": device, "torch": torch.__version__, "backend": backend}


def stale(hardware: Hardware, backend: str) -> str:
    """Say as a warning what differs between this machine and the one that a profile was measured on; "" if nothing
    does, or if the profile was not measured. It matters where a plan is run, not where it is made."""
    here = fingerprint(backend)
    then = hardware.fingerprint
    differing = [f"{key} {then[key]} (here {here.get(key, 'none')})" for key in then if here.get(key) != then[key]]
    if not differing:
        return ""
    others = ", ".join(differing)
    return f"profile {hardware.name} was measured with {others}: its times may be wrong here; run autopar calibrate"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.processor() or "cpu",
    )
