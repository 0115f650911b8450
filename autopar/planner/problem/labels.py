"""Label the factors of ops by what they are of: the batch, a weight, the sequence, experts, or what runs between
tensor-parallel regions.

Dims of tensors that share a factor of some op are one group, so a label of one dim is one of the whole group: what is
the batch in an input is the batch in every op that the batch reaches.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ...adapt.lora_site import is_factor
from ...cost.compute import GROUPED
from ...ir.graph import values_of
from ...ops import autopar
from ...rules.rule import entries_of, name_of
from .problem import Problem
from .vertices import Vertex

aten = torch.ops.aten
FORWARD_LINEAR = {autopar.linear.default, autopar.fp8_linear.default}
LINEAR_OPS = FORWARD_LINEAR | {
    autopar.linear_dx.default, autopar.linear_dw.default, autopar.fp8_linear_dx.default, autopar.fp8_linear_dw.default,
}  # fmt: skip
NORMS = {  # that stand between blocks, where sequence parallelism cuts the sequence, or in an attention
    aten.native_layer_norm.default, aten.native_layer_norm_backward.default,
    aten._fused_rms_norm.default, aten._fused_rms_norm_backward.default,
}  # fmt: skip
LOOK_UPS = {aten.embedding.default, aten.embedding_dense_backward.default}  # which are cut by their vocabulary

Group = tuple[int, int, int]  # class, output and dim that stand for it


@dataclass(frozen=True)
class Factors:
    """The factors of an op that come from the batch dim of an input, from a parameter's dim, from an input's
    sequence, and from the experts of a grouped product; of a parameter that has experts, the dim. `between`: of an op
    on the residual stream the factors of its places, along which sequence parallelism cuts it; of a parameter with
    one dim that is not of a linear layer's features inside of a block, that dim."""

    batch: set[str]
    weight: set[str]
    sequence: set[str]
    expert: set[str | int]
    between: set[str | int]


def factors_of(problem: Problem, has_sequence: bool) -> dict[int, Factors]:
    """Return the factors of ops and the dims of parameters by what they are of, by class. A dim of several factors
    joins its outermost one's group only. If asked for, the sequence is dim 1 of integers (b, s), of whatever else has
    that size, and of numbers (b, s, h), unless a parameter has it: then it is a dim of images or the like."""
    all_groups, dim_of_factor = _groups(problem)
    find = all_groups.find
    batch, weight, expert = set(), set(), set()
    of_integers: set[Group] = set()
    of_numbers: set[Group] = set()
    for cls in problem.classes:
        v = problem.vertices[cls]
        if v.kind == "op" and v.node.target in GROUPED:
            expert |= {find(dim_of_factor[cls]["g"])} if "g" in dim_of_factor[cls] else set()
        elif v.kind == "input" and v.node.meta["val"].dim():
            batch.add(find((cls, 0, 0)))
            is_number = v.node.meta["val"].is_floating_point()
            if v.node.meta["val"].dim() == (3 if is_number else 2):
                (of_numbers if is_number else of_integers).add(find((cls, 0, 1)))
        elif v.kind == "parameter":
            weight |= {find((cls, 0, d)) for d in range(v.node.meta["val"].dim())}
    sequence = (of_integers | (of_numbers - weight)) - batch if has_sequence else set()
    groups = batch, weight - sequence, sequence
    features = _across_norms(problem, all_groups)
    stream, hidden = _residual_stream(problem, features)
    made = {}
    for cls in problem.classes:
        v = problem.vertices[cls]
        of: list[set[str]] = [{f for f, x in dim_of_factor[cls].items() if find(x) in group} for group in groups]
        between: set[str | int] = set()
        if v.kind == "parameter":
            dims = range(v.node.meta["val"].dim())
            between = {0} if len(dims) == 1 and stream and features.find((cls, 0, 0)) not in hidden else set()
            experts: set[str | int] = {d for d in dims if find((cls, 0, d)) in expert}
        else:
            experts = {f for f, x in dim_of_factor[cls].items() if find(x) in expert}
            experts |= {"e"} if v.node.target in GROUPED else set()
            if v.node.target not in LINEAR_OPS | LOOK_UPS and of[0]:
                between |= _places(problem, v, features, stream) - of[0]
        made[cls] = Factors(of[0], of[1], of[2], experts, between)
    return made


class _Groups:
    """Dims of tensors in groups, each named after one of its dims."""

    def __init__(self, known: dict[Group, Group] | None = None):
        self.parent = dict(known or {})

    def find(self, x: Group) -> Group:
        """Return the group of a dim."""
        while self.parent.setdefault(x, x) != x:
            self.parent[x] = self.parent[self.parent[x]]
            x = self.parent[x]
        return x

    def join(self, x: Group, y: Group) -> None:
        """Make one group of those of two dims."""
        self.parent[self.find(x)] = self.find(y)


