"""The rows of the plan's table: modules with their layouts and costs, equal blocks of a module list as one row."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Collection

from ...adapt.lora_site import is_factor
from ...plans.entries import Region
from ..problem.problem import Problem
from ..problem.vertices import Vertex
from .evaluate import Evaluation

DEPTH_IN_BLOCK = 2  # "layers.3.self_attn.q_proj" is listed as layers.*.self_attn.q_proj: two names below the block


def row_of(module: str) -> str:
    """Return the row that a module belongs to: numbers of module lists become `*`, deeper names are cut. An adapter has
    a row of its own."""
    if is_factor(module):
        return row_of(re.sub(r"\.(base_layer|lora_\w+)(?=\.|$)", "", module)) + ".lora"
    names = module.split(".")
    for i, name in enumerate(names):
        if name.isdigit():
            return ".".join(["*" if n.isdigit() else n for n in names[: i + 1 + DEPTH_IN_BLOCK]])
    return ".".join(names[:3]) or "(outside of modules)"


def module_of(v: Vertex) -> str:
    """Return the module that an op is called in, or that a parameter or buffer belongs to; "" for inputs and
    outputs."""
    if v.kind == "op":
        return v.node.meta.get("module", "")
    return v.node.meta["role"].name.rpartition(".")[0] if v.kind in ("parameter", "buffer") else ""


def regions_of(problem: Problem, e: Evaluation, among: Collection[int] | None = None) -> tuple[Region, ...]:
    """Return the rows of a plan of the whole graph, in order of first appearance in the forward. `among`: the vertices
    that they are of, None for all; of some of them costs of communication are not told apart."""
    rows: dict[str, dict] = defaultdict(
        lambda: dict(
            ops=0,
            compute=0.0,
            communication=0.0,
            bytes_=0.0,
            collectives=Counter(),
            weights=Counter(),
            activations=Counter(),
            numbers=set(),
        )
    )
    row_names: dict[int, str] = {}
    beside = {one.vertex: one.seconds for one in e.beside}
    for v in problem.vertices:
        if v.kind not in ("op", "parameter", "buffer") or among is not None and v.index not in among:
            continue
        module = module_of(v)
        name = row_names[v.index] = row_of(module)
        row, choices = rows[name], problem.choices(v.index)
        strategy = choices.strategies[e.choice[v.index]]
        row["numbers"].update(re.findall(r"(?:^|\.)(\d+)(?=\.|$)", module)[:1])
        k = e.choice[v.index]
        row["bytes_"] += float(choices.resident_bytes[k] + choices.gradient_bytes[k])
        if v.kind == "parameter" and v.node.meta["val"].dim() > 1:
            row["weights"][strategy.outputs[0].text() + " on the host" * strategy.on_host] += 1
        elif v.kind == "op":
            row["ops"] += 1
            row["compute"] += float(choices.seconds[k]) - beside.get(v.index, 0.0)
            row["communication"] += beside.get(v.index, 0.0)
            if v.phase == "forward" and len(strategy.outputs[0].dims) >= 2:
                row["activations"][strategy.outputs[0].text()] += problem.tensor_bytes[v.index, 0]
    for key, bytes_ in e.saved.items():
        if key[0] in row_names:
            rows[row_names[key[0]]]["bytes_"] += bytes_
    for transfer in e.every_transfer:
        at = next((c for c in transfer.consumers if c in row_names), transfer.producer)
        row = rows[row_names.get(at, "(outside of modules)")]
        row["communication"] += transfer.alone_seconds
        for step in transfer.redistribution.steps:
            if step.move.kind != "slice":
                kind, calls = transfer.called_as(step, problem.mesh)
                row["collectives"][kind] += transfer.times * calls
    return tuple(
        Region(
            name,
            max(1, len(r["numbers"])),
            r["ops"],
            _most(r["weights"]),
            _most(r["activations"]),
            r["compute"],
            r["communication"],
            r["bytes_"],
            dict(sorted(r["collectives"].items())),
        )
        for name, r in rows.items()
    )


def _most(counter: Counter) -> str:
    """Return the two most frequent texts, the most frequent first, with " | " between them."""
    ordered = sorted(counter.items(), key=lambda item: (-item[1], item[0]))
    return " | ".join(text for text, _ in ordered[:2])
