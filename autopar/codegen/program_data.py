"""One rank's program as plain data, for the next start of a job to load instead of lowering the same plan.

What is loaded is compared with the capture that it is to run: it takes the same leaves in the local shapes of the plan,
gives as many values, hands its backward what that takes, and calls ops of torch, of autopar and of the capture alone.
"""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Any

import torch
from torch import fx

from ..frontend.export import Captured
from ..ir.graph import outputs_of
from ..ir.graph_data import graph_data, graph_of
from ..ir.layout import Layout, local_shape
from ..passes.distribute.emit import Collective
from ..passes.distribute.partition import Parts
from ..plans.plan import Plan
from ..utils.plain_data import NotPortable
from .rank_program import RankProgram

NAMESPACES = frozenset(("aten", "prims", "autopar", "_c10d_functional"))


def program_data(program: RankProgram) -> tuple[str, list[torch.Tensor]]:
    """Return a program as JSON, and the constants of its graphs. Raises NotPortable."""
    forward, constants = _part_data(program.parts.forward)
    data: dict[str, Any] = {
        "saved": program.parts.saved,
        "forward": forward,
        "backward": None,
        "border": len(constants),
    }
    if program.parts.backward is not None:
        data["backward"], more = _part_data(program.parts.backward)
        constants += more
    return json.dumps(data), constants


def program_of(
    text: str, constants: list[torch.Tensor], captured: Captured, plan: Plan, rank: int, device: torch.device
) -> RankProgram:
    """Return the program that `program_data` gave, with its fake values on `device`. Raises NotPortable for data that
    is no program of this plan."""
    data = json.loads(text)
    border = data["border"]
    try:
        forward = _part(data["forward"], constants[:border], captured, device)
        backward = _part(data["backward"], constants[border:], captured, device) if data["backward"] else None
    except (LookupError, TypeError, ValueError) as error:
        raise NotPortable(f"a graph that cannot be made: {error}") from error
    for part in (forward, backward) if backward is not None else (forward,):
        part.meta |= {"rank": rank, "mesh": plan.mesh}
    program = RankProgram(rank, Parts(forward, backward, tuple(data["saved"])))
    _check(program, captured, plan)
    return program


def _part_data(part: fx.GraphModule) -> tuple[dict[str, Any], list[torch.Tensor]]:
    graph, constants = graph_data(part)
    marked = [node for node in part.graph.nodes if "collective" in node.meta]
    return graph | {"collectives": {node.name: asdict(node.meta["collective"]) for node in marked}}, constants


def _part(data: dict[str, Any], constants: list[torch.Tensor], captured: Captured, device: torch.device):
    part, own = graph_of(data, constants, device), {node.target for node in captured.graph.nodes}
    for node in part.graph.nodes:
        if hasattr(node.target, "namespace") and node.target.namespace not in NAMESPACES and node.target not in own:
            raise NotPortable(f"{node.target}, which the capture has not")
        if node.name in data["collectives"]:
            collective = data["collectives"][node.name]
            node.meta["collective"] = Collective(**collective | {"axes": tuple(collective["axes"])})
    return part


def _check(program: RankProgram, captured: Captured, plan: Plan) -> None:
    """Raise NotPortable unless a program's interface is that of the capture under the plan."""
    parts, coordinate = program.parts, plan.mesh.coordinate(program.rank)
    leaves = [n for n in captured.graph.nodes if n.op == "placeholder"]
    tangents = [n.name for n in leaves if n.meta["role"].is_tangent]
    takes = []
    for leaf in (n for n in leaves if not n.meta["role"].is_tangent):
        value = leaf.meta["val"]
        layout = plan.sharding.leaves.get(leaf.name, Layout.replicated(value.dim()))
        takes.append((leaf.name, local_shape(value.shape, layout, plan.mesh, coordinate), value.dtype))
    roles = [role for _, role in outputs_of(captured.graph)]
    early, late = [r for r in roles if r.is_forward], [r for r in roles if not r.is_forward]
    wanted: list = [takes, early + [None] * len(parts.saved)] + ([[*parts.saved, *tangents], late] if late else [])
    found: list = [[(n.name, tuple(n.meta["val"].shape), n.meta["val"].dtype) for n in _placeholders(parts.forward)]]
    found.append([role for _, role in outputs_of(parts.forward.graph)])
    if parts.backward is not None:
        found += [[n.name for n in _placeholders(parts.backward)], [r for _, r in outputs_of(parts.backward.graph)]]
    if found != wanted:
        raise NotPortable("another interface than the plan's")


def _placeholders(part: fx.GraphModule) -> list[fx.Node]:
    return [node for node in part.graph.nodes if node.op == "placeholder"]
