"""Seconds of NCCL's collectives, from its own model: the fastest of its algorithms and protocols.

    seconds = latency + bytes / speed      bytes: of the whole tensor, n times what is gathered, once what is reduced

    ring       speed = bus n / steps, steps = n - 1 (gather, scatter), 2 (n - 1) (all-reduce), n (broadcast)
               latency = base + (steps - far) intra + far inter, far = steps between nodes: nodes - 1, twice that, nodes
    tree       all-reduce: speed = bus / 2; latency = base + 2 ((ranks a node - 1) intra + log2(nodes) inter)
    NVLS       the switch reduces; NVLS-tree on several nodes; all-reduce: twice the switch's speed, n / steps of it
    PAT        gather and scatter with one rank a node, log2(nodes) steps
    exchange   all-to-all inside a node: one step, as every device sends to all others at once

`bus` is what each device sends: the ring's speed inside a node, or what the network cards of the group's members on one
node carry together, as each axis of a mesh has all its groups busy at once. Source: github.com/NVIDIA/nccl,
src/graph/tuning.cc (ncclTopoTuneModel, ncclTopoGetAlgoTime), constants in autopar/cost/nccl_constants.py, with what
that file names as not NCCL's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ..hardware.profile import Nccl
from .nccl_constants import (
    COPY_ENGINE_US,
    EXCHANGE_NET_LOSS,
    EXCHANGE_NET_US,
    EXCHANGE_RANK_US,
    EXCHANGE_SHARE,
    LATEST,
    PROTOCOLS,
    RAMP_BYTES,
    RAMP_SHARE,
    Constants,
)

LL, LL128, SIMPLE = range(len(PROTOCOLS))


@dataclass(frozen=True)
class Group:
    """The devices of one communicator: `ranks`, on `nodes`, at least `per_node` on each; Bytes per second of a
    device: `intra` inside a node, `card` out of it in rings, `direct` out of it to all others or to one."""

    ranks: int
    nodes: int
    per_node: int
    intra: float
    card: float
    direct: float

    @property
    def bus(self) -> float:
        """Return the bytes per second of its rings."""
        return self.intra if self.nodes == 1 else min(self.intra, self.per_node * self.card)


@dataclass(frozen=True)
class Choice:
    """One algorithm with one protocol. `correction`: shares of the speed at 64 B and each power of two after it.
    `ramps`: whether a device must have much in hand to reach the speed."""

    name: str
    latency_seconds: float
    bytes_per_second: float
    correction: tuple[float, ...] = ()
    ramps: bool = False

    def seconds(self, bytes_: np.ndarray, ranks: int) -> np.ndarray:
        """Return the seconds for `bytes_` of the whole tensor in a group of so many ranks."""
        speed = self.bytes_per_second
        if self.correction:
            exponents = np.log2(np.maximum(bytes_, 1.0)) - 6
            speed = speed * np.interp(exponents, np.arange(len(self.correction) + 1), (*self.correction, 1.0))
        result = self.latency_seconds + bytes_ / speed
        if self.ramps:
            share = np.interp(np.log(np.maximum(bytes_ / ranks, 1.0)), np.log(RAMP_BYTES), RAMP_SHARE)
            result = np.maximum(result, bytes_ / (speed * share))
        return result


def choices(kind: str, group: Group, nccl: Nccl, constants: Constants = LATEST) -> list[Choice]:
    """Return what NCCL may choose from for one collective."""
    if kind == "all_to_all":
        return list(_exchanges(group, nccl, constants))
    if kind == "send":
        return list(_sends(group, nccl, constants))
    found = list(_rings(kind, group, nccl, constants))
    if kind == "all_reduce":
        found += _trees(group, nccl, constants)
    if nccl.nvls and group.per_node > 2:
        found += _switched(kind, group, nccl, constants)
    if kind in ("all_gather", "reduce_scatter") and group.per_node == 1 and group.nodes > 1:
        found.append(_pat(group, constants))
    return found


def seconds(kind: str, group: Group, nccl: Nccl, held_bytes: np.ndarray) -> np.ndarray:
    """Return the seconds of the fastest choice; `held_bytes` are those of one device before the collective."""
    whole = held_bytes * (group.ranks if kind == "all_gather" else 1)
    return np.minimum.reduce([choice.seconds(whole, group.ranks) for choice in choices(kind, group, nccl)])


def _steps(kind: str, group: Group) -> tuple[int, int]:
    """Return a ring's steps in all, and those of them between nodes."""
    n, nodes = group.ranks, group.nodes
    all_, far = {"all_reduce": (2 * (n - 1), 2 * (nodes - 1)), "broadcast": (n, nodes)}.get(kind, (n - 1, nodes - 1))
    return all_, far if nodes > 1 else 0


