"""A sharding rule maps an op to factors; a strategy is one way to shard those factors over a mesh.

A factor is a named index range, as a letter in an einsum: `mm = "m k, k n -> m n"`. Per mesh axis a strategy shards one factor
or none. A sharded factor that an output has shards that dim; one that is summed away makes the output Partial; a tensor
without the factor is replicated over the axis. Besides, a linear op may pass Partial through the arguments in which it is
linear. Data, tensor, sequence and context parallelism are all just factors: no rule knows these words.

The notation follows einsum strings and the factor rules of Shardy (github.com/openxla/shardy, docs/propagation.md).
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..layout import Layout, is_legal
from ..mesh import Mesh


@dataclass(frozen=True)
class Inner:
    """A factor that is the inner part of a dim made of `parts` equal parts: dim size = parts * factor size."""

    factor: str
    parts: int


Dim = str | Inner | None  # what a tensor dim is to a rule: a factor, the inner part of one, or not shardable


@dataclass(frozen=True)
class Rule:
    """Factors of one op instance.

    inputs, outputs: one tuple a tensor (arguments in the order of `tensor_arguments`), one entry a dim.
    linear: sets of argument positions that may be Partial together (the output is then Partial).
    reduction: how shards of a summed-away factor combine, "sum" or "max"; `exact` if the op's own result must not be split.
    even: factors that can only be cut into equal blocks, with the size that must divide (views merge or split such dims).
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    linear: tuple[frozenset[int], ...] = ()
    reduction: str = "sum"
    even: Mapping[str, int] = field(default_factory=dict)

    def factors(self) -> list[str]:
        """Factor names in order of first use."""
        names = [name_of(entry) for dims in self.inputs + self.outputs for entry in dims]
        return list(dict.fromkeys(name for name in names if name))


def name_of(entry: Dim) -> str | None:
    return entry.factor if isinstance(entry, Inner) else entry


def rule(text: str, linear: Sequence[Sequence[int]] = (), reduction: str = "sum") -> Rule:
    """`rule("m k, k n -> m n")`: factors separated by blanks, tensors by commas, `_` for a dim that cannot be sharded."""
    left, right = text.split("->")

    def tensors(side: str) -> tuple[tuple[Dim, ...], ...]:
        return tuple(tuple(None if f == "_" else f for f in tensor.split()) for tensor in side.split(","))

    return Rule(tensors(left), tensors(right), tuple(frozenset(s) for s in linear), reduction)


@dataclass(frozen=True)
class Strategy:
    """One choice for one op: a layout for every tensor argument and every output, and how many ways the work is divided."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choice: tuple[str, ...]  # per axis: the factor sharded, "" for none, "+0,1" for Partial through arguments 0 and 1
    ways: int

    def text(self, mesh: Mesh) -> str:
        return " ".join(f"{axis}:{c}" for axis, c in zip(mesh.names, self.choice) if c) or "replicated"


def strategies(
    rule: Rule,
    input_shapes: Sequence[Sequence[int]],
    output_shapes: Sequence[Sequence[int]],
    mesh: Mesh,
    parts: Mapping[str, Sequence[int]] | None = None,
) -> list[Strategy]:
    """All legal strategies of an op over all axes of the mesh, the replicated one first, without duplicates.

    Shapes are global. `parts` names factors that may also be sharded inside that many equal parts (fused weights).
    """
    options: list[tuple[str, int]] = [("", 1)]
    for factor in rule.factors():
        options += [(factor, p) for p in (1, *(parts or {}).get(factor, ()))]
    options += [("+" + ",".join(map(str, sorted(s))), 1) for s in rule.linear]
    result: dict[tuple, Strategy] = {}
    for choice in itertools.product(options, repeat=len(mesh.names)):
        strategy = _strategy(rule, choice, input_shapes, output_shapes, mesh)
        if strategy is not None:
            result.setdefault((strategy.inputs, strategy.outputs), strategy)
    return list(result.values())


def _strategy(rule, choice, input_shapes, output_shapes, mesh) -> Strategy | None:
    sharded: dict[str, list[str]] = {}
    parts: dict[str, int] = {}
    through: dict[str, frozenset[int]] = {}
    ways = 1
    for axis, (factor, p) in zip(mesh.names, choice):
        if factor.startswith("+"):
            through[axis] = frozenset(map(int, factor[1:].split(",")))
        elif factor:
            if parts.setdefault(factor, p) != p:
                return None
            sharded.setdefault(factor, []).append(axis)
            ways *= mesh.size(axis)
    for factor, axes in sharded.items():
        count = 1
        for axis in axes:
            count *= mesh.size(axis)
        if factor in rule.even and (rule.even[factor] % (count * parts[factor])):
            return None

    in_inputs = {name_of(e) for dims in rule.inputs for e in dims}

    def layout(dims: tuple[Dim, ...], argument: int | None) -> Layout:
        names = {name_of(e) for e in dims}
        axes = tuple(tuple(sharded.get(name_of(e), ())) for e in dims)
        counts = tuple(
            (parts.get(name_of(e), 1) * (e.parts if isinstance(e, Inner) else 1)) if name_of(e) in sharded else 1
            for e in dims
        )
        partial = [(a, "sum") for a, arguments in through.items() if argument is None or argument in arguments]
        if argument is None:
            partial += [
                (a, rule.reduction) for f, fa in sharded.items() if f not in names and f in in_inputs for a in fa
            ]
        return Layout(axes, tuple(sorted(partial)), counts)

    inputs = tuple(layout(dims, i) for i, dims in enumerate(rule.inputs))
    outputs = tuple(layout(dims, None) for dims in rule.outputs)
    for layouts, shapes in ((inputs, input_shapes), (outputs, output_shapes)):
        if not all(is_legal(shape, l, mesh) for l, shape in zip(layouts, shapes)):
            return None
    label = tuple(f if p == 1 else f"{f}/{p}" for f, p in choice)
    return Strategy(inputs, outputs, label, ways)
