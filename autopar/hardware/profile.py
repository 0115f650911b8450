"""Named hardware profiles, read from TOML (or JSON of the same form); what they hold is in autopar/hardware/schema.py.

    name, description, device_names        device_names: patterns of what such devices call themselves
    [compute]      flops_per_second (by dtype), efficiency, launch_seconds
    [memory]       bytes, bytes_per_second, efficiency; reserve_bytes if there are any
    [collectives]  reduce_scatter_lowering; overlap_slowdown if known
    [[links]]      name, devices (not in the last), latency_seconds, bytes_per_second, bucket_bytes

and, where they are known, with the fields of Host, Kernels, Nccl and Curve:

    [host]         link_bytes_per_second, memory_bytes_per_second, memory_bytes
    [kernels]      multiprocessors, tile, half_rows, half_columns, half_depth, attention, attention_backward,
                   functions_per_second, fuses
    [nccl]         generation, intra, channels, channel_bytes_per_second, nvls, copy_engine_bytes_per_second,
                   reached.KIND = { devices, bytes_per_second }, a list each
    [measured]     median_error of the curves, and [[measured.curves]] of kind, devices, stride, bytes, seconds
    [fingerprint]  texts that say where it was measured

Every table but the last has a `source`. `autopar calibrate` writes such a file for the machine that it runs on.
"""

from __future__ import annotations

import difflib
import fnmatch
import json
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ..errors import HardwareError, nearest
from .schema import Curve, Hardware, Host, Kernels, Link, Nccl, Tier

__all__ = ["Curve", "Hardware", "Host", "Kernels", "Link", "Nccl", "Tier", "load", "names"]

PROFILES = Path(__file__).parent / "profiles"
SUFFIXES = (".toml", ".json")
LOWERINGS = ("native", "all_to_all")
GENERATIONS = ("volta", "ampere", "hopper", "blackwell")
INTRA = ("nvlink", "pci")
KINDS = ("all_gather", "reduce_scatter", "all_to_all", "all_reduce", "broadcast", "send")


