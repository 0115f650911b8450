"""The decisions for one joint graph as plain data, and back."""

from __future__ import annotations

from typing import Any

from ..cost.hierarchy import Hierarchy, InSteps
from ..hardware.profile import Link
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from .file import Json
from .sharding import BesideExchange, Loop, NodeSharding, Sharding


def sharding_to_json(sharding: Sharding) -> Json:
    """Return a sharding as plain data, layouts as text, each distinct one once: nodes refer to them by number."""
    numbers: dict[Layout, int] = {}

    def number(layout: Layout | None) -> int | None:
        return None if layout is None else numbers.setdefault(layout, len(numbers))

    nodes = {
        name: [[number(x) for x in n.inputs], [number(x) for x in n.outputs], list(n.choice)]
        for name, n in sorted(sharding.nodes.items())  # as a loaded plan has them, so that its hash is the same
    }
    leaves = {name: number(layout) for name, layout in sorted(sharding.leaves.items())}
    outputs = [number(x) for x in sharding.outputs]
    kept = sorted([name, index, number(layout)] for name, index, layout in sharding.kept)
    exchanges = [[x.exchange, [*x.products]] for x in sharding.exchanges]
    loops = [[x.kind, x.tensor, number(x.layout), x.phase, [*x.products]] for x in sharding.loops]
    return {
        "links": {
            a: [x.latency_seconds, x.bytes_per_second, x.all_to_all_bytes_per_second] for a, x in sharding.links.items()
        },
        "memory_bytes_per_second": sharding.memory_bytes_per_second,
        "nodes": nodes,
        "leaves": leaves,
        "outputs": outputs,
        "kept": kept,
        "again": sorted(sharding.recomputed),
        "on_host": sorted(sharding.on_host),
        "hierarchy": [[x.kind, [*x.outer], [*x.inner], x.from_bytes, x.to_bytes] for x in sharding.hierarchy.values()],
        "layouts": [[len(layout.dims), layout.text()] for layout in numbers],
    } | {key: some for key, some in (("loops", loops), ("exchanges", exchanges)) if some}


def sharding_from_json(data: Json, mesh: Mesh) -> Sharding:
    """Return the sharding that `sharding_to_json` made this of. Raises ValueError or MeshError for data that no
    sharding on this mesh gives."""
    layouts = []
    for ndim, text in data["layouts"]:
        layouts.append(Layout.parse(text, ndim))
        for axis in (*layouts[-1].sharding_axes, *(a for a, _ in layouts[-1].partial)):
            mesh.size(axis)

    def chosen(numbers: list[int]) -> tuple[Layout, ...]:
        return tuple(layouts[number] for number in numbers)

    links = {
        axis: Link(float(latency), float(speed), None if all_to_all is None else float(all_to_all))
        for axis, (latency, speed, all_to_all) in data["links"].items()
    }
    if set(links) != set(mesh.names):
        raise ValueError("links do not match the mesh")
    return Sharding(
        mesh,
        links,
        float(data["memory_bytes_per_second"]),
        {
            name: NodeSharding(chosen(ins), chosen(outs), tuple(choice))
            for name, (ins, outs, choice) in data["nodes"].items()
        },
        {name: layouts[number] for name, number in data["leaves"].items()},
        tuple(None if number is None else layouts[number] for number in data["outputs"]),
        frozenset((name, index, layouts[number]) for name, index, number in data["kept"]),
        frozenset(data["again"]),
        frozenset(data["on_host"]),
        _hierarchy_from_json(data["hierarchy"], mesh),
        tuple(
            Loop(kind, tensor, layouts[number], phase, tuple(products))
            for kind, tensor, number, phase, products in data.get("loops", ())
        ),
        tuple(BesideExchange(exchange, tuple(products)) for exchange, products in data.get("exchanges", ())),
    )


def _hierarchy_from_json(data: list[list[Any]], mesh: Mesh) -> Hierarchy:
    found = [InSteps(kind, tuple(outer), tuple(inner), *ends) for kind, outer, inner, *ends in data]
    for steps in found:
        order = mesh.with_parts(steps.outer + steps.inner).names
        if not steps.outer or not steps.inner or not _follow(steps.outer + steps.inner, order):
            raise ValueError(f"no {steps.kind} goes over {steps.axes} in steps")
    return {(steps.kind, steps.axes): steps for steps in found}


def _follow(some: tuple[str, ...], order: tuple[str, ...]) -> bool:
    """Return whether these are in this order, each once."""
    return some == tuple(name for name in order if name in some)