def _groups(problem: Problem) -> tuple[_Groups, dict[int, dict[str, Group]]]:
    """Return the groups, and for every class a dim of each of its factors."""
    groups = _Groups()
    dim_of_factor: dict[int, dict[str, Group]] = defaultdict(dict)
    for cls in problem.classes:
        v, rule = problem.vertices[cls], problem.rule_of.get(cls)
        if v.kind != "op" or rule is None:
            continue
        for tensor, dims in _tensors(problem, v):
            for d, dim in enumerate(dims):
                for entry in entries_of(dim)[:1]:
                    groups.join((*tensor, d), dim_of_factor[cls].setdefault(name_of(entry), (*tensor, d)))
        for factor, outer in rule.within.items():
            dim_of_factor[cls][factor] = dim_of_factor[cls][outer]
    return groups, dim_of_factor


def _across_norms(problem: Problem, groups: _Groups) -> _Groups:
    """Return the groups with the features before and behind a norm, and of its weights, in one: its rule has no factor
    for them."""
    found = _Groups(groups.parent)
    for cls in problem.classes:
        v = problem.vertices[cls]
        if v.kind == "op" and v.node.target in NORMS and problem.rule_of.get(cls) is not None:
            last = [(*tensor, len(dims) - 1) for tensor, dims in _tensors(problem, v) if dims and dims[-1] is None]
            sizes = [_value(problem, tensor).shape[d] for *tensor, d in last]
            for one, size in zip(last, sizes):
                if size == sizes[0]:
                    found.join(one, last[0])
    return found


def _value(problem: Problem, tensor: Sequence[int]):
    cls, output = tensor
    return values_of(problem.vertices[cls].node)[output]


def _tensors(problem: Problem, v: Vertex) -> list[tuple[tuple[int, int], tuple]]:
    """Return every tensor that an op reads or makes, as (class, output), with what its dims are to the op's rule."""
    rule = problem.rule_of[v.cls]
    assert rule is not None
    read = [(problem.vertices[p].cls, o) for p, o in v.inputs]
    return list(zip(read, rule.inputs)) + [((v.cls, o), dims) for o, dims in enumerate(rule.outputs)]


def _residual_stream(problem: Problem, features: _Groups) -> tuple[set[Group], set[Group]]:
    """Return the groups of the features that blocks read and add to, and those of all other linear layers' features.
    Most layers at features of the stream lead to others at which fewer meet: all blocks' layers meet there, at a hidden
    layer's its own alone. Adapters of layers do not count, and without blocks that add to it there is no stream."""
    ends: list[tuple[Group, Group, int]] = []
    added: set[Group] = set()
    for cls, options in problem.classes.items():
        v = problem.vertices[cls]
        if v.kind == "op" and v.node.target is aten.add.Tensor and v.phase != "backward":
            added |= _summed(problem, v, features)
        elif v.kind == "op" and v.node.target in FORWARD_LINEAR and not is_factor(v.node.meta["module"]):
            (read, dims), *_, (made, made_dims) = _tensors(problem, v)
            ends.append(
                (
                    features.find((*read, len(dims) - 1)),
                    features.find((*made, len(made_dims) - 1)),
                    len(options.members),
                )
            )
    meet: Counter[Group] = Counter()
    for a, b, count in ends:
        meet[a] += count
        meet[b] += count
    smaller: Counter[Group] = Counter()
    for a, b, count in ends:
        smaller[a] += count * (meet[b] < meet[a])
        smaller[b] += count * (meet[a] < meet[b])
    stream = {group for group, count in meet.items() if 2 * smaller[group] > count} & added
    return stream, set(meet) - stream


def _summed(problem: Problem, v: Vertex, features: _Groups) -> set[Group]:
    """Return the group of the features of a sum of two tensors of one shape, as behind a block; empty for others."""
    if problem.rule_of.get(v.cls) is None or len(v.inputs) != 2:
        return set()
    shapes = {tuple(_value(problem, (problem.vertices[p].cls, o)).shape) for p, o in v.inputs}
    return {features.find((v.cls, 0, len(shape) - 1)) for shape in shapes if shape and len(shapes) == 1}


def _places(problem: Problem, v: Vertex, features: _Groups, stream: set[Group]) -> set[str]:
    """Return the factors of the other dims of an op's tensors that have features of the stream."""
    found: set[str] = set()
    if problem.rule_of.get(v.cls) is None:
        return found
    for tensor, dims in _tensors(problem, v):
        groups = {d: features.find((*tensor, d)) for d in range(len(dims))}
        if any(group in stream for group in groups.values()):
            others = (d for d, group in groups.items() if group not in stream)
            found |= {name_of(entry) for d in others for entry in entries_of(dims[d])[:1]}
    return found
