"""A batch as its micro-batches: what each of them is given, and one output of the call from those of all."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..ops.counter_rng import of_micro_batch
from ..passes.pipeline.micro_batch import SAME, SUM, MicroBatched


def parts_of(micro: MicroBatched, values: Mapping[str, Tensor]) -> list[dict[str, Tensor]]:
    """Return what each micro-batch is given by placeholder name: global inputs, sums over the whole batch, its random
    state."""
    leaves: dict[str, dict[str, str]] = {"input": {}, "random": {}}
    for node in micro.captured.graph.find_nodes(op="placeholder"):
        if (role := node.meta["role"]).kind in leaves:
            leaves[role.kind][role.name] = node.name
    named = {name: values[leaf] for name, leaf in leaves["input"].items()}
    whole = {leaf: values[leaf] for leaf in leaves["input"].values()} | totals_of(micro, named)
    parts = [dict(whole) for _ in range(micro.micro_batches)]
    for name, dim in (micro.input_dims or {}).items():
        if name in named:
            each = named[name].shape[dim] // micro.samples
            for part, chunk in zip(parts, named[name].split([each * size for size in micro.sizes], dim)):
                part[leaves["input"][name]] = chunk
    for leaf in leaves["random"].values():
        for i, part in enumerate(parts):
            part[leaf] = of_micro_batch(values[leaf], micro.start(i)) if micro.micro_batches > 1 else values[leaf]
    return parts


def totals_of(micro: MicroBatched, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the sums over the whole batch by placeholder name, from its inputs by their names in the call."""
    if micro.totals is None:
        return {}
    results = micro.totals(*(inputs[name] for name in micro.total_inputs))
    leaves = [n for n in micro.captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "total"]
    return {n.name: results[int(n.meta["role"].name)] for n in leaves}


def join(parts: Sequence[Tensor], how: str | int) -> Tensor:
    """Join one output of the call from those of its micro-batches."""
    if how == SAME:
        return parts[0]
    return torch.stack(list(parts)).sum(0) if how == SUM else torch.cat(list(parts), how)
