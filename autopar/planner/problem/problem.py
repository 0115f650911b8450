"""The joint graph as an optimization problem: vertices with strategies to choose from, and uses of tensors between
them.

Every vertex belongs to a class; the vertices of a class share one choice, as those of repeated blocks do
(autopar/planner/problem/symmetry.py).
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from torch import fx

from ... import rules
from ...cost.collectives import CollectiveCost
from ...cost.compute import EAGER, FREE, ComputeCost
from ...cost.expert_copies import CopyCost
from ...cost.memory import Optimizer
from ...cost.orthogonalize import OrthogonalizeCost
from ...cost.skew import Skew
from ...cost.update import UpdateCost
from ...frontend.export import Captured
from ...frontend.repeated_blocks import Compact
from ...ir.block_order import block_of
from ...ir.graph import bytes_of, output_node, tensor_of, values_of
from ...ir.layout import Layout
from ...ir.mesh import Mesh
from ...ir.stage_placement import StagePlacement
from ...ops import autopar
from ...rules import Rule
from ...rules.loss_regions import LossRegion
from ...rules.query_regions import QueryRegion
from ...rules.row_regions import RowRegion
from .chosen import Chosen
from .offload import Offload
from .strategies import Choices, choices_of, in_memory
from .vertices import Use, Vertex, vertices_of


@dataclass
class Problem:
    """Everything the solver reads. Tensors are keyed (vertex, output). `compact`: the graph that is planned instead of
    `whole`."""

    mesh: Mesh
    vertices: list[Vertex]
    uses: list[Use]
    classes: dict[int, Choices]
    tensor_bytes: dict[tuple[int, int], int]
    unruled: list[fx.Node]
    graph: fx.Graph
    rule_of: dict[int, Rule | None]
    output_uses: list[Use]  # one an output of the graph
    whole: fx.Graph
    optimizer: Optimizer
    reserve_bytes: float = 0.0  # of a device, that no tensor gets (Hardware.reserve_bytes)
    is_for_gpus: bool = False
    offload: Offload = Offload()
    compact: Compact | None = None
    fits: dict[int, np.ndarray] = field(
        default_factory=dict
    )  # by class, strategies that another graph allows (see overlay.py)
    orthogonalize: OrthogonalizeCost | None = None
    skew: Skew = Skew()
    expert_capacity: float | None = None
    copy_cost: CopyCost | None = None  # of hot experts, if there are any
    tiled: tuple[LossRegion | RowRegion, ...] = ()  # computed in pieces, see tiled.py
    # by how many of the blocks left out decide as block 2 does, the problem of the whole graph and, by vertex, its own
    written: dict[int, tuple[Problem, dict[int, list[int]]]] = field(default_factory=dict, init=False, repr=False)
    _chosen: Chosen | None = field(default=None, init=False, repr=False, compare=False)
    _copies: dict[int, Sequence[int]] = field(default_factory=dict, init=False, repr=False)
    _placements: dict[tuple[str, ...], StagePlacement] = field(default_factory=dict, init=False, repr=False)

    @property
    def half(self) -> int:
        """Return half of the blocks that the compact graph leaves out, 0 if it leaves none out."""
        return self.compact.most // 2 if self.compact else 0

    def copies(self, first: int) -> Sequence[int]:
        """Return how many vertices of the whole graph each vertex stands for, where `first` of the blocks left out
        decide as block 2 does, the others as block 5."""
        if first not in self._copies:
            self._copies[first] = [
                1 if v.block is None or self.compact is None else len(self.compact.stands_for(v.block, first))
                for v in self.vertices
            ]
        return self._copies[first]

    def chosen(self, choice: dict[int, int]) -> Chosen:
        """Return what the vertices do under a choice; that of the last one that was asked for is known."""
        if self._chosen is None or self._chosen.choice is not choice:
            self._chosen = Chosen.of(self, choice)
        return self._chosen

    def placement(self, cuts: Sequence[str]) -> StagePlacement:
        """Return the stages that begin at these forward ops. Raises StageError."""
        if (key := tuple(cuts)) not in self._placements:
            self._placements[key] = StagePlacement(self.graph, cuts, next(iter(self._placements.values()), None))
        return self._placements[key]

    @cached_property
    def producers(self) -> Sequence[Sequence[int]]:
        """Return, by vertex, those that make what it reads."""
        return [[producer for producer, _ in v.inputs] for v in self.vertices]

    @cached_property
    def uses_of(self) -> Mapping[tuple[int, int], Sequence[Use]]:
        """Return all uses of every tensor, in order of the graph."""
        found: dict[tuple[int, int], list[Use]] = {}
        for use in self.uses:
            found.setdefault((use.producer, use.output), []).append(use)
        return found

    @cached_property
    def vertex_of(self) -> Mapping[tuple[fx.Node, int], tuple[int, int]]:
        """Return the tensors that ops give by what the lowering knows them as, see `Vertex.tensor`."""
        ops = (v for v in self.vertices if v.kind == "op")
        return {v.tensor(o): (v.index, o) for v in ops for o in range(len(v.values))}

    @property
    def tiled_losses(self) -> list[LossRegion]:
        """Return the regions in pieces that are a last layer and its loss."""
        return [region for region in self.tiled if isinstance(region, LossRegion)]

    @property
    def tiled_rows(self) -> list[RowRegion]:
        """Return the regions in pieces that are row-wise ops, or ops by place around an attention."""
        return [region for region in self.tiled if isinstance(region, RowRegion)]

    @property
    def tiled_queries(self) -> list[QueryRegion]:
        """Return those of them that are an attention in pieces of its queries."""
        return [region for region in self.tiled if isinstance(region, QueryRegion)]

    @cached_property
    def blocks(self) -> Sequence[str]:
        """Return, by vertex, the block of an op's module, or the module itself outside of blocks; "" for what is in no
        module."""
        modules = [v.node.meta.get("module", "") if v.kind == "op" else "" for v in self.vertices]
        return [block_of(module) or module for module in modules]

    @cached_property
    def views(self) -> frozenset[int]:
        """Return the vertices that only look at the memory of what they read."""
        return frozenset(v.index for v in self.vertices if v.kind == "op" and v.node.target in FREE)

    @cached_property
    def staying(self) -> frozenset[tuple[int, int]]:
        """Return the tensors that are read in the layout in which they are made: keys with those of earlier chunks, and
        their gradients, which a device keeps (autopar/ops/kept_keys.py)."""
        ops = [v for v in self.vertices if v.kind == "op"]
        kept = ((v.index, 0) for v in ops if v.node.target is autopar.with_earlier.default)
        return frozenset((*kept, *(v.inputs[0] for v in ops if v.node.target is autopar.of_own.default)))

    @cached_property
    def never_made(self) -> frozenset[tuple[int, int]]:
        """Return the tensors that are never whole, as the region around them is computed in pieces."""
        vertex_of = {v.node: v.index for v in self.vertices if v.kind == "op"} if self.tiled else {}
        tensors = (tensor_of(node) for region in self.tiled for node in region.never_made)
        return frozenset((vertex_of[producer], output) for producer, output in tensors)

    @cached_property
    def in_blocks(self) -> frozenset[int]:
        """Return the vertices during which blocks of logits take memory."""
        nodes = {node for region in self.tiled_losses for node in (region.sums, region.dx, region.dw)}
        return frozenset(v.index for v in self.vertices if v.node in nodes and v.kind == "op")

    @cached_property
    def query_dims(self) -> Mapping[tuple[int, int], int]:
        """Return the tensors inside of regions around attentions, with their dims of queries."""
        vertex_of = {v.node: v.index for v in self.vertices if v.kind == "op"} if self.tiled else {}
        each = [(tensor_of(node), region.dims[node]) for region in self.tiled_queries for node in region.never_made]
        return {(vertex_of[producer], output): dim for (producer, output), dim in each}

    @cached_property
    def attentions_in_pieces(self) -> frozenset[int]:
        """Return the vertices of attentions in pieces of their queries, forward and backward."""
        nodes = {node for region in self.tiled_queries for node in (region.node, region.attention_bw)}
        return frozenset(v.index for v in self.vertices if v.kind == "op" and v.node in nodes)

    @cached_property
    def made_again(self) -> Mapping[int, int]:
        """Return the vertices of the forward that the backward of a row-wise region runs again, with its number."""
        number = {node: i for i, region in enumerate(self.tiled_rows) for node in region.again}
        return {v.index: number[v.node] for v in self.vertices if v.kind == "op" and v.node in number}

    def read_again(self) -> list[Use]:
        """Return what those vertices read in the backward of what is not made inside of their region."""
        inside = {node for region in self.tiled_rows for node in region.forward}
        return [
            Use(p, o, v, slot, "backward")
            for v in self.made_again
            for slot, (p, o) in enumerate(self.vertices[v].inputs)
            if self.vertices[p].node not in inside
        ]

    @cached_property
    def owned_axes(self) -> Mapping[int, list[tuple[str, ...]]]:
        """Return, for every class that may have rows by owner, the axes over which each of its strategies has them."""
        found = {
            cls: [
                tuple(sorted({axis for layout in (*s.inputs, *s.outputs) for axis in layout.owned_axes}))
                for s in options.strategies
            ]
            for cls, options in self.classes.items()
        }
        return {cls: axes for cls, axes in found.items() if any(axes)}

    def whole_nodes(self, node: fx.Node, first: int) -> list[fx.Node]:
        """Return the nodes of the whole graph that a node of the planned graph stands for; for `first` see `copies`."""
        return [node] if self.compact is None else self.compact.nodes(node, first)

    def choices(self, vertex: int) -> Choices:
        """Return what the class of a vertex may choose."""
        return self.classes[self.vertices[vertex].cls]


def _number_blocks(vertices: list[Vertex], compact: Compact) -> None:
    """Set the blocks of a compact graph's vertices; an output has one if every block makes such a one."""
    for v in vertices:
        block = compact.block(v.node)
        if v.kind != "output" or v.is_joined:
            v.block = block
        elif compact.is_inner(block):
            v.block, v.signature = block, (*v.signature[:2], "")


