"""What the planner knows about devices and the links between them: named profiles, read from TOML.

A profile states what a device can do at best and which share of that real kernels reach, each group of numbers with its
source. Links come in tiers: the closest joins `devices` consecutive ranks (the cards of a node), the last any number.
Every speed is bytes or operations per second, every size bytes, every time seconds.
"""

from __future__ import annotations

import difflib
import fnmatch
import math
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from .errors import HardwareError, nearest
from .mesh import Mesh

PROFILES = Path(__file__).parent / "hardware_profiles"
LOWERINGS = ("native", "all_to_all")


@dataclass(frozen=True)
class Link:
    """Cost of one mesh axis: `latency_seconds` a collective, and bytes per second that a device sends while it runs.

    `all_to_all_bytes_per_second` where that is slower than the rest (None: the same), see `Hardware.links_for`.
    """

    latency_seconds: float
    bytes_per_second: float
    all_to_all_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Tier:
    """One kind of link.

    `devices`: how many consecutive ranks it joins, None for any number. `bytes_per_second`: what each device sends in a
    collective (NCCL's bus bandwidth). `bucket_bytes`: the size of the pieces in which parameters are gathered and
    gradients reduced.
    """

    name: str
    devices: int | None
    latency_seconds: float
    bytes_per_second: float
    bucket_bytes: int


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its links, closest tier first.

    `flops_per_second` (by "bf16", "fp16", "fp32", "fp64") and `memory_bytes_per_second` are peaks; the efficiencies say
    which share a large matrix product and a large copy reach. `launch_seconds`: to start one fused group of kernels.
    `reduce_scatter_lowering`: "native", or "all_to_all" followed by a local sum where the backend's own is slow.
    """

    name: str
    description: str
    source: str
    flops_per_second: Mapping[str, float] = field(hash=False)
    flops_efficiency: float
    memory_bytes_per_second: float
    memory_efficiency: float
    memory_bytes: int
    launch_seconds: float
    links: tuple[Tier, ...]
    reduce_scatter_lowering: str

    def reached_flops_per_second(self, dtype: str) -> float:
        """Peak times efficiency. Raises HardwareError for a dtype that the profile does not list."""
        if dtype not in self.flops_per_second:
            known = ", ".join(sorted(self.flops_per_second))
            raise HardwareError(f"profile {self.name} has no speed for {dtype!r}", fix=f"use one of {known}")
        return self.flops_per_second[dtype] * self.flops_efficiency

    @property
    def reached_memory_bytes_per_second(self) -> float:
        return self.memory_bytes_per_second * self.memory_efficiency

    def tiers_for(self, mesh: Mesh) -> dict[str, Tier]:
        """By axis, the closest tier that joins all devices of one group along it. The last axis is the closest."""
        return {axis: self.links[self._tier_index(span)] for axis, span in _spans(mesh).items()}

    def links_for(self, mesh: Mesh) -> dict[str, Link]:
        """Latency and speed of collectives along each axis alone.

        A group within the closest tier has that tier's numbers. Of a group of n that reaches beyond it, m = gcd(n,
        members that fit in a node) share each node, and its rings leave a node over the outer links of all m: m times
        the outer speed, at most the inner one. So an axis over all cards of 8 nodes gathers at NVLink's speed, an axis
        with one card of each node at one network card's. In an all-to-all, (n - m) / (n - 1) of what a device sends
        takes its own outer link.
        """
        links = {}
        for axis, span in _spans(mesh).items():
            index, size = self._tier_index(span), mesh.size(axis)
            tier = self.links[index]
            if index == 0:
                links[axis] = Link(tier.latency_seconds, tier.bytes_per_second)
                continue
            inner = self.links[index - 1]
            members = math.gcd(size, max(1, inner.devices // (span // size)))
            ring = min(inner.bytes_per_second, members * tier.bytes_per_second)
            direct = min(ring, tier.bytes_per_second * (size - 1) / (size - members))
            links[axis] = Link(tier.latency_seconds, ring, direct if direct < ring else None)
        return links

    def _tier_index(self, span: int) -> int:
        return next(i for i, tier in enumerate(self.links) if tier.devices is None or span <= tier.devices)


def _spans(mesh: Mesh) -> dict[str, int]:
    """By axis, how many consecutive ranks one of its groups reaches over: its size times those of all inner axes; 1 for
    an axis of one device, which sends nothing."""
    return {
        axis: math.prod(mesh.sizes[i:]) if size > 1 else 1 for i, (axis, size) in enumerate(zip(mesh.names, mesh.sizes))
    }


def load(name: str | Path | Hardware) -> Hardware:
    """A profile by its name ("h100", "gloo"), by a device's own name ("NVIDIA H100 80GB HBM3"), or from a TOML file.

    A device whose name states less memory than the profile ("A100-SXM4-40GB") keeps its own. Raises HardwareError with
    the nearest names, or with what is wrong in the file.
    """
    if isinstance(name, Hardware):
        return name
    text = str(name)
    if text.endswith(".toml"):
        return _read(Path(text).expanduser())
    patterns = _patterns()
    for pattern, file in patterns.items():
        if fnmatch.fnmatchcase(text.lower(), pattern.lower()):
            hardware, stated = _read(file), re.search(r"(\d+) ?gb", text.lower())
            memory_bytes = min(hardware.memory_bytes, int(stated[1]) * 10**9) if stated else hardware.memory_bytes
            return replace(hardware, memory_bytes=memory_bytes)
    close = difflib.get_close_matches(text, patterns, 1, 0.5)
    raise HardwareError(
        f"there is no hardware profile for {text!r}", fix=f"use {nearest(text, patterns if close else names())}, or a TOML file"
    )


def names() -> list[str]:
    """The profiles that come with autopar."""
    return sorted(file.stem for file in PROFILES.glob("*.toml"))


@cache
def _patterns() -> dict[str, Path]:
    """Pattern of device names -> its profile; each profile's own name is one. Compared without regard to case."""
    patterns = {}
    for file in sorted(PROFILES.glob("*.toml")):
        for pattern in (file.stem, *_parse(file)["device_names"]):
            patterns[pattern] = file
    return patterns


