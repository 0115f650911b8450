"""A sharding rule maps an op to factors; a strategy is one way to shard those factors over a mesh.

A factor is a named index range, as a letter in an einsum: `mm = "m k, k n -> m n"`. Per mesh axis a strategy shards one
factor or none. A sharded factor that an output has shards that dim; one that is summed away makes the output Partial; a
tensor without the factor is replicated over the axis. Besides, a linear op may pass Partial through the arguments in
which it is linear. Data, tensor, sequence and context parallelism are all just factors: no rule knows these words.

The notation follows einsum strings and the factor rules of Shardy (github.com/openxla/shardy, docs/propagation.md).
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import RuleError
from ..ir.layout import ROWS, ZIGZAG, Layout, is_legal
from ..ir.mesh import Mesh


@dataclass(frozen=True)
class Inner:
    """A factor that is the inner part of a dim made of `parts` equal parts: dim size = parts * factor size."""

    factor: str
    parts: int


@dataclass(frozen=True)
class Rows:
    """A factor that cuts a dim of rows which another one may cut as well, over another axis: into blocks, or so that a
    device has the rows of its own experts. `innermost`: those of all rows of a block, whatever the mesh's order."""

    factor: str
    by_owner: bool = False
    innermost: bool = False


# What a tensor dim is to a rule: a factor, the inner part of one, not shardable (None), or a product of several
# factors, outermost first, of which a strategy may shard one; or rows.
Entry = str | Inner | Rows
Dim = Entry | None | tuple[Entry, ...]


@dataclass(frozen=True)
class Rule:
    """Factors of one op instance.

    inputs, outputs: one tuple a tensor (arguments in the order of `tensor_arguments`), one entry a dim.
    linear: sets of argument positions that may be Partial together (the output is then Partial).
    reduction: how shards of a summed-away factor combine, "sum" or "max".
    even: factors that are only cut into equal blocks, with the size that must divide (views merge or split such dims).
    contiguous: factors of which a device must hold one range, whose offset the op takes: never a block of each part.
    within: factors that cut further what another factor of the same dim, which is even, leaves to a device: only over
        axes over which that one cannot be cut.
    zigzag: those of them that may be cut in zigzag.
    apart: factors that make a strategy another one than those with the same layouts: it sends less.
    """

    inputs: tuple[tuple[Dim, ...], ...]
    outputs: tuple[tuple[Dim, ...], ...]
    linear: tuple[frozenset[int], ...] = ()
    reduction: str = "sum"
    even: Mapping[str, int] = field(default_factory=dict, hash=False)
    contiguous: frozenset[str] = frozenset()
    within: Mapping[str, str] = field(default_factory=dict, hash=False)
    zigzag: frozenset[str] = frozenset()
    apart: frozenset[str] = frozenset()

    def factors(self) -> list[str]:
        """Return factor names in order of first use."""
        return list(dict.fromkeys(name for dims in self.inputs + self.outputs for name in names_in(dims)))


def entries_of(dim: Dim) -> tuple[Entry, ...]:
    """Return the factors of one dim, outermost first; none if it cannot be sharded."""
    return () if dim is None else dim if isinstance(dim, tuple) else (dim,)


def name_of(entry: Entry) -> str:
    """Return the name of the factor of one entry."""
    return entry if isinstance(entry, str) else entry.factor


def names_in(dims: Sequence[Dim]) -> list[str]:
    """Return the names of all factors of one tensor."""
    return [name_of(entry) for dim in dims for entry in entries_of(dim)]


def rule(text: str, linear: Sequence[Sequence[int]] = (), reduction: str = "sum") -> Rule:
    """Make a rule of text like "m k, k n -> m n": factors separated by blanks, tensors by commas, `_` for a dim that
    cannot be sharded.

    `linear` as in Rule: `[[0], [1]]` for a bilinear op, `[[0, 1]]` for a sum."""
    if text.count("->") != 1:
        raise RuleError(
            f"cannot read {text!r} as a rule", fix='write what goes in -> what comes out: "m k, k n -> m n"'
        )
    left, right = text.split("->")

    def tensors(side: str) -> tuple[tuple[Dim, ...], ...]:
        return tuple(tuple(None if f == "_" else f for f in tensor.split()) for tensor in side.split(","))

    return Rule(tensors(left), tensors(right), tuple(frozenset(s) for s in linear), reduction)


