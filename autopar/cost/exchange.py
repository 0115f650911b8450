"""Price rows on their way to their experts and back, if experts get equal numbers of them.

With r rows of d bytes over P devices, each of which holds r / P of them, a device sends r d / P (P - 1) / P; the counts
of rows that go first wait for the link once, and say of which experts rows are. Rows that every device has are picked
without a message. Tokens with k of E experts each that go once to every device that has some of theirs go to

    P (1 - C(E - E / P, k) / C(E, k))

devices each, as any k of the experts are as probable. Which of the rows that arrive are of which token is one message
more.

The pass that sorts rows by expert, and that which puts them back, is in no price: all ways have it. What makes rows of
tokens that were sent once, and adds them up, is that pass (passes/distribute/sort_rows.py).
"""

from __future__ import annotations

import math
from functools import cache
from typing import cast

import torch
from torch import fx

from ..hardware.schema import Hardware
from ..ir.graph import bytes_of, tensor_arguments
from ..ir.layout import chunk, fraction
from ..ir.mesh import Mesh
from ..ops import autopar
from ..rules import Strategy
from ..rules.experts import ONCE

IDENTITIES = (autopar.dispatch.default, autopar.combine.default)  # where no rows are sent
OF_TOKENS = (autopar.dispatch_tokens.default, autopar.combine_tokens.default)
WAYS = IDENTITIES + OF_TOKENS
BACK = (autopar.combine.default, autopar.combine_tokens.default)


def moves_rows(node: fx.Node, strategy: Strategy) -> bool:
    """Return whether an op does anything: neither a dispatch nor a combine that leaves rows where they are."""
    return node.target not in IDENTITIES or bool(_owned(node, strategy))


