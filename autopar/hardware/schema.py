"""Define what a profile of hardware holds: devices, the links between them, how kernels fill a device, what was
measured.

A profile states what a device can do at best and which share of that real kernels reach, each group of numbers with its
source. Links come in tiers: the closest joins `devices` consecutive ranks (the cards of a node), the last any number.
Every speed is bytes or operations per second, every size bytes, every time seconds. autopar/hardware/profile.py reads
profiles.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import HardwareError
from ..ir.mesh import Mesh
from .kernels import Attention, Experts, Kernels, Products


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
    """One kind of link, such as NVLink in a node, the leaf switches of a rail group, and the spine above them.

    `devices`: how many consecutive ranks it joins, None for any number. `bytes_per_second`: what each device sends in a
    collective (NCCL's bus bandwidth), its share of what follows included. `bucket_bytes`: the size of the pieces in
    which parameters are gathered and gradients reduced. `rails`: of a network, how many cards of a node its devices
    share, None for one each. `oversubscription`: by how much more the switches take in than they lead out.
    """

    name: str
    devices: int | None
    latency_seconds: float
    bytes_per_second: float
    bucket_bytes: int
    rails: int | None = None
    oversubscription: float = 1.0

    def share(self, node_devices: int | None) -> float:
        """Return what a device of a node of so many has of the speed of a card while all of them send."""
        return (self.rails / node_devices if self.rails and node_devices else 1.0) / self.oversubscription


@dataclass(frozen=True)
class Nccl:
    """The parameters of NCCL's own time model for a node, which is the closest tier (autopar/cost/nccl.py).

    `generation`: a key of autopar/cost/nccl_constants.py. `intra`: "nvlink" or "pci". `channels` of
    `channel_bytes_per_second` each are what its search finds. `nvls`: whether the switch reduces.
    `copy_engine_bytes_per_second`: what copy engines send in an all-to-all, 0 where NCCL does not use them. `reached`:
    by kind, pairs of a number of devices in one node and the bytes per second that each sends there in a large
    collective, measured.
    """

    generation: str
    intra: str
    channels: int
    channel_bytes_per_second: float
    nvls: bool = False
    copy_engine_bytes_per_second: float = 0.0
    reached: Mapping[str, tuple[tuple[int, float], ...]] = field(default_factory=dict, hash=False)


@dataclass(frozen=True)
class Curve:
    """Measured seconds of one collective by the bytes that a device holds before it, which rise.

    `devices` are in a group, `stride` ranks apart; all groups ran at once."""

    kind: str
    devices: int
    stride: int
    bytes_: tuple[float, ...]
    seconds: tuple[float, ...]

    @property
    def span(self) -> int:
        """Return how many consecutive ranks one group reaches over."""
        return self.devices * self.stride


@dataclass(frozen=True)
class Host:
    """The host's share for each of its devices while all of them use it: bytes per second that a copy between host and
    device reaches, in one direction at a time, and the device's share of the host's memory and of its speed."""

    link_bytes_per_second: float
    memory_bytes_per_second: float
    memory_bytes: int


@dataclass(frozen=True)
class Hardware:
    """One kind of device and its links, closest tier first.

    `flops_per_second` (by "bf16", "fp16", "fp32", "fp64") and `memory_bytes_per_second` are peaks; the efficiencies say
    which share a matrix product of 8192 cubed and a large copy reach. `launch_seconds`: to start one kernel from
    Python. `cores_per_device`: of processes on a CPU, the cores that each had while this was measured, one at most; 0
    of devices that share none. `memory_bytes`: what plans may fill, if nobody says otherwise; of any limit,
    `reserve_bytes` go to the device's context, to the buffers of the communication library and to the rounding of the
    caching allocator. `host`: the host's memory behind a device, None where nothing can be kept there.
    `reduce_scatter_lowering`: "native", or "all_to_all" followed by a local sum where the backend's own is slow.
    `overlap_slowdown`: how much longer the longer of a collective and a computation takes for running beside the other;
    2 if nothing is gained by it. `curves`: measured collectives, wrong by `curves_error` (a median, 0.1 is 10 %).
    `sustained`: what is left of the speed of products that are measured alone when they run for minutes, at the power
    limit. `products`: by kind ("dense", "grouped", "fp8", "fp8_block"); `attention`: by kernel ("flash", "cudnn",
    "flash3"). `errors`: mean relative errors against measured
    operators, by table and size class. `published_utilization`: the largest share of its peak that model FLOPs have
    reached in published training runs, by type. `fingerprint`: where it was measured, empty for a profile made from
    datasheets.
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
    cores_per_device: float = 0.0
    overlap_slowdown: float = 2.0
    sustained: float = 1.0
    kernels: Kernels = Kernels()
    products: Mapping[str, Products] = field(default_factory=dict, hash=False)
    attention: Mapping[str, Attention] = field(default_factory=dict, hash=False)
    experts: Experts | None = None
    nccl: Nccl | None = None
    curves: tuple[Curve, ...] = ()
    curves_error: float = 0.0
    errors: Mapping[str, Mapping[str, float]] = field(default_factory=dict, hash=False)
    reserve_bytes: int = 0
    published_utilization: Mapping[str, float] = field(default_factory=dict, hash=False)
    host: Host | None = None
    fingerprint: Mapping[str, str] = field(default_factory=dict, hash=False)

    def peak_flops_per_second(self, dtype: str) -> float:
        """Return the peak speed of computing in a dtype. Raises HardwareError for a dtype that the profile does not
        list."""
        if dtype not in self.flops_per_second:
            known = ", ".join(sorted(self.flops_per_second))
            raise HardwareError(f"profile {self.name} has no speed for {dtype!r}", fix=f"use one of {known}")
        return self.flops_per_second[dtype]

    @property
    def precision(self) -> str:
        """Return the precision that "auto" means: bf16 where that computes faster than fp32."""
        speeds = self.flops_per_second
        return "bf16" if speeds.get("bf16", 0.0) > speeds.get("fp32", 0.0) else "fp32"

    def reached_flops_per_second(self, dtype: str) -> float:
        """Return peak times efficiency, the speed of a large matrix product. Raises HardwareError for a dtype that the
        profile does not list."""
        return self.peak_flops_per_second(dtype) * self.flops_efficiency

    @property
    def reached_memory_bytes_per_second(self) -> float:
        """Return the bytes a second that ops reach of the device's memory."""
        return self.memory_bytes_per_second * self.memory_efficiency

    @property
    def is_gpu(self) -> bool:
        """Return whether the kernels of GPUs run here, joined by NCCL, and not those of CPUs, joined by gloo."""
        return self.nccl is not None

    @property
    def overlap_gain(self) -> float:
        """Return the share of a second that is gained when a collective runs beside compute; 0 on gloo, where compute
        waits for it."""
        return max(0.0, 2.0 - self.overlap_slowdown) if self.is_gpu else 0.0

    def tiers_for(self, mesh: Mesh) -> dict[str, Tier]:
        """Return, by axis, the closest tier that joins all devices of one group along it. The last axis is the
        closest."""
        return {axis: self.links[self.tier_index(span)] for axis, span in spans(mesh).items()}

    def split_by_tier(self, mesh: Mesh) -> Mesh:
        """Return the mesh with each axis that leaves a tier of links in two: inside of the tier, and across."""
        for tier in self.links[:-1]:
            for axis, span in spans(mesh).items():
                stride = span // mesh.size(axis)
                inside = (tier.devices or 1) // stride
                if 1 < inside < mesh.size(axis) and tier.devices == inside * stride and mesh.size(axis) % inside == 0:
                    mesh = mesh.split(axis, inside)
        return mesh

    def classes_for(self, mesh: Mesh) -> dict[str, int]:
        """Return, by axis, the number of the tier that its collectives use: axes of one tier leave a device through the
        same card, and take turns."""
        found = {axis: self.tier_index(span) for axis, span in spans(mesh).items()}
        numbers = {tier: i for i, tier in enumerate(sorted(set(found.values())))}
        return {axis: numbers[tier] for axis, tier in found.items()}

    def links_for(self, mesh: Mesh) -> dict[str, Link]:
        """Return latency and speed of collectives along each axis alone.

        A group within the closest tier has that tier's numbers. Of a group of n that reaches beyond a tier, m = gcd(n,
        members that it joins) share what leads out of it, and rings leave over the outer links of all m: m times the
        outer speed, at most the inner one. So an axis over all cards of 8 nodes gathers at NVLink's speed, an axis with
        one card of each node at one network card's; a ring leaves an oversubscribed group of switches over the shares
        of all its members there. In an all-to-all, (n - m) / (n - 1) of what a device sends takes its own outer link.
        """
        if mesh not in self._links_for:
            self._links_for[mesh] = self._links_of(mesh)
        return self._links_for[mesh]

    @cached_property
    def _links_for(self) -> dict[Mesh, dict[str, Link]]:
        """Return what is known of meshes, filled as they are asked for."""
        return {}

    def _links_of(self, mesh: Mesh) -> dict[str, Link]:
        links = {}
        for axis, span in spans(mesh).items():
            tier, size = self.links[self.tier_index(span)], mesh.size(axis)
            shared = list(self.shared_links(size, span // size))
            ring = min(members * bytes_per_second for members, bytes_per_second in shared)
            direct = [speed * (size - 1) / (size - members) for members, speed in shared[:-1] if members < size]
            exchanged = min([ring, *direct])
            links[axis] = Link(tier.latency_seconds, ring, exchanged if exchanged < ring else None)
        return links

    def shared_links(self, size: int, stride: int) -> Iterator[tuple[int, float]]:
        """Return, farthest first, for each tier that a group of `size` ranks, `stride` apart, needs: how many of its
        members share what leads to it, and the bytes per second of each; the closest one is not shared."""
        for index in range(self.tier_index(size * stride if size > 1 else 1), 0, -1):
            size = math.gcd(size, max(1, (self.links[index - 1].devices or 1) // stride))
            yield size, self.links[index].bytes_per_second
            if size == 1:
                return
        yield 1, self.links[0].bytes_per_second

    def tier_index(self, span: int) -> int:
        """Return the index of the closest tier that joins so many consecutive ranks."""
        return next(i for i, tier in enumerate(self.links) if tier.devices is None or span <= tier.devices)


def spans(mesh: Mesh) -> dict[str, int]:
    """Return, by axis, how many consecutive ranks one of its groups reaches over: its size times those of all inner
    axes; 1 for an axis of one device, which sends nothing."""
    return {
        axis: math.prod(mesh.sizes[i:]) if size > 1 else 1 for i, (axis, size) in enumerate(zip(mesh.names, mesh.sizes))
    }