@dataclass(frozen=True)
class Strategy:
    """One choice for one op: a layout for every tensor argument and output, and how many ways the work is divided.
    `on_host`: of a parameter, whether its shards lie in the host's memory."""

    inputs: tuple[Layout, ...]
    outputs: tuple[Layout, ...]
    choice: tuple[str, ...]  # per axis: the factor sharded, "" for none, "+0,1" for Partial through arguments 0 and 1
    ways: int
    on_host: bool = False

    def text(self, mesh: Mesh) -> str:
        """Return the choice of each axis that has one, as "dp:b tp:h", or "replicated"."""
        return " ".join(f"{axis}:{c}" for axis, c in zip(mesh.names, self.choice) if c) or "replicated"


def strategies(
    rule: Rule,
    input_shapes: Sequence[Sequence[int]],
    output_shapes: Sequence[Sequence[int]],
    mesh: Mesh,
    parts: Mapping[str, Sequence[int]] | None = None,
) -> list[Strategy]:
    """Return all legal strategies of an op over all axes of the mesh, the replicated one first, without duplicates.

    Shapes are global. `parts` names factors that may also be sharded inside that many equal parts (fused weights)."""
    inside = tuple((factor, tuple(counts)) for factor, counts in (parts or {}).items())
    return list(_strategies(rule, _sizes(input_shapes), _sizes(output_shapes), mesh, inside))


def _sizes(shapes: Sequence[Sequence[int]]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(shape) for shape in shapes)


@functools.lru_cache(maxsize=1024)  # the ops of a model are many, of few rules and shapes
def _strategies(
    rule: Rule,
    input_shapes: tuple[tuple[int, ...], ...],
    output_shapes: tuple[tuple[int, ...], ...],
    mesh: Mesh,
    parts: tuple[tuple[str, tuple[int, ...]], ...],
) -> tuple[Strategy, ...]:
    options: list[tuple[str, int]] = [("", 1)]
    for factor in rule.factors():
        options += [(factor, p) for p in (1, *dict(parts).get(factor, ()))]
    options += [("+" + ",".join(map(str, sorted(s))), 1) for s in rule.linear]
    result: dict[tuple[object, ...], Strategy] = {}
    tensors = _tensors(rule, input_shapes, output_shapes)
    for choice in itertools.product(options, repeat=len(mesh.names)):
        strategy = _strategy(rule, choice, *tensors, mesh)
        if strategy is not None:
            apart = not rule.apart.isdisjoint(strategy.choice)
            result.setdefault((strategy.inputs, strategy.outputs, apart), strategy)
    return tuple(result.values())


def strategy_of(
    rule: Rule,
    label: Sequence[str],
    input_shapes: Sequence[Sequence[int]],
    output_shapes: Sequence[Sequence[int]],
    mesh: Mesh,
) -> Strategy | None:
    """Return the strategy that a `Strategy.choice` names, None if the op has none of that name."""
    factors, linear = rule.factors(), {"+" + ",".join(map(str, sorted(s))) for s in rule.linear}
    choice = []
    for word in label:
        match = re.fullmatch(r"(.*?)(?:/(\d{1,9}|zigzag))?", word, re.DOTALL)
        assert match is not None  # every text matches
        factor, parts = match[1], ZIGZAG if match[2] == "zigzag" else int(match[2] or 1)
        if parts != 1 and factor in rule.contiguous - (rule.zigzag if parts == ZIGZAG else frozenset()):
            return None
        if not parts or factor and factor not in factors and (factor not in linear or parts != 1):
            return None
        choice.append((factor, parts))
    if len(choice) != len(mesh.names):
        return None
    return _strategy(rule, choice, *_tensors(rule, input_shapes, output_shapes), mesh)


Choice = Sequence[tuple[str, int]]  # per axis: the factor that it cuts, or "+0,1", and inside of how many equal parts