def build(
    captured: Captured,
    mesh: Mesh,
    hardware,
    optimizer: Optimizer,
    fold: Callable[[list[Vertex], list[Use]], list[int]],
    fixed: dict[str, Layout] | None = None,
    pins: dict[str, str] | None = None,
    offload: Offload = Offload(),
    micro_batches: int = 1,
    orthogonalize: OrthogonalizeCost | None = None,
    execution: str = EAGER,
    zigzag: bool = False,
    skew: Skew = Skew(),
    expert_capacity: float | None = None,
    collectives: CollectiveCost | None = None,
) -> Problem:
    """Return the problem of a captured joint graph, of a step of so many `micro_batches`. `fixed` gives layouts by
    placeholder name; `orthogonalize`: the price of Muon's updates of matrices; `execution`: how the graph runs;
    `zigzag`: whether sequences may be cut so; `skew` and `expert_capacity` as in `ComputeCost`; `collectives`: what
    prices copies of hot experts. `fold` gives the classes; leaves that different `pins` name do not share one."""
    compact = captured.compact
    graph = compact.graph if compact else captured.graph
    vertices, uses = vertices_of(graph)
    if compact:
        _number_blocks(vertices, compact)
    part_sets = rules.propagate_parts(graph, zigzag=zigzag)
    rule_of: dict[int, Rule | None] = {}
    unruled = []
    tensors_of = {
        v.index: [(vertices[p].node, o) for p, o in v.inputs] + [(v.node, o) for o in range(len(values_of(v.node)))]
        for v in vertices
        if v.kind == "op"
    }
    for v in vertices:
        if v.kind == "op":
            rule = rule_of[v.index] = rules.rule_of(v.node)
            if rule is None:
                unruled.append(v.node)
            v.signature = (*v.signature, tuple(part_sets.get(t) for t in tensors_of[v.index]))
        elif v.kind in ("parameter", "input", "tangent"):
            v.signature = (*v.signature, str(part_sets.get((v.node, 0))))
        if v.kind in ("parameter", "input", "buffer"):
            named = [p for p in pins or {} if fnmatch.fnmatchcase(v.node.meta["role"].name, p)]
            v.signature = (*v.signature, str((fixed or {}).get(v.name)), v.name in offload.on_host, tuple(named))
    for v, cls in zip(vertices, fold(vertices, uses)):
        v.cls = cls
    _couple(vertices)
    copies = CopyCost(collectives, hardware, skew.hot) if collectives and skew.hot else None
    cost = ComputeCost(hardware, execution, skew, expert_capacity, copies)
    update = UpdateCost(hardware.reached_memory_bytes_per_second, micro_batches)
    classes: dict[int, Choices] = {}
    for v in vertices:
        if v.cls not in classes:
            pinned = (fixed or {}).get(v.name)
            classes[v.cls] = choices_of(
                vertices[v.cls],
                rule_of.get(v.cls),
                part_sets,
                mesh,
                cost,
                optimizer,
                pinned,
                offload,
                update,
                orthogonalize,
            )
        classes[v.cls].members.append(v.index)
    tensor_bytes = {
        (v.index, i): bytes_of(value) for v in vertices if v.kind != "output" for i, value in enumerate(v.values)
    }
    outputs = uses[len(uses) - len(output_node(graph).args[0]) :]
    problem = Problem(
        mesh,
        vertices,
        uses,
        classes,
        tensor_bytes,
        unruled,
        graph,
        rule_of,
        outputs,
        captured.graph,
        optimizer,
        hardware.reserve_bytes,
        hardware.is_gpu,
        offload,
        compact,
        orthogonalize=orthogonalize,
        skew=skew,
        expert_capacity=expert_capacity,
        copy_cost=copies,
    )
    for v, copies in zip(vertices, problem.copies(problem.half)):
        classes[v.cls].copies += copies
    return problem


def with_offload(problem: Problem, offload: Offload, update: UpdateCost) -> Problem:
    """Return the problem with parameters in the kinds of memory that another `offload` says, and all else as it is."""
    classes = {
        cls: in_memory(problem.vertices[cls], options, problem.mesh, problem.optimizer, offload, update)
        if problem.vertices[cls].kind == "parameter"
        else options
        for cls, options in problem.classes.items()
    }
    return replace(problem, classes=classes, offload=offload)


def _couple(vertices: list[Vertex]) -> None:
    """Name each class after its first member, so that the representative's index is the class."""
    first: dict[int, int] = {}
    for v in vertices:
        v.cls = first.setdefault(v.cls, v.index)
