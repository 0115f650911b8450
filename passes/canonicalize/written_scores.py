"""Read how a model writes attention out: from a softmax up to the product of queries and keys, down to the values.

Every step on the way has one reader, or scores and weights are somebody else's as well: then nothing is found.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, replace

import torch
from torch import fx

from ..._torch import op_name
from ...ir.graph import operand, tensor_arguments
from ...rules.reading import bound
from .written_masks import Fill

aten = torch.ops.aten
SOFTMAXES = (aten.softmax.int, aten._softmax.default, aten._safe_softmax.default)
PRODUCTS = (aten.matmul.default, aten.bmm.default)
CASTS = ("to", "_to_copy", "type_as", "contiguous", "clone", "alias", "detach")
VIEWS = ("view", "reshape", "_unsafe_view", "flatten", "unflatten")


@dataclass(frozen=True)
class Scores:
    """softcap * tanh(product * scale), or product * scale without a softcap; then what is `added`, the `fills`, and
    `sinks` in one more column. `product`: a node; `shape`: of the scores, if some step has four dims."""

    product: fx.Node
    scale: float = 1.0
    softcap: float = 0.0
    added: tuple[fx.Node, ...] = ()
    fills: tuple[Fill, ...] = ()
    sinks: fx.Node | None = None
    shape: tuple[int, ...] = ()

    @property
    def is_bare(self) -> bool:
        """Return whether nothing is added to or filled into the scores yet."""
        return not (self.added or self.fills or self.sinks)


def name_of(node: fx.Node) -> str:
    """Return the name of an op, in place or not."""
    name = op_name(node.target) if node.op == "call_function" else ""
    return name if name.startswith("_") else name.removesuffix("_")


def scores_of(softmax: fx.Node) -> tuple[Scores, list[fx.Node]] | None:
    """Return what a softmax reads and the nodes on the way, from the product on; None if that is no attention."""
    dim, width = softmax.args[1], softmax.meta["val"].dim()
    path = _path(operand(softmax), {softmax}) if dim in (-1, width - 1) else None
    if path is None:
        return None
    scores: Scores | None = _product(path[0])
    for before, node in zip(path, path[1:]):
        scores = _after(scores, before, node) if scores else None
    if scores is None:
        return None
    shapes = [tuple(n.meta["val"].shape) for n in path if n.meta["val"].dim() == 4]
    return replace(scores, shape=shapes[0] if shapes else ()), path


def weights_of(softmax: fx.Node, drops_one: bool) -> list[fx.Node] | None:
    """Return the nodes from a softmax to the product with the values, which is the last; None if the weights are read
    by others, or dropped more than once. `drops_one`: whether the last column is left out on the way."""
    found = [softmax]
    while True:
        node = found[-1]
        if len(node.users) != 1:
            return None
        (user,) = node.users
        found.append(user)
        if user.op != "call_function" or not user.args or user.args[0] is not node:
            return None
        if user.target in PRODUCTS:
            return None if drops_one or user.args[1] is node else found
        if drops_one and _drops_last(user):
            drops_one = False
        elif drops_some(user):
            if any(map(drops_some, found[:-1])):
                return None
        elif not _is_same(user):
            return None


def drops_some(node: fx.Node) -> bool:
    """Return whether a node is dropout that drops something."""
    return node.target is aten.dropout.default and bool(node.args[1] and node.args[2])


def shift_of(node: fx.Node) -> list[fx.Node]:
    """Return the nodes that make the maximum of every row, if `node` takes it from the row, which a softmax does not
    see."""
    if name_of(node) != "sub" or node.kwargs or len(tensor_arguments(node)) != 2:
        return []
    x, top = tensor_arguments(node)
    made = operand(top) if top.target is operator.getitem and top.args[1] == 0 else top
    unread = [n for n in made.users if made is not top and n is not top]
    if made.target not in (aten.amax.default, aten.max.dim) or operand(made) is not x or len(top.users) > 1:
        return []
    given = bound(made)
    dims = given["dim"] if made.target is aten.amax.default else [given["dim"]]
    is_of_rows = given["keepdim"] and list(dims) in ([-1], [x.meta["val"].dim() - 1])
    return list(dict.fromkeys((top, made, *unread))) if is_of_rows and not any(n.users for n in unread) else []


def _path(node: fx.Node, readers: set[fx.Node]) -> list[fx.Node] | None:
    """Return the nodes from a product of queries and keys to `node`, which nobody but `readers` reads."""
    if node.op != "call_function" or set(node.users) - readers:
        return None
    if node.target in (*PRODUCTS, aten.baddbmm.default):
        return [node]
    shift = shift_of(node)
    for source in [operand(node)] if shift else _sources(node):
        found = _path(source, {node, *shift})
        if found is not None:
            return [*found, node]
    return None


def _sources(node: fx.Node) -> list[fx.Node]:
    """Return which arguments of a step may be the scores before it."""
    name = name_of(node)
    if name == "cat":
        return tensor_arguments(node)[:1] if len(tensor_arguments(node)) == 2 else []
    if name == "where":
        return [a for a in tensor_arguments(node)[1:] if a.meta["val"].shape == node.meta["val"].shape]
    if name in ("add", "mul", "div"):
        return [a for a in tensor_arguments(node) if a.meta["val"].shape == node.meta["val"].shape]
    return [operand(node)] if name in ("tanh", "masked_fill") or _is_same(node) else []


def _is_same(node: fx.Node) -> bool:
    """Return whether a step keeps the numbers of each row: a cast, a view that merges or splits samples and heads,
    dropout that drops nothing."""
    name = name_of(node)
    if name in CASTS:
        return node.meta["val"].is_floating_point()
    if name in VIEWS:
        return operand(node).meta["val"].shape[-2:] == node.meta["val"].shape[-2:]
    return node.target is aten.dropout.default and not drops_some(node)


def _drops_last(node: fx.Node) -> bool:
    """Return whether a node drops the last column."""
    if node.target is not aten.slice.Tensor:
        return False
    size, given = operand(node).meta["val"].shape[-1], bound(node)
    is_last = given["dim"] in (-1, node.meta["val"].dim() - 1)
    return is_last and not given["start"] and given["step"] == 1 and node.meta["val"].shape[-1] == size - 1


def _product(node: fx.Node) -> Scores | None:
    if node.target is not aten.baddbmm.default:
        return Scores(node)
    given = bound(node)
    if given["beta"] == 0:
        return Scores(node, float(given["alpha"]))
    return Scores(node, float(given["alpha"]), added=(given["self"],)) if given["beta"] == 1 else None


def _after(scores: Scores, before: fx.Node, node: fx.Node) -> Scores | None:
    """Return the scores behind a step; None if no attention has such a step there."""
    name = name_of(node)
    if _is_same(node) or shift_of(node):
        return scores
    if scores.sinks is not None:
        return None
    if name in ("mul", "div"):
        return _scaled(scores, before, node)
    if name == "tanh":
        return replace(scores, softcap=1.0) if scores.is_bare and not scores.softcap else None
    if name == "add":
        others = [a for a in tensor_arguments(node) if a is not before]
        return replace(scores, added=(*scores.added, *others)) if len(others) == 1 and not node.kwargs else None
    if name == "cat":
        is_last = node.args[1:] and node.args[1] in (-1, node.meta["val"].dim() - 1)
        return replace(scores, sinks=tensor_arguments(node)[1]) if is_last else None
    fill = _fill_of(before, node)
    return replace(scores, fills=(*scores.fills, fill)) if fill else None


def _scaled(scores: Scores, before: fx.Node, node: fx.Node) -> Scores | None:
    factor = node.args[1] if node.args[0] is before else node.args[0]
    if not isinstance(factor, (int, float)) or factor <= 0 or not scores.is_bare or len(node.args) > 2:
        return None
    if name_of(node) == "div":
        if node.args[0] is not before:
            return None
        factor = 1.0 / factor
    if scores.softcap:
        return replace(scores, softcap=scores.softcap * factor)
    return replace(scores, scale=scores.scale * factor)


def _fill_of(before: fx.Node, node: fx.Node) -> Fill | None:
    """Return what a step fills scores with: where a condition says so, `masked_fill`, or where it does not, `where`."""
    if name_of(node) == "masked_fill":
        condition, value, keeps = node.args[1], _number(node.args[2]), False
    elif name_of(node) == "where" and len(node.args) == 3:
        keeps = node.args[1] is before
        condition, value = node.args[0], _number(node.args[2] if keeps else node.args[1])
    else:
        return None
    if not isinstance(condition, fx.Node) or condition.meta["val"].dtype != torch.bool or value is None:
        return None
    return Fill(condition, keeps, value)


def _number(argument: object) -> float | None:
    """Return a number that is written in the program, or that of a tensor made of one."""
    while isinstance(argument, fx.Node) and not argument.meta["val"].dim():
        if argument.op == "get_attr":
            module = argument.graph.owning_module
            return None if module is None else _of_constant(module, str(argument.target))
        is_filled = argument.target is aten.full.default
        if not is_filled and name_of(argument) not in ("lift_fresh_copy", "scalar_tensor", *CASTS):
            return None
        argument = argument.args[1 if is_filled else 0]
    return float(argument) if isinstance(argument, (int, float)) else None


def _of_constant(module: fx.GraphModule, name: str) -> float | None:
    """Return the number of a constant that export made of a tensor in the program."""
    value = operator.attrgetter(name)(module) if "lifted_tensor" in name else None
    return float(value) if type(value) is torch.Tensor and not value.is_meta else None