class _Tensor:
    """An argument of an op, or an output (`argument` is None), with the layouts that choices give it: each is found
    once for all choices that say the same of its own factors."""

    def __init__(self, rule: Rule, dims: tuple[Dim, ...], shape: Sequence[int], argument: int | None):
        self.dims, self.shape, self.reduction, self.within = dims, shape, rule.reduction, rule.within
        self.even = rule.even
        own = set(names_in(dims))
        inputs = {name for one in rule.inputs for name in names_in(one)}
        self.summed_away = inputs - own if argument is None else set()
        self.through = {"+" + ",".join(map(str, sorted(s))) for s in rule.linear if argument is None or argument in s}
        self.said_by = own | self.summed_away | self.through
        self.known: dict[tuple[tuple[str, int] | None, ...], Layout | None] = {}

    def layout(self, choice: Choice, mesh: Mesh) -> Layout | None:
        """Return the layout under a choice, None if there is none, or none that is legal."""
        key = tuple([one if one[0] in self.said_by else None for one in choice])
        if key not in self.known:
            found = self._layout(key, mesh)
            self.known[key] = found if found is not None and is_legal(self.shape, found, mesh) else None
        return self.known[key]

    def _layout(self, choice: Sequence[tuple[str, int] | None], mesh: Mesh) -> Layout | None:
        sharded: dict[str, list[str]] = {}
        parts: dict[str, int] = {}
        partial = []
        for axis, one in zip(mesh.names, choice):
            if one is None:
                continue
            if one[0] in self.through:
                partial.append((axis, "sum"))
            elif one[0] in self.summed_away:
                partial.append((axis, self.reduction))
            else:
                sharded.setdefault(one[0], []).append(axis)
                parts[one[0]] = one[1]
        axes, counts, owned = [], [], []
        for dim in self.dims:
            cut = [entry for entry in entries_of(dim) if name_of(entry) in sharded]
            if any(isinstance(entry, Rows) for entry in cut):
                owners = [entry.factor for entry in cut if isinstance(entry, Rows) and entry.by_owner]
                if len(owners) > 1 or any(parts[name_of(entry)] != 1 for entry in cut):
                    return None
                owned += [(axis, ROWS) for factor in owners for axis in sharded[factor]]
                by = {axis for entry in cut for axis in sharded[name_of(entry)]}
                count = math.prod(map(mesh.size, by))
                if any(self.even[name_of(entry)] % count for entry in cut if name_of(entry) in self.even):
                    return None
                last = {axis for e in cut if isinstance(e, Rows) and e.innermost for axis in sharded[e.factor]}
                axes.append(tuple(sorted(by, key=lambda axis: (axis in last, mesh.names.index(axis)))))
                counts.append(1)
                continue
            if len(cut) == 2 and self.within.get(name_of(cut[1])) == name_of(cut[0]) and parts[name_of(cut[0])] == 1:
                axes.append(tuple(axis for entry in cut for axis in sharded[name_of(entry)]))
                counts.append(1)
                continue
            if len(cut) > 1:  # no layout says that two factors of one dim are cut
                return None
            if any(isinstance(entry, Inner) and parts[entry.factor] == ZIGZAG for entry in cut):
                return None
            axes.append(tuple(sharded[name_of(cut[0])]) if cut else ())
            counts.append(parts[name_of(cut[0])] * (cut[0].parts if isinstance(cut[0], Inner) else 1) if cut else 1)
        return Layout(tuple(axes), tuple(sorted(partial + owned)), tuple(counts))


def _tensors(
    rule: Rule, input_shapes: Sequence[Sequence[int]], output_shapes: Sequence[Sequence[int]]
) -> tuple[list[_Tensor], list[_Tensor]]:
    inputs = [
        _Tensor(rule, dims, shape, i) for i, (dims, shape) in enumerate(zip(rule.inputs, input_shapes, strict=True))
    ]
    return inputs, [_Tensor(rule, dims, shape, None) for dims, shape in zip(rule.outputs, output_shapes, strict=True)]


def _strategy(
    rule: Rule, choice: Choice, inputs: Sequence[_Tensor], outputs: Sequence[_Tensor], mesh: Mesh
) -> Strategy | None:
    parts: dict[str, int] = {}
    ways: dict[str, int] = {}
    for axis, (factor, p) in zip(mesh.names, choice):
        if factor and not factor.startswith("+"):
            if parts.setdefault(factor, p) != p:
                return None
            ways[factor] = ways.get(factor, 1) * mesh.size(axis)
    if any(f in rule.even and rule.even[f] % (count * parts[f]) for f, count in ways.items()):
        return None
    for factor, outer in rule.within.items():
        own = [mesh.size(axis) for axis, (name, _) in zip(mesh.names, choice) if name == factor]
        if any(rule.even[outer] % (ways.get(outer, 1) * size) == 0 for size in own):
            return None
    layouts = []
    for tensor in (*inputs, *outputs):
        layout = tensor.layout(choice, mesh)
        if layout is None:
            return None
        layouts.append(layout)
    label = tuple(f if p == 1 else f"{f}/{'zigzag' if p == ZIGZAG else p}" for f, p in choice)
    return Strategy(tuple(layouts[: len(inputs)]), tuple(layouts[len(inputs) :]), label, math.prod(ways.values()))