def _scale(group: Group) -> int:
    """Return the column of the tables: one node, two, more."""
    return min(group.nodes, 3) - 1


def _reached(kind: str, group: Group, nccl: Nccl) -> float | None:
    """Return the bytes per second that each device was measured to send inside a node, between measured numbers of
    devices linear; None if nothing was measured or there are several nodes."""
    points = nccl.reached.get(kind)
    if not points or group.nodes > 1:
        return None
    devices, speeds = zip(*points)
    return float(np.interp(group.ranks, devices, speeds))


def _rings(kind: str, group: Group, nccl: Nccl, c: Constants) -> Iterator[Choice]:
    bus, steps = _reached(kind, group, nccl) or group.bus, _steps(kind, group)
    n = group.ranks
    for p, protocol in enumerate(PROTOCOLS):
        speed = bus
        if p == LL:
            speed = min(c.ll_most[nccl.generation][_scale(group)] * 1e9, bus * c.ring_ll_share)
        elif p == LL128:
            if nccl.intra != "nvlink" or group.nodes > 1:  # its tables are of NVLink
                continue
            speed = min(
                bus * c.ring_ll128_share, nccl.channels * c.ring_ll128_most[nccl.generation][_scale(group)] * 1e9
            )
        intra, inter = c.intra_us[nccl.intra]["ring"][p], _inter_us(group, "ring", p, c)
        if group.nodes > 1:
            intra = max(intra, c.net_overhead_us * (3 if p == SIMPLE else 1))
        latency = c.base_us["ring"][p] + (steps[0] - steps[1]) * intra + steps[1] * inter
        ramps = p == SIMPLE and group.nodes > 1
        if ramps and kind == "all_reduce":
            latency *= c.plateau
        yield Choice(f"ring {protocol}", latency * 1e-6, speed * n / steps[0], ramps=ramps)


def _inter_us(group: Group, algorithm: str, protocol: int, c: Constants) -> float:
    return c.inter_us["tree" if group.per_node == 1 else algorithm][protocol]


def _trees(group: Group, nccl: Nccl, c: Constants) -> Iterator[Choice]:
    column, generation = _scale(group), nccl.generation
    bus = min(group.bus * c.tree_share, nccl.channels * c.tree_most[generation][column] * 1e9)
    for p, protocol in enumerate(PROTOCOLS):
        speed = bus
        if p == LL:
            speed = min(bus * c.tree_ll_share, c.ll_most[generation][column] * 1e9)
        elif p == LL128:
            if nccl.intra != "nvlink" or group.nodes > 1:
                continue
            share = c.tree_ll128_share[group.nodes > 1]
            speed = min(bus * share, nccl.channels * c.tree_ll128_most[generation][column] * 1e9)
        hops = (group.per_node - 1) * c.intra_us[nccl.intra]["tree"][p] + int(math.log2(group.nodes)) * c.inter_us[
            "tree"
        ][p]
        yield Choice(f"tree {protocol}", (c.base_us["tree"][p] + 2 * hops) * 1e-6, speed / 2, c.tree_correction[p])


