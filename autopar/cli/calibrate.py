"""`autopar calibrate`: measure this machine, or under torchrun all machines, and write a profile for --hardware."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

from ..errors import HardwareError
from . import common

EXAMPLE = "autopar calibrate --backend gloo --world 2 --out mine.toml"


def add(subparsers) -> None:
    """Declare `autopar calibrate` and its arguments."""
    parser = common.command(subparsers, "calibrate", "measure this machine and write a hardware profile", EXAMPLE, run)
    parser.add_argument(
        "--backend", choices=("gloo", "nccl"), help="gloo on processors, nccl on GPUs (default: what is there)"
    )
    parser.add_argument(
        "--world", type=common.count, metavar="N", help="processes, one a device (default: all GPUs, or 2)"
    )
    parser.add_argument(
        "--base", metavar="PROFILE", help="profile for what is not measured (default: that of the device's name)"
    )
    parser.add_argument("--quick", action="store_true", help="fewer sizes and rounds, fp32 only")
    parser.add_argument("--out", required=True, metavar="FILE", help="profile to write, .toml or .json")


def run(args: argparse.Namespace) -> int:
    """Measure this machine, write the profile to --out and print what was measured."""
    out = Path(args.out)
    if out.suffix not in (".toml", ".json"):
        raise HardwareError(f"cannot write {args.out} as a profile", fix="name it .toml or .json")
    import torch

    from .. import calibrate
    from ..calibrate import launch
    from ..hardware import profile as hardware

    backend = args.backend or ("nccl" if torch.cuda.is_available() else "gloo")
    mark = calibrate.fingerprint(backend)
    base = hardware.load(args.base or (mark["device"] if backend == "nccl" else "cpu-gloo"))
    if launch.is_joined():
        measured = launch.joined(backend, args.world, args.quick)
        if os.environ["RANK"] != "0":
            return 0
    else:
        world = args.world or (torch.cuda.device_count() if backend == "nccl" else 2)
        launch.check(backend, world)
        with common.progress() as report:
            report(f"measuring with {world} processes")
            measured = calibrate.measurements(backend, world, args.quick)
    profile = calibrate.to_profile(measured, base, out.stem, mark)
    out.write_text(calibrate.text(calibrate.to_table(profile), as_json=out.suffix == ".json"))
    common.show(summary(profile))
    print(f"written to {out}: use it with --hardware {out}")
    return 0


def summary(profile) -> str:
    """Return what was measured as text, one line each."""
    speeds = ", ".join(
        f"{dtype} {speed * profile.flops_efficiency / 1e9:.4g}" for dtype, speed in profile.flops_per_second.items()
    )
    attention = next(iter(profile.attention.values()))
    measured = [tier for tier in profile.links if f"links.{tier.name}: autopar calibrate" in profile.source]
    lines = [
        ("products", f"{speeds} GFLOP/s"),
        ("attention", f"{max(attention.shares):.0%} of the peak, backward {attention.backward:.0%} of that"),
        ("copy", f"{profile.reached_memory_bytes_per_second / 1e9:.4g} GB/s"),
        ("launch", f"{profile.launch_seconds * 1e6:.3g} us"),
        *((t.name, f"{t.latency_seconds * 1e6:.0f} us and {t.bytes_per_second / 1e9:.3g} GB/s sent") for t in measured),
    ]
    for curve in profile.curves:
        (small, large), (least, most) = curve.bytes_[:: len(curve.bytes_) - 1], curve.seconds[:: len(curve.bytes_) - 1]
        what = f"{curve.kind} of {curve.devices}" + (f", every {curve.stride}th" if curve.stride > 1 else "")
        lines.append(
            (
                what,
                f"{least * 1e6:.0f} us for {small / 1024:.0f} KiB to {most * 1e3:.2f} ms for {large / 2**20:.0f} MiB",
            )
        )
    if profile.curves:
        lines.append(("at once", f"{profile.overlap_slowdown:.2f} times the longer of a collective and products"))
        lines.append(("between points", f"median error {profile.curves_error:.0%}"))
    width = max(len(name) for name, _ in lines)
    return "".join(f"{name:{width}}  {text}\n" for name, text in lines)
