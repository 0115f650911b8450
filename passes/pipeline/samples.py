"""Find in which dim of a tensor the samples of the batch are, by the factor rules of the ops: the factor that they are
in an op's input is samples in all its tensors."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

from ...ir.graph import is_op, is_tensor, outputs_of, tensor_arguments, tensor_of
from ...rules import Rule, cut_inside, rule_of
from ...rules.reading import output_indices
from ...rules.rule import Entry, Inner, entries_of, name_of

aten = torch.ops.aten
MADE = (
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
    aten.new_empty.default,
)  # whatever is in their input

Tensor = tuple[fx.Node, int]
SampleDim = tuple[int, int]  # the dim, and the number of equal parts of it that each have samples of their own
Factor = tuple[str, int]  # its name, and such parts of it


def outputs_with_samples(graph: fx.Graph, inputs: Collection[str]) -> list[SampleDim | None]:
    """Return the dim of the samples in each output of a joint graph: None for what is no tensor, has none, or is
    computed from several samples at once (a mean, a contrast of all pairs). `inputs`: have them in dim 0, by name."""
    sample_dims: dict[Tensor, SampleDim] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            if node.meta["role"].kind == "input" and node.meta["role"].name in inputs:
                sample_dims[node, 0] = (0, 1)
        elif is_op(node) and node.meta["phase"] == "forward" and (rule := rule_of(node)) is not None:
            tensors = tensors_of(node, rule)
            factors = {factor_at(node, rule, dims, sample_dims[t]) for t, dims in tensors if t in sample_dims}
            if len(factors) == 1 and (factor := factors.pop()) is not None:
                found = ((t, sample_dim_in(dims, factor)) for t, dims in tensors if t[0] is node)
                sample_dims.update((t, sample_dim) for t, sample_dim in found if sample_dim is not None)
    return [sample_dims.get(tensor_of(value)) if is_tensor(value) else None for value, _ in outputs_of(graph)]


def tensors_of(node: fx.Node, rule: Rule) -> list[tuple[Tensor, tuple]]:
    """Return the tensors that an op reads and makes, with what its rule calls their dims."""
    inputs = zip(map(tensor_of, tensor_arguments(node)), rule.inputs)
    if node.target in MADE:
        inputs = ((tensor, dims) for tensor, dims in inputs if any(dims))
    return [*inputs, *zip([(node, i) for i in output_indices(node)], rule.outputs)]


def factor_at(node: fx.Node, rule: Rule, dims: tuple, sample_dim: SampleDim) -> Factor | None:
    """Return the factor that the samples are in, or are inside equal parts of (heads and samples in one dim); None if
    they cannot be."""
    dim, parts = sample_dim
    for entry in entries_of(dims[dim]):
        if _parts(entry) == parts:
            return name_of(entry), 1
    whole = next((name_of(e) for e in entries_of(dims[dim])), None)
    return (whole, parts) if whole in cut_inside(node, rule, parts) else None


def sample_dim_in(dims: tuple, factor: Factor) -> SampleDim | None:
    """Return where a tensor has the samples, given its dims and the factor that they are in; None if it has none."""
    name, inside = factor
    found = ((d, inside * _parts(e)) for d, dim in enumerate(dims) for e in entries_of(dim) if name_of(e) == name)
    return next(found, None)


def _parts(entry: Entry) -> int:
    return entry.parts if isinstance(entry, Inner) else 1