def exchange_axes(node: fx.Node, strategy: Strategy, mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which an op sends rows, none if it sends nothing."""
    if node.target not in WAYS:
        return ()
    sent = {*_owned(node, strategy)} & {*strategy.inputs[1].sharding_axes}
    return tuple(axis for axis in mesh.names if axis in sent and mesh.size(axis) > 1)


def exchange_bytes(node: fx.Node, strategy: Strategy, mesh: Mesh) -> float:
    """Return the bytes that a device sends."""
    axes = exchange_axes(node, strategy, mesh)
    ways = math.prod(map(mesh.size, axes))
    if is_of_experts(node):
        return 0.0
    if node.target in OF_TOKENS:
        moved = token_bytes(node, strategy, mesh) * _times(node, strategy, mesh, axes)
    else:
        moved = bytes_of(node.meta["val"]) * fraction(strategy.outputs[0], mesh)
    return moved * (ways - 1) / ways


def exchange_seconds(node: fx.Node, strategy: Strategy, mesh: Mesh, hardware: Hardware) -> float:
    """Return the seconds of an exchange of rows; in a forward those on their way to products come after one of counts,
    tokens that are sent once after one of their places too. Of rows' experts the counts have said all."""
    axes = exchange_axes(node, strategy, mesh)
    if not axes or is_of_experts(node):
        return 0.0
    latency, travel = _on_links(node, strategy, mesh, hardware, axes)
    value = node.meta["val"]
    is_first = node.target not in BACK and node.meta["phase"] == "forward" and value.numel() > len(value)
    messages = 1 + is_first * (1 + goes_once(node, strategy.choice))
    through_memory = _through_memory_bytes(node, strategy, mesh, axes) / hardware.reached_memory_bytes_per_second
    return messages * latency + travel + through_memory


def link_seconds(node: fx.Node, strategy: Strategy, mesh: Mesh, hardware: Hardware) -> float:
    """Return those seconds of an exchange of rows in which the rows are on their way, and a device may compute."""
    axes = exchange_axes(node, strategy, mesh)
    return sum(_on_links(node, strategy, mesh, hardware, axes)) if axes and not is_of_experts(node) else 0.0


def is_all_latency(node: fx.Node, strategy: Strategy, mesh: Mesh, hardware: Hardware) -> bool:
    """Return whether a message without rows would take at least half as long as those of an exchange do."""
    latency, travel = _on_links(node, strategy, mesh, hardware, exchange_axes(node, strategy, mesh))
    return travel <= latency


def _on_links(
    node: fx.Node, strategy: Strategy, mesh: Mesh, hardware: Hardware, axes: tuple[str, ...]
) -> tuple[float, float]:
    """Return the seconds of a message over some axes without bytes, and of the bytes of an exchange of rows."""
    links = [hardware.links_for(mesh)[axis] for axis in axes]
    speed = min(link.all_to_all_bytes_per_second or link.bytes_per_second for link in links)
    return max(link.latency_seconds for link in links), exchange_bytes(node, strategy, mesh) / speed


def _through_memory_bytes(node: fx.Node, strategy: Strategy, mesh: Mesh, axes: tuple[str, ...]) -> float:
    """Return the bytes that a device reads and writes beside what the op takes and gives: rows in the order in which
    they are sent and came back, or tokens that are sent once, before they leave and where they are added up, instead of
    the rows that are made of them."""
    if node.target not in OF_TOKENS:
        return 0.0
    tokens, active = token_bytes(node, strategy, mesh), token_sizes(node)[1]
    if not goes_once(node, strategy.choice):
        return 2 * active * tokens if node.target in BACK else (active - 1) * tokens
    once = _times(node, strategy, mesh, axes) * tokens
    return 4 * once if node.target in BACK else 2 * once - (1 + active) * tokens


def is_of_experts(node: fx.Node) -> bool:
    """Return whether it is the experts of rows that an op moves."""
    return node.target in IDENTITIES and node.args[0] is node.args[1]


def goes_once(node: fx.Node, choice: tuple[str, ...]) -> bool:
    """Return whether a token goes once to a device that has several of its experts. `choice`: the factor of each
    axis."""
    return node.target in OF_TOKENS and ONCE in choice


@cache
def devices_of_token(experts: int, active: int, ways: int) -> float:
    """Return to how many of so many devices, among which the experts are cut into blocks, a token goes on average."""
    held = [stop - start for start, stop in (chunk(experts, ways, i) for i in range(ways))]
    active = min(active, experts)
    return sum(1.0 - math.comb(experts - here, active) / math.comb(experts, active) for here in held)


def _times(node: fx.Node, strategy: Strategy, mesh: Mesh, axes: tuple[str, ...]) -> float:
    """Return how often a token is sent, to the device itself as well."""
    active = token_sizes(node)[1]
    ways = math.prod(map(mesh.size, axes))
    return devices_of_token(cast(int, node.args[2]), active, ways) if goes_once(node, strategy.choice) else active


def token_bytes(node: fx.Node, strategy: Strategy, mesh: Mesh) -> float:
    """Return the bytes of the tokens of one device, each sent once."""
    tokens, _, width = token_sizes(node)
    cut = (*strategy.inputs[1].dims, *strategy.outputs[0].dims[1:])  # tokens as their rows, and the width
    return tokens * width / math.prod(mesh.size(axis) for axes in cut for axis in axes)


def token_sizes(node: fx.Node) -> tuple[int, int, int]:
    """Return the global number of tokens, the experts of each, and the bytes of a row that is sent."""
    value = tensor_arguments(node)[0].meta["val"] if node.target not in BACK else node.meta["val"]
    rows = len(tensor_arguments(node)[1].meta["val"])
    dtype = cast(torch.dtype, node.args[4]) if node.target in BACK else value.dtype
    return len(value), rows // len(value), math.prod(value.shape[1:]) * dtype.itemsize


def _owned(node: fx.Node, strategy: Strategy) -> tuple[str, ...]:
    return (strategy.inputs[0] if node.target in BACK else strategy.outputs[0]).owned_axes
