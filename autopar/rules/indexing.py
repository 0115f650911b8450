"""Rules of ops that take, put or join elements at given places: split, slice, cat, gather, index and their backwards.

A dim that such an op cuts or joins is not shardable, except in equal chunks: a fused weight of k chunks may be sharded
inside each chunk, `Inner(f, k)`, and every chunk then comes out sharded plainly, as `f`. Joining is the inverse.
"""

from __future__ import annotations

import torch
from torch import fx

from ..ir.graph import is_tensor
from .families import sets
from .reading import aligned, bound, dims_of, input_shapes, is_zero, named, output_shapes, shape_of
from .rule import Dim, Inner, Rule


def _with(names: tuple[Dim, ...], dim: int, entry: Dim) -> tuple[Dim, ...]:
    return names[:dim] + (entry,) + names[dim + 1 :]


def _chunked(name: str, whole: int, chunk: int, aligned: bool) -> tuple[Dim, Dim, dict[str, int]]:
    """Return (whole dim, chunk, even) for a chunk of a dim: the same if it is all of it, inner if it is one of equal
    parts."""
    if chunk == whole:
        return name, name, {}
    if aligned and chunk and whole % chunk == 0:
        return Inner(name, whole // chunk), name, {name: chunk}
    return None, None, {}


def split(node: fx.Node) -> Rule:
    """Return the rule of split and split_with_sizes: the cut dim may be sharded inside equal chunks."""
    (shape,), outputs = input_shapes(node), output_shapes(node)
    names, (dim,) = named(len(shape)), dims_of(bound(node)["dim"], len(shape))
    equal = all(output[dim] == outputs[0][dim] for output in outputs)
    whole, chunk, even = _chunked(names[dim], shape[dim], outputs[0][dim], equal)
    return Rule((_with(names, dim, whole),), (_with(names, dim, chunk),) * len(outputs), sets(([0],)), even=even)


def cat(node: fx.Node) -> Rule | None:
    """Return the rule of cat: the joined dim may be sharded inside equal chunks. None for empty tensors of one dim."""
    inputs, (shape,) = input_shapes(node), output_shapes(node)
    if any(len(s) != len(shape) for s in inputs):  # cat accepts empty tensors of one dim
        return None
    names, (dim,) = named(len(shape)), dims_of(bound(node)["dim"], len(shape))
    equal = all(s[dim] == inputs[0][dim] for s in inputs)
    whole, chunk, even = _chunked(names[dim], shape[dim], inputs[0][dim], equal)
    linear = sets((range(len(inputs)),))
    return Rule((_with(names, dim, chunk),) * len(inputs), (_with(names, dim, whole),), linear, even=even)


def stack(node: fx.Node) -> Rule:
    """Return the rule of stack: the new dim is whole, and the result is linear in all tensors together."""
    inputs, (shape,) = input_shapes(node), output_shapes(node)
    (dim,) = dims_of(bound(node)["dim"], len(shape))
    names = named(len(shape) - 1)
    return Rule((names,) * len(inputs), (names[:dim] + (None,) + names[dim:],), sets((range(len(inputs)),)))


def unbind(node: fx.Node) -> Rule:
    """Return the rule of unbind: the dim that it takes apart is whole."""
    (shape,), outputs = input_shapes(node), output_shapes(node)
    (dim,) = dims_of(bound(node)["dim"], len(shape))
    names = named(len(shape))
    return Rule((_with(names, dim, None),), (names[:dim] + names[dim + 1 :],) * len(outputs), sets(([0],)))


def slice_(node: fx.Node) -> Rule:
    """Return the rule of a slice: the cut dim may be sharded if the chunk is one of equal parts."""
    (shape,), (result,) = input_shapes(node), output_shapes(node)
    names, dim, whole, chunk, even = _sliced(node, shape, result)
    return Rule((_with(names, dim, whole),), (_with(names, dim, chunk),), sets(([0],)), even=even)


def slice_backward(node: fx.Node) -> Rule:
    """Return the rule of a slice's backward, which puts the gradient of the chunk back."""
    (grad,), (shape,) = input_shapes(node), output_shapes(node)
    names, dim, whole, chunk, even = _sliced(node, shape, grad)
    return Rule((_with(names, dim, chunk),), (_with(names, dim, whole),), sets(([0],)), even=even)


Sliced = tuple[tuple[str, ...], int, Dim, Dim, dict[str, int]]


def _sliced(node: fx.Node, shape: tuple[int, ...], chunk: tuple[int, ...]) -> Sliced:
    """Return (names, dim, whole dim, chunk, even) of a slice of `shape`; only one of equal parts is shardable."""
    arguments, names = bound(node), named(len(shape))
    (dim,) = dims_of(arguments["dim"], len(shape))
    start, length = slice_start(arguments["start"], shape[dim]), chunk[dim]
    aligned = arguments["step"] == 1 and length > 0 and start % length == 0
    whole, part, even = _chunked(names[dim], shape[dim], length, aligned)
    return names, dim, whole, part, even


def slice_start(start: int | None, size: int) -> int:
    """Return the start of a slice as a place in the dim."""
    start = start or 0
    return min(max(start + size if start < 0 else start, 0), size)


def slice_scatter(node: fx.Node) -> Rule:
    """Return the rule of slice_scatter, which puts a chunk in the place of a slice."""
    shape, chunk = input_shapes(node)
    names, dim, whole, part, even = _sliced(node, shape, chunk)
    outer = _with(names, dim, whole)
    return Rule((outer, _with(names, dim, part)), (outer,), sets(([0, 1],)), even=even)


def select(node: fx.Node) -> Rule:
    """Return the rule of select, which takes one place of a dim; select_backward and select_scatter put it back."""
    longest = max(input_shapes(node) + output_shapes(node), key=len)
    (dim,) = dims_of(bound(node)["dim"], len(longest))
    names = named(len(longest))
    forms = {len(longest): _with(names, dim, None), len(longest) - 1: names[:dim] + names[dim + 1 :]}
    inputs, outputs = (tuple(forms[len(s)] for s in side) for side in (input_shapes(node), output_shapes(node)))
    return Rule(inputs, outputs, sets((range(len(inputs)),)))


def index_select(node: fx.Node) -> Rule:
    """Return the rule of index_select: the index runs along the output's dim."""
    shape, index = input_shapes(node)
    names = named(len(shape))
    if not shape or len(index) != 1:
        return Rule(((None,) * len(shape), (None,) * len(index)), ((None,) * len(shape),), sets(([0],)))
    (dim,) = dims_of(bound(node)["dim"], len(shape))
    return Rule((_with(names, dim, None), (names[dim],)), (names,), sets(([0],)))


def index_add(node: fx.Node) -> Rule | None:
    """Return the rule of index_add and index_copy, which sum (or write) rows of a source; the dim is whole."""
    shape, index, _ = input_shapes(node)
    if not shape:
        return None
    (dim,) = dims_of(bound(node)["dim"], len(shape))
    names = _with(named(len(shape)), dim, None)
    return Rule((names, (None,) * len(index), names), (names,), sets(([0, 2],)))


def gather(node: fx.Node) -> Rule:
    """Return the rule of gather: index and output agree; of the source, the gathered dim is whole."""
    shape, index = input_shapes(node)
    (dim,) = dims_of(bound(node)["dim"], len(shape) or 1)
    names = tuple(n if i == dim or shape[i] == index[i] else None for i, n in enumerate(named(len(shape))))
    return Rule((_with(names, dim, None) if shape else (), names), (names,), sets(([0],)))


def scatter(node: fx.Node) -> Rule:
    """Return the rule of scatter, scatter_add and scatter_reduce: dims in which all tensors agree, other than the
    scattered one. Adding and overwriting are linear in target and source together; overwriting with a number only if it
    is zero."""
    shapes, arguments = input_shapes(node), bound(node)
    (dim,) = dims_of(arguments["dim"], len(shapes[0]) or 1)
    agree = [len({s[i] for s in shapes}) == 1 and i != dim for i in range(len(shapes[0]))]
    names = tuple(n if agree[i] else None for i, n in enumerate(named(len(shapes[0]))))
    reduces = arguments.get("reduce", "sum") != "sum"
    if is_tensor(arguments.get("src")):
        linear = () if reduces else ([0, 2],)
    else:
        linear = ([0],) if arguments["value"] == 0 and not reduces else ()
    return Rule((names,) * len(shapes), (names,), sets(linear))


def pad(node: fx.Node) -> Rule:
    """Return the rule of padding: padded dims (the last ones come first in `pad`) are whole; padding with zeros is
    linear."""
    arguments, (shape,) = bound(node), input_shapes(node)
    amounts = arguments["pad"]
    padded = {len(shape) - 1 - i for i in range(len(amounts) // 2) if amounts[2 * i] or amounts[2 * i + 1]}
    names = tuple(None if i in padded else name for i, name in enumerate(named(len(shape))))
    return Rule((names,), (names,), sets(([0],)) if arguments["value"] == 0 else ())


def index(node: fx.Node) -> Rule | None:
    """Return the rule of x[i, :, j]: dims without an index pass, dims with one are whole, and the indices have dims of
    their own."""
    placed = _placed(node)
    if placed is None:
        return None
    source, indices, result = placed
    return Rule((source, *indices), (result,), sets(([0],)))


def index_put(node: fx.Node) -> Rule | None:
    """Return the rule of x[i, :, j] = values, or +=. Adding to zeros sums over the indices' own dims, as an embedding's
    backward does."""
    placed = _placed(node)
    if placed is None:
        return None
    source, indices, result = placed
    arguments = bound(node)
    if not (arguments["accumulate"] and is_zero(arguments["self"])):
        own = {name for dims in indices for name in dims}
        indices = [(None,) * len(dims) for dims in indices]
        result = tuple(None if name in own else name for name in result)
    shape = shape_of(arguments["values"])
    put = tuple(None if size == 1 else name for size, name in zip(shape, result[len(result) - len(shape) :]))
    return Rule((source, *indices, put), (source,), sets(([0, len(indices) + 1],)))


def _placed(node: fx.Node) -> tuple[tuple[Dim, ...], list[tuple[Dim, ...]], tuple[Dim, ...]] | None:
    """Return the dims of x, of each index, and of x[indices]. None for masks: their result has a size that depends on
    the data."""
    arguments = bound(node)
    indices, names = arguments["indices"], named(len(shape_of(arguments["self"])))
    tensors = [i for i in indices if i is not None]
    if not tensors or any(i.meta["val"].dtype in (torch.bool, torch.uint8) for i in tensors):
        return None
    own_shape = torch.broadcast_shapes(*map(shape_of, tensors))
    own = tuple(f"i{j}" for j in range(len(own_shape)))
    taken = [d for d, i in enumerate(indices) if i is not None]
    source = tuple(None if d in taken else name for d, name in enumerate(names))
    passing = tuple(name for name in source if name)
    # The indices' dims stand where the indexed dims stood if those are neighbours, else in front: as in NumPy.
    at = taken[0] if taken == list(range(taken[0], taken[-1] + 1)) else 0
    return source, [aligned(shape_of(i), own_shape, own) for i in tensors], passing[:at] + own + passing[at:]
