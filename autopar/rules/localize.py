"""Global constants in an op's arguments -> those of one device: sizes, offsets, starts and counts.

LOCAL is the table: op -> function from a OpCall to the arguments that change, by name. Ops that are not in it take no
constants that depend on the sharding.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import fx

from .._torch import schema_names
from ..ir.layout import Layout, local_offset, local_shape
from ..ir.mesh import Mesh
from .indexing import slice_start
from .reading import bound, dims_of, input_shapes, output_shapes
from .rule import Strategy


@dataclass(frozen=True)
class OpCall:
    """One op on one device."""

    node: fx.Node
    strategy: Strategy
    mesh: Mesh
    coordinate: Mapping[str, int]

    @cached_property
    def arguments(self) -> dict[str, Any]:
        """Return the global arguments by name."""
        return bound(self.node)

    def input(self, position: int) -> tuple[int, ...]:
        """Return the local shape of a tensor argument."""
        layout = self.strategy.inputs[position]
        return local_shape(input_shapes(self.node)[position], layout, self.mesh, self.coordinate)

    def output(self, position: int = 0) -> tuple[int, ...]:
        """Return the local shape of an output."""
        layout = self.strategy.outputs[position]
        return local_shape(output_shapes(self.node)[position], layout, self.mesh, self.coordinate)

    def input_offset(self, position: int, dim: int) -> int:
        """Return the global index of the first local element of a tensor argument along `dim`."""
        shape, layout = input_shapes(self.node)[position], self.strategy.inputs[position]
        return local_offset(shape, layout, self.mesh, self.coordinate, dim % len(shape))

    def output_offset(self, dim: int) -> int:
        """Return the global index of the first local element of the first output along `dim`."""
        shape = output_shapes(self.node)[0]
        return local_offset(shape, self.strategy.outputs[0], self.mesh, self.coordinate, dim % len(shape))


Localizer = Callable[[OpCall], dict[str, Any]]


def local_call(
    node: fx.Node,
    strategy: Strategy,
    mesh: Mesh,
    coordinate: Mapping[str, int],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return `args` and `kwargs` (the node's, with tensors already replaced by local ones) with constants of this
    device."""
    positional, by_name = list(args), dict(kwargs)
    localize = LOCAL.get(str(node.target))
    if localize is not None:
        positions = {name: i for i, name in enumerate(schema_names(node.target))}
        for name, value in localize(OpCall(node, strategy, mesh, coordinate)).items():
            if positions[name] < len(positional):
                positional[positions[name]] = value
            else:
                by_name[name] = value
    return tuple(positional), by_name


def size_as(name: str) -> Localizer:
    """Make the argument `name` the local shape of the output."""
    return lambda call: {name: list(call.output())}


def offset_of(position: int, dim: int) -> Localizer:
    """Make the argument `offset` the place where the shard of a tensor argument starts along `dim`."""
    return lambda call: {"offset": call.input_offset(position, dim)}


def _embedding_dw(call: OpCall) -> dict[str, Any]:
    return {"offset": call.output_offset(0), "rows": call.output()[0]}


def _grouped_mm_dw(call: OpCall) -> dict[str, Any]:
    return {"offset": call.output_offset(0), "groups": call.output()[0]}


def _attention(position: int) -> Localizer:
    """Make `first` the number of the device's first query, where an attention that is causal or has a window is cut
    along its queries, which are the tensor argument at `position`; say which heads of keys are read, if not all, and
    where the device's weights start among all that dropout may drop."""

    def localize(call: OpCall) -> dict[str, Any]:
        counts = call.arguments["causal"] or call.arguments["window"]
        start = call.input_offset(position, 2) if counts else 0
        first = {"first": call.arguments["first"] + start} if start else {}
        at = call.node, call.strategy.inputs, call.mesh, call.coordinate, position
        return first | heads_read(*at) | weights_from(*at, call.input_offset(position, 2))

    return localize


def weights_from(
    node: fx.Node,
    inputs: Sequence[Layout],
    mesh: Mesh,
    coordinate: Mapping[str, int],
    position: int,
    row: int,
) -> dict[str, int]:
    """Return, where an attention drops weights, `start`, the index of the first one of its query `row` among all.
    `position`: as in `heads_read`."""
    given = bound(node)
    if given["state"] is None:
        return {}
    shape, layout = input_shapes(node)[position], inputs[position]
    places = (*(local_offset(shape, layout, mesh, coordinate, dim) for dim in (0, 1)), row)
    return {"start": given["start"] + sum(step * at for step, at in zip(given["strides"], places))}


def heads_read(
    node: fx.Node, inputs: Sequence[Layout], mesh: Mesh, coordinate: Mapping[str, int], position: int
) -> dict[str, int]:
    """Return, where a device has more heads of keys than its queries read, `group`, the heads of queries that read one,
    and `head`, the number of its first, counted from those that read the device's first head of keys. `position` is
    that of the queries among the tensor arguments."""
    shapes, layouts = input_shapes(node)[position : position + 2], inputs[position : position + 2]
    (heads, of_keys), (cut, keys_cut) = ((shape[1] for shape in shapes), (layout.dims[1] for layout in layouts))
    if cut == keys_cut or of_keys == 1:
        return {}
    group = heads // of_keys
    first, first_key = (local_offset(*both, mesh, coordinate, 1) for both in zip(shapes, layouts))
    return {"head": first - group * first_key, "group": group}


def _with_earlier(call: OpCall) -> dict[str, Any]:
    """Put as many keys before a device's own as make all that the op gives."""
    return {"earlier": call.output()[2] - call.input(0)[2]}