def _parse(file: Path) -> dict:
    try:
        return tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise HardwareError(f"cannot read {file}: {error.strerror}", fix=f"use {', '.join(names())}") from error
    except ValueError as error:
        raise HardwareError(f"{file} is not TOML: {error}", fix=f"start from a copy of {PROFILES / 'h100.toml'}") from error


def _read(file: Path) -> Hardware:
    """Raises HardwareError on a missing or impossible entry."""
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
    lowering = collectives.text("reduce_scatter_lowering")
    if lowering not in LOWERINGS:
        raise HardwareError(f"{file}: reduce_scatter_lowering is {lowering!r}", fix=f"use {' or '.join(LOWERINGS)}")
    groups = {"compute": compute, "memory": memory, "collectives": collectives}
    groups |= {f"links.{tier.name}": link for tier, link in zip(tiers, table.rows("links"))}
    return Hardware(
        name=table.text("name"),
        description=table.text("description"),
        source="\n".join(f"{name}: {' '.join(group.text('source').split())}" for name, group in groups.items()),
        flops_per_second={dtype: speeds.positive(dtype) for dtype in sorted(speeds.entries)},
        flops_efficiency=compute.share("efficiency"),
        memory_bytes_per_second=memory.positive("bytes_per_second"),
        memory_efficiency=memory.share("efficiency"),
        memory_bytes=memory.whole("bytes"),
        launch_seconds=compute.positive("launch_seconds"),
        links=tiers,
        reduce_scatter_lowering=lowering,
    )


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

    def share(self, key: str) -> float:
        return float(self._get(key, (int, float), "a share above 0 and up to 1", fits=lambda value: 0 < value <= 1))

    def whole(self, key: str) -> int:
        return int(self._get(key, (int, float), "a whole number above 0", fits=lambda v: 1 <= v < math.inf and v == int(v)))

    def inner(self, key: str) -> _Table:
        return _Table(self.file, self._get(key, dict, "a table", fits=len), f"{self.path}{key}.")

    def rows(self, key: str) -> list[_Table]:
        rows = self._get(key, list, "a list of tables", fits=lambda v: v and all(isinstance(row, dict) for row in v))
        return [_Table(self.file, row, f"{self.path}{key}[{i}].") for i, row in enumerate(rows)]
