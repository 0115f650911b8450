"""Rules of neural-network layers: attention, normalisation, convolution, quantisation."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from ..ir.graph import is_tensor
from ..ir.layout import Layout
from .families import each, sets
from .reading import bound, input_shapes, named, output_shapes, shape_of, tensors_by_name
from .rule import Dim, Rule, rule

RING = "ring"  # the factor of an attention that cuts queries and keys alike
QUERY_HEADS = "hq"  # that cuts the heads of queries where those of keys cannot be cut as well


def attention(node: fx.Node) -> Rule | None:
    """Return the rule of attention, forward and backward: batch, heads and the queries' sequence s, not keys nor head
    dims; None with dropout of torch's own. Where s is cut keys and values are whole, and their gradients Partial; an op
    cuts s that takes the number of its first query. Where RING is cut, so are the queries' sequence and the keys', and
    blocks of keys go round. With grouped queries (fewer key heads) heads are cut between groups, or those of the
    queries alone over axes over which groups cannot be: the op takes which key heads its queries read. Key heads that
    belong to all devices, as a single one does, have a gradient that is Partial over the heads, and so has a mask over
    whatever it is broadcast along. Documents are cut with the queries, those of keys are whole along the sequence. With
    dropout the op takes the index of its first weight, so a device has one range of batch and heads. With dropout or a
    window no ring is in zigzag, as a device then has two ranges of queries and of keys. Queries of a chunk of a row,
    which are not its first, are never in zigzag: how many keys they have is known when they run."""
    arguments = bound(node)
    if arguments.get("dropout_p", 0.0) != 0.0:
        return None
    grouped = {shape_of(arguments[name])[1] for name in ("q", "k", "query", "key") if name in arguments} - {1}
    drops = arguments.get("state") is not None
    has_places, of_chunk = drops or bool(arguments.get("window")), bool(arguments.get("first"))
    goes_round = "first" in arguments and _may_go_round(arguments)
    replicates = len(grouped) > 1 and "first" in arguments
    heads: Dim = ("h", QUERY_HEADS) if replicates else "h"
    of_queries: tuple[Dim, ...] = (
        "b",
        heads,
        ("s", RING) if goes_round else "s" if "first" in arguments else None,
        None,
    )
    of_keys: tuple[Dim, ...] = ("b", "h", RING if goes_round else None, None)

    def dims(shape: tuple[int, ...], names: tuple[Dim, ...]) -> tuple[Dim, ...]:
        return tuple(None if size == 1 else factor for factor, size in zip(names, shape))

    def argument(name: str, shape: tuple[int, ...]) -> tuple[Dim, ...]:
        if "mask" in name:  # a mask broadcasts, so it may lack the first dims
            return dims(shape, of_queries[4 - len(shape) :])
        if name == "sinks":
            return dims(shape, of_queries[1:2])
        if name == "state":
            return (None,)
        if name in ("documents", "key_documents"):
            return dims(shape, ("b", of_queries[2] if name == "documents" else None))
        return dims(shape, of_keys if name in ("k", "v", "key", "value") else of_queries)

    shapes = output_shapes(node)
    is_backward = len(shapes) > 2
    outputs = [of_queries, of_keys, of_keys] if is_backward else [of_queries, of_queries]
    if len(shapes) > 3:
        outputs.append(of_queries[4 - len(shapes[3]) :])  # of the mask
    return Rule(
        tuple(argument(name, shape) for name, shape in _named_inputs(node)),
        tuple(map(dims, shapes, outputs)),
        sets(([0],)) if is_backward else (),
        even={"h": math.gcd(*grouped)} if len(grouped) > 1 else {},
        contiguous=frozenset({"s", RING, QUERY_HEADS, *(("b", "h") if drops else ())}),
        within={QUERY_HEADS: "h"} if replicates else {},
        zigzag=frozenset(({"s"} if has_places else {"s", RING}) if "first" in arguments and not of_chunk else ()),
    )


def _may_go_round(arguments: Mapping[str, Any]) -> bool:
    queries, keys = (shape_of(arguments[name])[2] for name in ("q", "k"))
    return keys > 1 and (queries == keys or not arguments["causal"]) and not arguments["first"]


def even_gradient(node: fx.Node) -> Rule:
    """Return the rule of a gradient (b, h, s, d) that is divided by what a mask (b, h, s, t) says, which broadcasts."""
    grad, mask = input_shapes(node)
    factors = ("b", "h", "s", "d")
    of_mask = tuple(None if size == 1 else name for name, size in zip(factors[4 - len(mask) :], mask))
    return Rule((factors, (*of_mask[:-1], None)), (factors,), sets(([0],)))


def is_added(mask: Any) -> bool:
    """Return whether a mask of an attention is numbers that are added to the scores."""
    return is_tensor(mask) and mask.meta["val"].dtype != torch.bool


def ring_axes(node: fx.Node, inputs: Sequence[Layout]) -> tuple[str, ...]:
    """Return the axes over which blocks of keys go round in an attention with these layouts of its tensor arguments:
    those that cut queries and keys."""
    names = list(tensors_by_name(node))
    q, k = (inputs[names.index(name)].dims[2] for name in ("q", "k"))
    return tuple(axis for axis in q if axis in k)


def embedding_dense_backward(node: fx.Node) -> Rule:
    """Return the rule of the backward of ATen's own embedding, which cannot hold a part of the vocabulary. Scaling by
    frequency counts over the whole batch."""
    names = tuple(f"b{i}" for i in range(len(input_shapes(node)[1])))
    index = (None,) * len(names) if bound(node)["scale_grad_by_freq"] else names
    return Rule(((*index, "h"), index), ((None, "h"),), sets(([0],)))


def layer_norm(node: fx.Node) -> Rule:
    """Return the rule of layer and RMS norm, forward: rows are independent, normalised dims whole. Statistics keep them
    with size 1."""
    arguments = bound(node)
    rows = len(shape_of(arguments["input"])) - len(arguments["normalized_shape"])
    return Rule(
        tuple(_rows(s, rows) if n == "input" else (None,) * len(s) for n, s in _named_inputs(node)),
        tuple(_rows(s, rows) for s in output_shapes(node)),
    )


def layer_norm_backward(node: fx.Node) -> Rule:
    """Return the rule of layer and RMS norm, backward: rows as in the forward; gradients of weight and bias sum over
    the rows, so they are Partial where rows are sharded."""
    arguments = bound(node)
    rows = len(shape_of(arguments["input"])) - len(arguments["normalized_shape"])
    return Rule(
        tuple((None,) * len(s) if n in ("weight", "bias") else _rows(s, rows) for n, s in _named_inputs(node)),
        tuple(_rows(s, rows if len(s) == len(shape_of(arguments["input"])) else 0) for s in output_shapes(node)),
        sets(([0],)),
    )


def _rows(shape: tuple[int, ...], rows: int) -> tuple[Dim, ...]:
    return tuple(f"d{i}" if i < rows else None for i in range(len(shape)))


def _named_inputs(node: fx.Node) -> list[tuple[str, tuple[int, ...]]]:
    return list(zip(tensors_by_name(node), input_shapes(node)))


def group_norm(node: fx.Node) -> Rule:
    """Return the rule of group norm: batch only. Gradients of weight and bias are Partial over it."""

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return ("n",) + (None,) * (len(shape) - 1) if len(shape) > 1 else (None,)

    linear = ([0],) if "grad_out" in bound(node) else ()
    return Rule(tuple(map(dims, input_shapes(node))), tuple(map(dims, output_shapes(node))), sets(linear))


def batch_norm(node: fx.Node) -> Rule:
    """Return the rule of batch norm: channels only while training (statistics span the batch) and in the backward; in
    the forward of evaluation the batch as well."""
    arguments = bound(node)
    training = arguments.get("training", arguments.get("train", "no_training" not in str(node.target)))
    backward = "grad_out" in arguments

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        if len(shape) > 1:
            return (None if training or backward else "n", "c") + (None,) * (len(shape) - 2)
        return ("c",) if shape != (0,) else (None,)

    return Rule(
        tuple(map(dims, input_shapes(node))), tuple(map(dims, output_shapes(node))), sets(([0],)) if backward else ()
    )


def channelwise(node: fx.Node) -> Rule:
    """Return the rule of images (n, c, ...) and one number a channel: where an op makes numbers from images, they are
    sums over all but c."""

    def dims(shape: tuple[int, ...]) -> tuple[Dim, ...]:
        return ("c",) if len(shape) == 1 else ("n", "c", *named(len(shape) - 2))

    return Rule(tuple(map(dims, input_shapes(node))), tuple(map(dims, output_shapes(node))))


def convolution(node: fx.Node) -> Rule:
    """Return the rule of convolution: batch n, output channels o, input channels i (summed away, so not with a bias),
    or groups g if there are several. Spatial dims are whole."""
    arguments = bound(node)
    transposed, groups = arguments["transposed"], arguments["groups"]
    if groups > 1:
        made = rule("n _, _ _, _ -> n _") if transposed else rule("n g, g _, g -> n g")
    else:
        i = "_" if is_tensor(arguments.get("bias")) else "i"
        made = rule(f"n {i}, {i} o, o -> n o") if transposed else rule(f"n {i}, o {i}, o -> n o")
    linear = ([1, 2],) if is_tensor(arguments.get("bias")) else ([0], [1])
    return _spatial(node, made, sets(linear), groups)


def convolution_backward(node: fx.Node) -> Rule:
    """Return the rule of the gradients of input, weight and bias. The bias' gradient is whole on every device unless o
    is sharded, so with it the input channels i are not."""
    arguments = bound(node)
    transposed, groups, wanted = arguments["transposed"], arguments["groups"], arguments["output_mask"]
    if groups > 1:
        text = "n _, n _, _ _ -> n _, _ _, _" if transposed else "n g, n g, g _ -> n g, g _, g"
    else:
        i = "_" if wanted[2] else "i"
        weight = f"{i} o" if transposed else f"o {i}"
        text = f"n o, n {i}, {weight} -> n {i}, {weight}, o"
    made = rule(text)
    outputs = tuple(dims for dims, is_wanted in zip(made.outputs, wanted) if is_wanted)
    return _spatial(node, Rule(made.inputs, outputs), sets(([0],)), groups)


def _spatial(node: fx.Node, made: Rule, linear: tuple[frozenset[int], ...], groups: int) -> Rule:
    """Fill up the dims that `made` leaves out, and drop its tensors that the node does not have."""

    def fill(side: tuple[tuple[Dim, ...], ...], shapes: list[tuple[int, ...]]) -> tuple[tuple[Dim, ...], ...]:
        return tuple(dims + (None,) * (len(shape) - len(dims)) for dims, shape in zip(side, shapes))

    inputs, outputs = fill(made.inputs, input_shapes(node)), fill(made.outputs, output_shapes(node))
    return Rule(inputs, outputs, linear, even={"g": groups})


def weight_norm(node: fx.Node) -> Rule:
    """Return the rule of weight norm: every slice along `dim` is scaled to a length of its own; forward and backward
    alike."""
    arguments = bound(node)
    linear = ([0],) if "grad_w" in arguments else ()
    return each(node, lambda shape: tuple("d" if i == arguments["dim"] else None for i in range(len(shape))), linear)


def per_channel(node: fx.Node) -> Rule:
    """Return the rule of fake quantisation with one scale a channel."""
    arguments = bound(node)
    channel = f"d{arguments['axis'] % len(shape_of(arguments['self']))}"
    inputs = [tuple(f"d{i}" for i in range(len(s))) if n == "self" else (channel,) for n, s in _named_inputs(node)]
    return Rule(tuple(inputs), (inputs[0],) * len(output_shapes(node)))


def dequantize(node: fx.Node) -> Rule:
    """Return the rule of dequantisation: blocks of a row share a scale, and tiles of scales a step
    (autopar/ops/nf4.py), so both dims are cut in whole tiles. Matrices of a stack are independent."""
    packed, absmax, *tiles = input_shapes(node)
    names = (*(f"b{i}" for i in range(len(packed) - 2)), "o", "i")
    even = {"o": tiles[0][-2], "i": tiles[0][-1]} if tiles else {"i": absmax[-1]}
    return Rule((names, names, *([names, ()] if tiles else [])), (names,), even=even)


def ctc(node: fx.Node) -> Rule:
    """Return the rule of CTC loss, forward and backward: samples n, if each has a row of targets (n, s); all targets in
    one row (s,) stay together."""
    targets = shape_of(bound(node)["targets"])
    n, row = ("n", "n _") if len(targets) == 2 else ("_", "_")
    inputs = f"_ {n} _, {row}, {n}, {n}"
    return rule(f"{n}, {inputs} -> _ {n} _", [[0]]) if "grad" in bound(node) else rule(f"{inputs} -> {n}")
