"""Further rounds for the rows of experts that are beyond the capacity of a device, in the forward and in the backward.

    y      = place_rows(exchange_rows(... grouped_mm(exchange_rows(x[rows], ...), weight, ...) ...), rows, n)
    made   = in_rounds("...", [y], [order, table, x, weight], ...)
    y      = written(y, [made])

A graph that localize made for a capacity does what it does for the rows of the first round. All that depends on which
these are, up to where they are at their places again or a sum over them is made, is a function of rows alone: other
rows give other rows, or a share of the sum. Those nodes, written as the text of a program of the number of a round, are
done again for the rows of every further one (autopar/ops/row_rounds.py), and write into the same results. The program
of a backward starts with the ops of the forward whose values it reads, so that nothing of further rounds is saved.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import cast

import torch
from torch import fx

from ..._torch import c10d, graph_module, rename
from ...errors import VerifyError
from ...ir.graph import describe, output_node
from ...ir.layout import Layout
from ...ops import autopar
from ...ops.row_pieces import parsed
from .emit import Builder, Collective
from .lower_ops import lower_ops
from .partition import phase_of, view_base
from .replace import move_before, origin
from .tile_rows import KEPT

aten = torch.ops.aten
FIRST: dict[object, str] = {
    autopar.round_rows.default: "order",
    autopar.round_groups.default: "order",
    autopar.round_counts.default: "counts",
}  # what knows the first round
PLACED = {aten.index_copy.default: aten.index_copy_.default, aten.index_add.default: aten.index_add_.default}
EXCHANGE, WAIT = autopar.exchange_rows.default, c10d.wait_tensor.default


def add_rounds(local: fx.GraphModule) -> fx.GraphModule:
    """Rewrite a local joint graph in place. Raises VerifyError for what cannot be done in rounds."""
    for family in _families(local.graph):
        for results in family.by_level(local.graph):
            _add(local, family, results)
    local.graph.lint()
    local.recompile()
    return local


@dataclass(frozen=True)
class _Family:
    """Hold what is done for the rows of one routing: the nodes that depend on which are in the first round, and those
    of them that end it, whose values are whole again."""

    tables: tuple[fx.Node, ...]
    inside: frozenset[fx.Node]
    results: tuple[fx.Node, ...]

    def by_level(self, graph: fx.Graph) -> list[tuple[fx.Node, ...]]:
        """Return the results by phase, and in the order in which they need each other."""
        depth: dict[fx.Node, int] = {}
        levels: dict[tuple[bool, int], list[fx.Node]] = defaultdict(list)
        results, left = set(self.results), len(self.results)
        for node in graph.nodes:
            found = max((depth.get(a, 0) + (a in results) for a in node.all_input_nodes), default=0)
            if found:
                depth[node] = found
            if node in results:
                levels[phase_of(node) == "backward", found].append(node)
                left -= 1
                if not left:
                    break
        return [tuple(levels[key]) for key in sorted(levels)]


def _families(graph: fx.Graph) -> list[_Family]:
    """Return the families of a graph in its order; routings whose rows meet in an op are one."""
    of: dict[fx.Node, fx.Node] = {}  # by node inside or at the end, the table of its routing
    merged: dict[fx.Node, fx.Node] = {}
    results = set()

    def root(table: fx.Node) -> fx.Node:
        while merged.get(table, table) is not table:
            table = merged[table]
        return table

    for node in graph.nodes:
        if node.target in FIRST:
            of[node] = _table(node)
            continue
        if node.target is aten.new_zeros.default:  # as large as it is said to be
            continue
        tables = [root(of[a]) for a in node.all_input_nodes if a in of and a not in results]
        if not tables:
            continue
        of[node] = tables[0]
        for other in tables[1:]:
            merged[other] = tables[0]
        if _is_result(node, [a for a in node.all_input_nodes if a in of and a not in results]):
            results.add(node)
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node, table in of.items():
        members[root(table)].append(node)
    return [
        _Family(
            tuple(dict.fromkeys(_table(n) for n in nodes if n.target in FIRST)),
            frozenset(n for n in nodes if n not in results),
            tuple(n for n in nodes if n in results),
        )
        for nodes in members.values()
    ]


def _table(node: fx.Node) -> fx.Node:
    """Return the table of which a node says the first round."""
    return cast(fx.Node, node.args[1] if FIRST[node.target] == "order" else node.args[0])


def _is_result(node: fx.Node, inside: Sequence[fx.Node]) -> bool:
    """Return whether a node ends a round: rows are at their places among all, or rows are added up. Raises VerifyError
    for other values that are not of rows."""
    if node.target is autopar.place_rows.default or node.target in PLACED and node.args[0] not in inside:
        return True
    layouts = node.meta.get("layout")
    if layouts is None:  # within an exchange or a redistribution
        return False
    layouts = (layouts,) if isinstance(layouts, Layout) else layouts
    if all(layout.owned_axes for layout in layouts):
        return False
    is_sum = all(reduction == "sum" for layout in layouts for _, reduction in layout.partial)
    if len(layouts) > 1 or not is_sum or view_base(node) is not None:
        raise VerifyError(
            f"{node.name} needs the rows of experts of all rounds at once",
            node=describe(node),
            source=node.meta.get("source"),
            fix="leave out expert_capacity",
        )
    return True


def _add(local: fx.GraphModule, family: _Family, results: tuple[fx.Node, ...]) -> None:
    """Add the further rounds of some results that do not need each other."""
    graph = local.graph
    inside = _needed(results, family.inside)
    ops = [node for node in graph.nodes if node in inside]
    program = _Program.of(local, ops, results)
    order = {node: i for i, node in enumerate(graph.nodes)}
    first = min((user for node in results for user in node.users), key=order.__getitem__)
    for needed in (*results, *program.inputs, *family.tables):
        move_before(first, needed)
    builder = Builder(graph, results[0].meta["val"].fake_mode)
    builder.meta = origin(results[0])
    group, *others = program.groups or ("",)
    with graph.inserting_before(first):
        arguments = list(results), list(program.inputs), list(family.tables), ";".join(others), group
        made = builder.call(autopar.in_rounds.default, program.text, *arguments, name=f"{results[0].name}_in_rounds")
        if group:
            what = f"rows of {results[0].name} beyond the capacity"
            made.meta["collective"] = Collective("all_to_all", tuple(group.split(",")), 0.0, what, phase_of(made))
            made.meta["tensor_bytes"] = 0
        for node in results:
            builder.meta = {}
            whole = builder.call(autopar.written.default, node, [made])
            name = node.name
            rename(node, f"{name}_of_first_round")
            rename(whole, name)
            whole.meta = {**{k: v for k, v in node.meta.items() if k != "sharding"}, "val": whole.meta["val"]}
            node.replace_all_uses_with(whole, delete_user_cb=lambda user: user not in (made, whole))  # noqa: B023


def _needed(results: Iterable[fx.Node], inside: frozenset[fx.Node]) -> set[fx.Node]:
    """Return what results need of a family, and themselves."""
    found, stack = set(results), list(results)
    while stack:
        for node in stack.pop().all_input_nodes:
            if node in inside and node not in found:
                found.add(node)
                stack.append(node)
    return found


@dataclass(frozen=True)
class _Program:
    """The text of a round, what it reads, and the groups of its collectives, that of the exchange first."""

    text: str
    inputs: tuple[fx.Node, ...]
    groups: tuple[str, ...]

    @staticmethod
    def of(local: fx.GraphModule, ops: Sequence[fx.Node], results: Sequence[fx.Node]) -> _Program:
        """Return the program of some ops, of which some make the results. Raises VerifyError for one that no text
        says."""
        alone, given = _alone(local, ops, results)
        nodes = [node for node in alone.graph.nodes if node.op == "call_function"]
        inputs = [node for node in alone.graph.nodes if node.op == "placeholder" and node.users]
        groups = sorted({str(n.args[-1]) for n in nodes if _names_group(n)})
        groups.sort(key=lambda group: all(n.target is not EXCHANGE or n.args[-1] != group for n in nodes))
        ends = {node: f"r{i}" for i, node in enumerate(cast(tuple[fx.Node, ...], output_node(alone.graph).args[0]))}
        words = [f"w{i}" for i in range(len(inputs) + 1 + len(groups))]
        names = dict(zip(inputs, words)) | {node: f"t{i}" for i, node in enumerate(nodes)}
        number, of_group = _Word(words[len(inputs)]), dict(zip(groups, map(_Word, words[len(inputs) + 1 :])))
        lines = []
        for node in nodes:
            target, args = node.target, list(node.args)
            if target in FIRST:
                args = [*args[:2], number, 0] if FIRST[target] == "order" else [args[0], number]
            elif _names_group(node):
                args[-1] = of_group[args[-1]]
                args[3:4] = [0] if target is EXCHANGE else args[3:4]  # the rows that are expected
            kwargs = {k: v for k, v in node.kwargs.items() if k in KEPT.get(target, tuple(node.kwargs))}
            if node in ends and target is autopar.place_rows.default:
                target, args = aten.index_copy_.default, [_Word(ends[node]), 0, args[1], args[0]]
            elif node in ends and target in PLACED:
                target, args = PLACED[target], [_Word(ends[node]), *args[1:]]
            lines.append(f"{names[node]} = {_call(target, args, kwargs, names)}")
            if node in ends and target not in (aten.index_copy_.default, aten.index_add_.default):
                lines.append(f"{names[node]} = aten.add_.Tensor({ends[node]}, {names[node]})")
        text = "; ".join([*lines, "return (), ()"])
        try:
            parsed(text)
        except (ValueError, SyntaxError, AttributeError) as error:
            raise VerifyError(
                f"what experts compute cannot be done in rounds: {error}",
                node=describe(results[0]),
                source=results[0].meta.get("source"),
                fix="leave out expert_capacity",
            ) from None
        return _Program(text, tuple(given[node] for node in inputs), tuple(groups))


def _names_group(node: fx.Node) -> bool:
    """Return whether the last argument of an op is a group."""
    target = node.target
    return target is EXCHANGE or getattr(target, "namespace", "") == "_c10d_functional" and target is not WAIT


class _Word(str):
    """A name in a program."""


def _call(target: object, args: Sequence, kwargs: Mapping, names: Mapping[fx.Node, str]) -> str:
    """Return the text of a call."""

    def written(value: object) -> str:
        if isinstance(value, fx.Node):
            return names[value]
        if isinstance(value, _Word):
            return str(value)
        return f"[{', '.join(map(written, value))}]" if isinstance(value, (list, tuple)) else repr(value)

    arguments = [*map(written, args), *(f"{key}={written(value)}" for key, value in kwargs.items())]
    name = "operator.getitem" if target is operator.getitem else str(target)
    return f"{name}({', '.join(arguments)})"


def _alone(
    local: fx.GraphModule, ops: Sequence[fx.Node], results: Sequence[fx.Node]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """Return a graph of some ops alone, lowered as the whole will be, and by its placeholders what they stand for."""
    graph, new, given = fx.Graph(), dict[fx.Node, fx.Node](), dict[fx.Node, fx.Node]()
    for argument in dict.fromkeys(a for node in ops for a in node.all_input_nodes):
        if argument not in ops:
            new[argument] = graph.placeholder(argument.name)
            new[argument].meta = dict(argument.meta)
            given[new[argument]] = argument
    for node in ops:
        new[node] = graph.node_copy(node, new.__getitem__)
    graph.output(tuple(new[node] for node in results))
    return lower_ops(graph_module(local, graph, "Round")), given
