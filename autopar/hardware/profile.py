"""Named hardware profiles, read from TOML (or JSON of the same form); what they hold is in autopar/hardware/schema.py.

    name, description, device_names        device_names: patterns of what such devices call themselves
    [compute]      flops_per_second (by dtype), efficiency, launch_seconds; sustained, cores_per_device if known
    [memory]       bytes, bytes_per_second, efficiency; reserve_bytes if there are any
    [collectives]  reduce_scatter_lowering; overlap_slowdown if known
    [[links]]      name, devices (not in the last), latency_seconds, bytes_per_second, bucket_bytes; of a network above
                   the node also rails, the cards of a node that its devices share, each of bytes_per_second, and
                   oversubscription, by how much more its switches take in than they lead out

and, where they are known, with the fields of Host, Kernels, Products, Attention, Experts, Nccl and
Curve:

    [host]         link_bytes_per_second, memory_bytes_per_second, memory_bytes
    [kernels]      multiprocessors, half_rows, half_columns, half_depth, functions_per_second, instructions_per_second
    [products]     a table of Products for each kind: dense, grouped, fp8, fp8_block
    [attention]    a table of Attention for each kernel: flash, cudnn, flash3
    [experts]      hidden_passes, width_passes, start_seconds
    [nccl]         generation, intra, channels, channel_bytes_per_second, nvls, copy_engine_bytes_per_second,
                   reached.KIND = { devices, bytes_per_second }, a list each
    [measured]     median_error of the curves, and [[measured.curves]] of kind, devices, stride, bytes, seconds
    [errors]       by table of measured operators, the mean relative error of each size class
    [published]    utilization, by type: the largest share of the peak that model FLOPs reached in published runs
    [fingerprint]  texts that say where it was measured

Every table but the last has a `source`. `autopar calibrate` writes such a file for the machine that it runs on.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import re
import sys
import tomllib
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

from ..errors import HardwareError, nearest
from .kernels import Attention, Experts, Kernels, Products
from .of_device import profile_of
from .schema import Curve, Hardware, Host, Link, Nccl, Tier
from .table import Table

__all__ = [
    "Attention",
    "Curve",
    "Experts",
    "Hardware",
    "Host",
    "Kernels",
    "Link",
    "Nccl",
    "Products",
    "Tier",
    "load",
    "names",
]

PROFILES = Path(__file__).parent / "profiles"
SUFFIXES = (".toml", ".json")
LOWERINGS = ("native", "all_to_all")
GENERATIONS = ("volta", "ampere", "hopper", "blackwell")
INTRA = ("nvlink", "pci")
ATTENTION_KERNELS = ("flash", "cudnn", "flash3")
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")


def load(name: str | Path | Hardware) -> Hardware:
    """Return a profile by its name ("h100", "gloo"), by a device's own name ("NVIDIA H100 80GB HBM3"), or from a TOML
    or JSON file.

    A device whose name states less memory than the profile ("A100-SXM4-40GB") keeps its own. A GPU of this machine that
    no profile names gets one made of its properties, with a warning (autopar/hardware/of_device.py). Raises
    HardwareError with the nearest names, or with what is wrong in the file.
    """
    if isinstance(name, Hardware):
        return name
    text = str(name)
    if text.endswith(SUFFIXES):
        return _read(Path(text).expanduser())
    patterns = _patterns()
    for pattern, file in patterns.items():
        if fnmatch.fnmatchcase(text.lower(), pattern.lower()):
            hardware, stated = _read(file), re.search(r"(\d+) ?gb", text.lower())
            memory_bytes = min(hardware.memory_bytes, int(stated[1]) * 10**9) if stated else hardware.memory_bytes
            return replace(hardware, memory_bytes=memory_bytes)
    if (properties := _properties_of(text)) is not None:
        return profile_of(properties, load)
    close = difflib.get_close_matches(text, patterns, 1, 0.5)
    raise HardwareError(
        f"there is no hardware profile for {text!r}",
        fix=f"use {nearest(text, patterns if close else names())}, or a TOML file that `autopar calibrate` wrote on "
        f"such devices",
    )


def _properties_of(name: str):
    """Return the properties of the GPU of this name that this machine has, None if it has none, or if this process has
    nothing to do with GPUs."""
    torch: Any = sys.modules.get("torch")
    for index in range(torch.cuda.device_count() if torch is not None else 0):
        properties = torch.cuda.get_device_properties(index)
        if properties.name.lower() == name.lower():
            return properties
    return None


def names() -> list[str]:
    """Return the names of the profiles that come with autopar."""
    return sorted(file.stem for file in PROFILES.glob("*.toml"))


@cache
def _patterns() -> dict[str, Path]:
    """Map each pattern of device names to its profile; each profile's own name is one. They are compared without regard
    to case."""
    patterns = {}
    for file in sorted(PROFILES.glob("*.toml")):
        for pattern in (file.stem, *_parse(file)["device_names"]):
            patterns[pattern] = file
    return patterns


def _parse(file: Path) -> dict:
    parse = json.loads if file.suffix == ".json" else tomllib.loads
    try:
        table = parse(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"cannot read {file}: {error.strerror}", fix=f"use {', '.join(names())}") from error
    except ValueError as error:
        written = file.suffix[1:].upper()
        raise HardwareError(
            f"{file} is not {written}: {error}", fix=f"start from a copy of {PROFILES / 'h100.toml'}"
        ) from error
    if not isinstance(table, dict):
        raise HardwareError(f"{file} is not a table", fix=f"start from a copy of {PROFILES / 'h100.toml'}")
    return table


def _read(file: Path) -> Hardware:
    """Read the profile in a file. Raises HardwareError on a missing or impossible entry."""
    table = Table(file, _parse(file))
    compute, memory, collectives = (table.inner(key) for key in ("compute", "memory", "collectives"))
    speeds = compute.inner("flops_per_second")
    tiers = tuple(_tier(link, i) for i, link in enumerate(table.rows("links")))
    sizes = [tier.devices for tier in tiers]
    if sizes[-1] is not None or None in sizes[:-1] or sizes[:-1] != sorted(set(sizes[:-1])):
        raise HardwareError(
            f"links of {file} join {sizes} devices, which is not rising to any number",
            fix="give links from the closest to the farthest, the last one without devices",
        )
    tiers = tuple(replace(t, bytes_per_second=t.bytes_per_second * t.share(tiers[0].devices)) for t in tiers)
    lowering = collectives.one_of("reduce_scatter_lowering", LOWERINGS)
    host, kernels, products, attention, experts, nccl, measured, errors, published, fingerprint = (
        table.inner(key) if key in table.entries else None
        for key in (
            "host",
            "kernels",
            "products",
            "attention",
            "experts",
            "nccl",
            "measured",
            "errors",
            "published",
            "fingerprint",
        )
    )
    groups = {
        "compute": compute,
        "memory": memory,
        "host": host,
        "collectives": collectives,
        "kernels": kernels,
        "products": products,
        "attention": attention,
        "experts": experts,
        "nccl": nccl,
    }
    groups |= {"measured": measured, "errors": errors, "published": published} | {
        f"links.{tier.name}": link for tier, link in zip(tiers, table.rows("links"))
    }
    sources = {name: group.text("source") for name, group in groups.items() if group}
    return Hardware(
        name=table.text("name"),
        description=table.text("description"),
        source="\n".join(f"{name}: {' '.join(source.split())}" for name, source in sources.items()),
        flops_per_second={dtype: speeds.positive(dtype) for dtype in sorted(speeds.entries)},
        flops_efficiency=compute.share("efficiency"),
        memory_bytes_per_second=memory.positive("bytes_per_second"),
        memory_efficiency=memory.share("efficiency"),
        memory_bytes=memory.whole("bytes"),
        launch_seconds=compute.positive("launch_seconds"),
        cores_per_device=compute.share("cores_per_device") if "cores_per_device" in compute.entries else 0.0,
        links=tiers,
        reduce_scatter_lowering=lowering,
        overlap_slowdown=collectives.at_least_one("overlap_slowdown")
        if "overlap_slowdown" in collectives.entries
        else 2.0,
        kernels=_kernels(kernels) if kernels else Kernels(),
        products={kind: _products(inner) for kind, inner in products.inners()} if products else {},
        attention=_attentions(attention) if attention else {},
        sustained=compute.share("sustained") if "sustained" in compute.entries else 1.0,
        experts=_experts(experts) if experts else None,
        nccl=_nccl(nccl) if nccl else None,
        curves=tuple(_curve(row) for row in measured.rows("curves")) if measured else (),
        curves_error=measured.zero_or_more("median_error") if measured else 0.0,
        errors={
            name: {key: inner.zero_or_more(key) for key in sorted(inner.entries)} for name, inner in errors.inners()
        }
        if errors
        else {},
        reserve_bytes=_reserve_bytes(memory) if "reserve_bytes" in memory.entries else 0,
        published_utilization={
            dtype: speeds.share(dtype)
            for speeds in [published.inner("utilization")]
            for dtype in sorted(speeds.entries)
        }
        if published
        else {},
        host=_host(host) if host else None,
        fingerprint={key: fingerprint.text(key) for key in sorted(fingerprint.entries)} if fingerprint else {},
    )


def _reserve_bytes(memory: Table) -> int:
    """Read what no tensor gets of the memory."""
    reserve, all_bytes = memory.whole("reserve_bytes"), memory.whole("bytes")
    if reserve >= all_bytes:
        raise HardwareError(
            f"{memory.file}: {memory.path}reserve_bytes is {reserve:.4g}, all of the {all_bytes:.4g} bytes",
            fix=f"set {memory.path}reserve_bytes to what the device keeps to itself, some 1e9",
        )
    return reserve


def _tier(table: Table, index: int) -> Tier:
    """Read a tier, with the speed of one card."""
    table.only(field.name for field in fields(Tier))
    if index == 0 and {"rails", "oversubscription"} & table.entries.keys():
        raise HardwareError(
            f"{table.file}: {table.path}rails or oversubscription is of the links inside a node",
            fix="give them for a network above the node",
        )
    factor = "oversubscription"
    return Tier(
        name=table.text("name"),
        devices=table.whole("devices") if "devices" in table.entries else None,
        latency_seconds=table.positive("latency_seconds"),
        bytes_per_second=table.positive("bytes_per_second"),
        bucket_bytes=table.whole("bucket_bytes"),
        rails=table.whole("rails") if "rails" in table.entries else None,
        oversubscription=table.at_least_one(factor) if factor in table.entries else 1.0,
    )


def _host(table: Table) -> Host:
    link, memory = (table.positive(key) for key in ("link_bytes_per_second", "memory_bytes_per_second"))
    return Host(link, memory, memory_bytes=table.whole("memory_bytes"))


def _kernels(table: Table) -> Kernels:
    table.only(field.name for field in fields(Kernels))
    halves = ("half_rows", "half_columns", "half_depth", "functions_per_second", "instructions_per_second")
    numbers = {key: table.zero_or_more(key) for key in halves if key in table.entries}
    many = table.whole("multiprocessors") if "multiprocessors" in table.entries else 0
    return Kernels(many, **numbers)


def _products(table: Table) -> Products:
    table.only(field.name for field in fields(Products))
    needed = ("share", "tile_bytes_per_second", "memory_bytes_per_second")
    optional = {f.name for f in fields(Products)} & table.entries.keys() | {"start_seconds", "fill_seconds"}
    numbers = {key: table.positive(key) for key in needed}
    return Products(**{key: table.zero_or_more(key) for key in sorted(optional)} | numbers)


def _attentions(table: Table) -> dict[str, Attention]:
    table.only(ATTENTION_KERNELS)
    return {kernel: _attention(inner) for kernel, inner in table.inners()}


def _attention(table: Table) -> Attention:
    table.only(field.name for field in fields(Attention))
    head_dims = table.numbers("head_dims", rising=True)
    rest = sorted(table.entries.keys() - {"head_dims", "shares", "source"})
    return Attention(head_dims, table.numbers("shares", len(head_dims)), **{k: table.zero_or_more(k) for k in rest})


def _experts(table: Table) -> Experts:
    names = [field.name for field in fields(Experts)]
    table.only(names)
    return Experts(*(table.zero_or_more(key) for key in names))


def _nccl(table: Table) -> Nccl:
    reached = table.inner("reached") if "reached" in table.entries else None
    points = {}
    for kind in reached.entries if reached else ():
        if kind not in KINDS:
            raise HardwareError(f"{table.file}: {reached.path}{kind} is no collective", fix=f"use {', '.join(KINDS)}")
        row = reached.inner(kind)
        devices = row.numbers("devices", rising=True)
        points[kind] = tuple(zip(map(int, devices), row.numbers("bytes_per_second", len(devices))))
    return Nccl(
        generation=table.one_of("generation", GENERATIONS),
        intra=table.one_of("intra", INTRA),
        channels=table.whole("channels"),
        channel_bytes_per_second=table.positive("channel_bytes_per_second"),
        nvls=table.entries.get("nvls", False) is True,
        copy_engine_bytes_per_second=(
            table.positive("copy_engine_bytes_per_second") if "copy_engine_bytes_per_second" in table.entries else 0.0
        ),
        reached=points,
    )


def _curve(row: Table) -> Curve:
    bytes_ = row.numbers("bytes", rising=True)
    seconds = row.numbers("seconds", len(bytes_))
    devices = row.whole("devices")
    if devices < 2:
        raise HardwareError(f"{row.file}: {row.path}devices is 1, which sends nothing", fix="leave this curve out")
    return Curve(row.one_of("kind", KINDS), devices, row.whole("stride"), bytes_, seconds)