def _unflatten(call: OpCall) -> dict[str, Any]:
    dim = call.arguments["dim"] % len(input_shapes(call.node)[0])
    return {"sizes": list(call.output()[dim : dim + len(call.arguments["sizes"])])}


def _repeat(call: OpCall) -> dict[str, Any]:
    """Repeat each dim as often as the device holds copies of it."""
    source, result = call.input(0), call.output()
    source = (1,) * (len(result) - len(source)) + source
    return {"repeats": [size // max(of, 1) for size, of in zip(result, source)]}


def _arange(call: OpCall) -> dict[str, Any]:
    step = call.arguments.get("step", 1)
    start = call.arguments["start"] + step * call.output_offset(0)
    if not call.strategy.outputs[0].dims[0]:
        return {}
    return {"start": start, "end": start + step * call.output()[0]}


def _split(call: OpCall) -> dict[str, Any]:
    (dim,) = dims_of(call.arguments["dim"], len(call.output()))
    return {"split_size": call.output()[dim]}


def _split_with_sizes(call: OpCall) -> dict[str, Any]:
    (dim,) = dims_of(call.arguments["dim"], len(call.output()))
    return {"split_sizes": [call.output(i)[dim] for i in range(len(call.strategy.outputs))]}


def _slice(call: OpCall) -> dict[str, Any]:
    return _slice_of(call, input_shapes(call.node)[0], output_shapes(call.node)[0], call.output())


def _slice_backward(call: OpCall) -> dict[str, Any]:
    bounds = _slice_of(call, output_shapes(call.node)[0], input_shapes(call.node)[0], call.input(0))
    return {"input_sizes": list(call.output())} | bounds


def _slice_scatter(call: OpCall) -> dict[str, Any]:
    whole, chunk = input_shapes(call.node)
    return _slice_of(call, whole, chunk, call.input(1))


def _slice_of(call: OpCall, whole: tuple[int, ...], chunk: tuple[int, ...], local: tuple[int, ...]) -> dict[str, Any]:
    """Return start and end of the local slice: a sharded chunk is the i-th of equal parts, here as well as globally."""
    (dim,) = dims_of(call.arguments["dim"], len(whole))
    if local[dim] == chunk[dim]:
        return {}
    start = slice_start(call.arguments["start"], whole[dim]) // chunk[dim] * local[dim]
    return {"start": start, "end": start + local[dim]}


def _drawn(call: OpCall) -> dict[str, Any]:
    """Return where this device's part of the global tensor starts, as an index into it; its steps stay the global
    ones."""
    strides = call.arguments["strides"]
    start = sum(step * call.output_offset(d) for d, step in enumerate(strides))
    return {"start": start} | ({"size": list(call.output())} if "size" in call.arguments else {})


def _convolution(call: OpCall) -> dict[str, Any]:
    return {"groups": _groups(call, call.output()[1], output_shapes(call.node)[0][1])}


def _convolution_backward(call: OpCall) -> dict[str, Any]:
    local, whole = call.input(0)[1], input_shapes(call.node)[0][1]
    bias = {"bias_sizes": [local]} if call.arguments["bias_sizes"] else {}
    return {"groups": _groups(call, local, whole)} | bias


def _groups(call: OpCall, local_channels: int, channels: int) -> int:
    """Return the local number of groups: several are sharded whole, with their share of the output channels; one group
    belongs to all devices."""
    groups: int = call.arguments["groups"]
    return groups if groups == 1 else groups * local_channels // channels


LOCAL: dict[str, Localizer] = {
    "autopar.attention.default": _attention(0),
    "autopar.attention_bw.default": _attention(1),
    "autopar.attention_bias_bw.default": _attention(1),
    "autopar.embedding.default": offset_of(0, 0),
    "autopar.embedding_dw.default": _embedding_dw,
    "autopar.grouped_mm.default": offset_of(1, 0),
    "autopar.grouped_mm_dw.default": _grouped_mm_dw,
    "autopar.vocab_loss.default": offset_of(0, -1),
    "autopar.vocab_loss_bw.default": offset_of(2, -1),
    "autopar.dropout.default": _drawn,
    "autopar.normal.default": _drawn,
    "autopar.uniform.default": _drawn,
    "autopar.of_own.default": lambda call: {"own": call.output()[2]},
    "autopar.with_earlier.default": _with_earlier,
    "aten.arange.start": _arange,
    "aten.arange.start_step": _arange,
    "aten.convolution.default": _convolution,
    "aten.convolution_backward.default": _convolution_backward,
    "aten.expand.default": size_as("size"),
    "aten.native_group_norm.default": lambda call: {"N": call.input(0)[0]},
    "aten.native_group_norm_backward.default": lambda call: {"N": call.input(0)[0]},
    "aten.repeat.default": _repeat,
    "aten.reshape.default": size_as("shape"),
    "aten.select_backward.default": size_as("input_sizes"),
    "aten.slice.Tensor": _slice,
    "aten.slice_backward.default": _slice_backward,
    "aten.slice_scatter.default": _slice_scatter,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.split_with_sizes_copy.default": _split_with_sizes,
    "aten.unsafe_split.Tensor": _split,
    "aten.unsafe_split_with_sizes.default": _split_with_sizes,
    "aten.unflatten.int": _unflatten,
    "aten.upsample_bilinear2d_backward.default": size_as("input_size"),
    "aten.upsample_nearest2d_backward.default": size_as("input_size"),
    "aten.upsample_bicubic2d_backward.default": size_as("input_size"),
    "aten.view.default": size_as("size"),
    "aten._unsafe_view.default": size_as("size"),
} | {
    f"aten.{name}": size_as("size")
    for name in """zeros.default ones.default full.default empty.memory_format
    new_zeros.default new_ones.default new_full.default new_empty.default""".split()
}