def load(name: str | Path | Hardware) -> Hardware:
    """Return a profile by its name ("h100", "gloo"), by a device's own name ("NVIDIA H100 80GB HBM3"), or from a TOML
    or JSON file.

    A device whose name states less memory than the profile ("A100-SXM4-40GB") keeps its own. Raises HardwareError with
    the nearest names, or with what is wrong in the file.
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
    close = difflib.get_close_matches(text, patterns, 1, 0.5)
    raise HardwareError(
        f"there is no hardware profile for {text!r}",
        fix=f"use {nearest(text, patterns if close else names())}, or a TOML file that `autopar calibrate` wrote on "
        f"such devices",
    )


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
    table = _Table(file, _parse(file))
    compute, memory, collectives = (table.inner(key) for key in ("compute", "memory", "collectives"))
    speeds = compute.inner("flops_per_second")
    tiers = tuple(
        Tier(
            name=link.text("name"),
            devices=link.whole("devices") if "devices" in link.entries else None,
            latency_seconds=link.positive("latency_seconds"),
            bytes_per_second=link.positive("bytes_per_second"),
            bucket_bytes=link.whole("bucket_bytes"),
        )
        for link in table.rows("links")
    )
    sizes = [tier.devices for tier in tiers]
    if sizes[-1] is not None or None in sizes[:-1] or sizes[:-1] != sorted(set(sizes[:-1])):
        raise HardwareError(
            f"links of {file} join {sizes} devices, which is not rising to any number",
            fix="give links from the closest to the farthest, the last one without devices",
        )
    lowering = collectives.one_of("reduce_scatter_lowering", LOWERINGS)
    host, kernels, nccl, measured, fingerprint = (
        table.inner(key) if key in table.entries else None
        for key in ("host", "kernels", "nccl", "measured", "fingerprint")
    )
    groups = {
        "compute": compute,
        "memory": memory,
        "host": host,
        "collectives": collectives,
        "kernels": kernels,
        "nccl": nccl,
    }
    groups |= {"measured": measured} | {f"links.{tier.name}": link for tier, link in zip(tiers, table.rows("links"))}
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
        links=tiers,
        reduce_scatter_lowering=lowering,
        overlap_slowdown=collectives.at_least_one("overlap_slowdown")
        if "overlap_slowdown" in collectives.entries
        else 2.0,
        kernels=_kernels(kernels) if kernels else Kernels(),
        nccl=_nccl(nccl) if nccl else None,
        curves=tuple(_curve(row) for row in measured.rows("curves")) if measured else (),
        curves_error=measured.zero_or_more("median_error") if measured else 0.0,
        reserve_bytes=memory.whole("reserve_bytes") if "reserve_bytes" in memory.entries else 0,
        host=_host(host) if host else None,
        fingerprint={key: fingerprint.text(key) for key in sorted(fingerprint.entries)} if fingerprint else {},
    )


def _host(table: _Table) -> Host:
    link, memory = (table.positive(key) for key in ("link_bytes_per_second", "memory_bytes_per_second"))
    return Host(link, memory, memory_bytes=table.whole("memory_bytes"))


def _kernels(table: _Table) -> Kernels:
    names = ("half_rows", "half_columns", "half_depth", "functions_per_second")
    numbers = {key: table.zero_or_more(key) for key in names if key in table.entries}
    shares = {key: table.share(key) for key in ("attention", "attention_backward") if key in table.entries}
    waves = {}
    if "multiprocessors" in table.entries:
        rows, columns = table.numbers("tile", 2)
        waves = {"multiprocessors": table.whole("multiprocessors"), "tile": (int(rows), int(columns))}
    return Kernels(**waves, **numbers, **shares, fuses=table.entries.get("fuses", True) is True)


def _nccl(table: _Table) -> Nccl:
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


def _curve(row: _Table) -> Curve:
    bytes_ = row.numbers("bytes", rising=True)
    seconds = row.numbers("seconds", len(bytes_))
    devices = row.whole("devices")
    if devices < 2:
        raise HardwareError(f"{row.file}: {row.path}devices is 1, which sends nothing", fix="leave this curve out")
    return Curve(row.one_of("kind", KINDS), devices, row.whole("stride"), bytes_, seconds)


@dataclass(frozen=True)
class _Table:
    """One table of a profile; its methods return an entry or raise HardwareError naming the file and the key."""

    file: Path
    entries: Mapping[str, object]
    path: str = ""

    def _get(self, key: str, kind: type | tuple[type, ...], wanted: str, fits=lambda value: True):
        value = self.entries.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
            shown = "missing" if value is None else repr(value)
            raise HardwareError(f"{self.file}: {self.path}{key} is {shown}", fix=f"set {self.path}{key} to {wanted}")
        return value

    def text(self, key: str) -> str:
        return self._get(key, str, "a text", fits=str.strip)

    def positive(self, key: str) -> float:
        return float(self._get(key, (int, float), "a positive number", fits=lambda value: 0 < value < math.inf))

    def zero_or_more(self, key: str) -> float:
        return float(self._get(key, (int, float), "0 or a positive number", fits=lambda value: 0 <= value < math.inf))

    def at_least_one(self, key: str) -> float:
        return float(self._get(key, (int, float), "a number of 1 or more", fits=lambda value: 1 <= value < math.inf))

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        return self._get(key, str, " or ".join(known), fits=known.__contains__)

    def numbers(self, key: str, length: int | None = None, rising: bool = False) -> tuple[float, ...]:
        """Return a list of positive numbers, `length` of them if given, each larger than the last if `rising`."""

        def fits(values: list) -> bool:
            positive = all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < math.inf for v in values)
            right = len(values) == (length or len(values) or 1)
            return positive and right and (not rising or all(a < b for a, b in zip(values, values[1:])))

        wanted = f"a list of {length or ''} positive numbers".replace("  ", " ") + (
            ", each larger than the last" if rising else ""
        )
        return tuple(float(v) for v in self._get(key, list, wanted, fits))

    def share(self, key: str) -> float:
        return float(self._get(key, (int, float), "a share above 0 and up to 1", fits=lambda value: 0 < value <= 1))

    def whole(self, key: str) -> int:
        return int(
            self._get(key, (int, float), "a whole number above 0", fits=lambda v: 1 <= v < math.inf and v == int(v))
        )

    def inner(self, key: str) -> _Table:
        return _Table(self.file, self._get(key, dict, "a table", fits=len), f"{self.path}{key}.")

    def rows(self, key: str) -> list[_Table]:
        rows = self._get(key, list, "a list of tables", fits=lambda v: v and all(isinstance(row, dict) for row in v))
        return [_Table(self.file, row, f"{self.path}{key}[{i}].") for i, row in enumerate(rows)]