def _switched(kind: str, group: Group, nccl: Nccl, c: Constants) -> Iterator[Choice]:
    """Yield NVLS inside a node, or NVLS-tree for an all-reduce over several."""
    efficiency = c.nvls_efficiency[nccl.generation]
    if not efficiency or kind == "broadcast" or group.nodes == 1 and kind in nccl.reached:
        return  # what was measured contains it
    n, channels = group.ranks, nccl.channels
    switch = (channels - 1) * nccl.channel_bytes_per_second * efficiency
    if group.nodes == 1:
        switch *= 2 if kind == "all_reduce" else (group.per_node - 1) / group.per_node
        yield Choice("NVLS", c.intra_us["nvlink"]["nvls"][SIMPLE] * 1e-6, switch * n / _steps(kind, group)[0])
    elif kind == "all_reduce":
        cards = min(channels * nccl.channel_bytes_per_second, group.per_node * group.card) * (
            2 if group.nodes == 2 else 1
        )
        speed = min(2 * switch, cards, channels * c.nvls_tree_most[nccl.generation][_scale(group)] * 1e9)
        latency = (
            c.intra_us["nvlink"]["nvls_tree"][SIMPLE]
            + 2 * int(math.log2(group.nodes)) * c.inter_us["nvls_tree"][SIMPLE]
        )
        correction = c.tree_correction[SIMPLE] if nccl.generation == "blackwell" else ()
        yield Choice("NVLS-tree", latency * 1e-6, speed * n / _steps(kind, group)[0], correction)


def _pat(group: Group, c: Constants) -> Choice:
    n = group.ranks
    latency = (
        c.base_us["pat"][SIMPLE]
        + math.log2(group.nodes) * c.inter_us["pat"][SIMPLE] / c.pat_net_divisor
        + c.pat_step_us * n
    )
    return Choice("PAT", latency * 1e-6, group.bus * c.pat_share * n / (n - 1))


def _exchanges(group: Group, nccl: Nccl, c: Constants) -> Iterator[Choice]:
    """Iterate over the choices for an all-to-all: every pair sends 1 / n of what a device holds."""
    n, m = group.ranks, group.per_node
    if group.nodes > 1:
        loss = 1 - EXCHANGE_NET_LOSS / group.nodes
        far, near = (n - m) / n / (group.direct * loss), (m - 1) / n / (group.intra * EXCHANGE_SHARE)
        yield Choice("sends", (EXCHANGE_NET_US + EXCHANGE_RANK_US * n) * 1e-6, 1 / max(far, near))
        return
    # one step: every device sends to all others at once
    for p in (LL, SIMPLE):
        speed = (_reached("all_to_all", group, nccl) or group.intra * EXCHANGE_SHARE) * (
            c.ring_ll_share if p == LL else 1
        )
        latency = c.base_us["ring"][p] + c.intra_us[nccl.intra]["ring"][p]
        yield Choice(f"sends {PROTOCOLS[p]}", latency * 1e-6, speed * n / (n - 1))
    if nccl.copy_engine_bytes_per_second:
        yield Choice("copy engines", COPY_ENGINE_US * 1e-6, nccl.copy_engine_bytes_per_second * n / (n - 1))


def _sends(group: Group, nccl: Nccl, c: Constants) -> Iterator[Choice]:
    """Iterate over the choices for a send from one rank to the next one of the group, through a network card if any two
    are on different nodes."""
    near = group.nodes == 1
    for p in (LL, SIMPLE):
        hop = c.intra_us[nccl.intra]["ring"][p] if near else c.inter_us["ring"][p]
        speed = (group.intra if near else group.direct) * (c.ring_ll_share if p == LL else 1)
        yield Choice(f"send {PROTOCOLS[p]}", (c.base_us["ring"][p] + hop) * 1e-6, speed)
