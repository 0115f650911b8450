"""Find in which dims of outputs the dims of inputs are, by the factor rules of the ops: where the tokens of a text are
in logits, in attention weights, in a dim merged with others."""

from __future__ import annotations

import itertools
import sys
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import fx

from ...ir.graph import is_op, is_tensor, operand, outputs_of, tensor_arguments, tensor_of, values_of
from ...rules import rule_of
from ...rules.reading import bound, dims_of, output_indices
from ...rules.rule import Dim, Inner, entries_of, name_of, names_in
from .samples import SampleDim, Tensor, sample_dim_in, tensors_of

aten = torch.ops.aten
WHOLE = (aten._softmax.default, aten._log_softmax.default, aten.cumsum.default)  # work along a dim and leave its places
Source = tuple[str, int]  # an input's name, and its dim


class Piece(NamedTuple):
    """A dim of an input, of `size` places in the graph, some of which were taken off its begin and end."""

    source: Source
    size: int
    before: int = 0
    behind: int = 0

    def without(self, before: int, behind: int) -> Piece:
        """Return the dim without so many more places at its begin and end."""
        return Piece(self.source, self.size - before - behind, self.before + before, self.behind + behind)


@dataclass
class Found:
    """Says of a tensor which inputs' dims its dims are. `places`: as a SampleDim, inside of so many parts of the dim;
    `lost`: dims in which places of the inputs may be, though no rule says which (a reordering, a slice of so many);
    `from_end`: of which inputs it has places counted from their ends, which may be padding."""

    places: dict[SampleDim, set[Piece]] = field(default_factory=dict)
    lost: dict[int, set[Source]] = field(default_factory=dict)
    from_end: set[Source] = field(default_factory=set)


def dims_in_outputs(graph: fx.Graph, inputs: Collection[str]) -> list[Found]:
    """Return where the dims of inputs behind the first are, for each output of a joint graph. `inputs`: their names."""
    found: dict[Tensor, Found] = defaultdict(Found)
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta["role"].kind == "input" and node.meta["role"].name in inputs:
            name, shape = node.meta["role"].name, _shape(node, 0)
            found[node, 0].places.update({(d, 1): {Piece((name, d), shape[d])} for d in range(1, len(shape))})
        elif is_op(node) and node.meta["phase"] == "forward":
            _follow(node, found)
    return [found[tensor_of(value)] if is_tensor(value) else Found() for value, _ in outputs_of(graph)]


def _follow(node: fx.Node, found: dict[Tensor, Found]) -> None:
    """Say of the outputs of an op what is known of its inputs."""
    rule = rule_of(node)
    if rule is None:
        read = [(t, (None,) * len(_shape(*t))) for t in map(tensor_of, tensor_arguments(node)) if t in found]
        outputs = [((node, i), (None,) * len(_shape(node, i))) for i in output_indices(node)] if read else []
    else:
        tensors = tensors_of(node, rule)
        read = [(t, dims) for t, dims in tensors if t[0] is not node and t in found]
        outputs = [(t, dims) for t, dims in tensors if t[0] is node]
    common = {*found[read[0][0]].places}.intersection(*(found[t].places for t, _ in read)) if read else set()
    for (tensor, dims), (made, made_dims) in itertools.product(read, outputs):
        of_output = found[made]
        of_output.from_end |= found[tensor].from_end
        for place, pieces in found[tensor].places.items():
            is_gone, to = _place_in(node, place, tensor, dims, made, made_dims)
            if _is_from_end(node, place):
                of_output.from_end |= {piece.source for piece in pieces}
            ends = _ends(node, place) or (0, 0)
            after = {piece.without(*ends) for piece in pieces}
            is_joined = node.target is aten.cat.default and to is not None and to[1] > 1
            is_whole = not is_joined or (place in common and len(read) == len(tensor_arguments(node)))
            if is_gone:
                continue
            if to is not None and is_whole and all(_shape(*made)[to[0]] % (to[1] * piece.size) == 0 for piece in after):
                of_output.places.setdefault(to, set()).update(after)
            else:
                _lose(of_output, {piece.source for piece in pieces}, dims[place[0]], made, made_dims)
        for dim, sources in found[tensor].lost.items():
            _lose(of_output, sources, dims[dim], made, made_dims)


def _place_in(
    node: fx.Node, place: SampleDim, tensor: Tensor, dims: tuple, made: Tensor, made_dims: tuple
) -> tuple[bool, SampleDim | None]:
    """Return whether an output of an op has nothing of a dim of an input, which it sums or selects from, and else where
    it has what the input has at a place; None if no rule says so."""
    if _ends(node, place) or (node.target in WHOLE and _shape(*tensor) == _shape(*made)):
        return False, place
    entries = entries_of(dims[place[0]])
    names = [name_of(e) for e in entries if (e.parts if isinstance(e, Inner) else 1) == place[1]]
    is_gone = bool(entries) and not {*names_in((dims[place[0]],))} & {*names_in(made_dims)}
    return is_gone, sample_dim_in(made_dims, (names[0], 1)) if names else None


def _is_from_end(node: fx.Node, place: SampleDim) -> bool:
    """Return whether an op takes places of a dim by their numbers from its end."""
    if node.target not in (aten.slice.Tensor, aten.select.int):
        return False
    given, dims = bound(node), values_of(operand(node))[0].dim()
    at = given["index"] if node.target is aten.select.int else given["start"] or 0
    return at < 0 and [*dims_of(given["dim"], dims)] == [place[0]]


def _ends(node: fx.Node, place: SampleDim) -> tuple[int, int] | None:
    """Return how many places a slice takes from the begin and from the end of a dim, whatever its size; None for what
    is no such slice."""
    if node.target is not aten.slice.Tensor or place[1] > 1:
        return None
    given = bound(node)
    start, end = given["start"] or 0, given["end"]
    is_of_ends = start >= 0 and (end is None or end < 0 or end == sys.maxsize) and given["step"] == 1
    is_here = [*dims_of(given["dim"], len(_shape(node, 0)))] == [place[0]]
    return (start, -min(end or 0, 0)) if is_of_ends and is_here else None


def _lose(found: Found, sources: Collection[Source], dim: Dim, made: Tensor, made_dims: tuple) -> None:
    """Say that places of inputs may be where an output has factors of the `dim` that they were in, or else in any dim
    of which a rule says nothing."""
    names = {*names_in((dim,))}
    for d, (size, of_dim) in enumerate(zip(_shape(*made), made_dims)):
        if size > 1 and (names & {*names_in((of_dim,))} or not entries_of(of_dim)):
            found.lost.setdefault(d, set()).update(sources)


def _shape(node: fx.Node, output: int) -> torch.Size:
    value = node.meta["val"]
    return (value if isinstance(value, torch.Tensor) else value[output]).shape


def places_of(found: Found, sources: Collection[Source]) -> tuple[list[tuple[SampleDim, set[Piece]]], list[int]]:
    """Return the places of some of the sources in a tensor, and the dims in which they may be besides."""
    places = [(at, here) for at, pieces in found.places.items() if (here := {p for p in pieces if p.source in sources})]
    placed = {dim for (dim, _), _ in places}
    return places, [dim for dim, all_ in found.lost.items() if dim not in placed and all_ & {*sources}]
