"""Outputs as people use them: plain tensors, gathered when somebody reads them, and never if nobody does.

With inputs="global" every rank computes the same from the outputs of a call, so an output is what eager torch gives:
any loss, metric, head or `.numpy()` takes it. With inputs="local" an output is that of the samples that the rank
passed, and a loss of it counts as that of its part of the batch: gradients are those of the mean over the parts, as
under DDP. An output that mixes samples, as a loss inside of the model does, is that of the whole batch on every rank.

Until it is read an output is a DTensor in the layout in which the plan left it: logits beside a loss cost nothing.
Gathering is a collective, so what reads an output does so on all ranks.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch
from .._torch import tree_flatten, tree_map
from ..codegen.follow_size import Differs, Line, Sizes, follow
from ..errors import InputError
from ..frontend.export import Captured
from ..ir.graph import outputs_of
from ..ir.layout import Layout, in_blocks, in_zigzag, local_part, local_shape, straightened
from ..ir.mesh import Mesh
from ..passes.pipeline.lengths import Found, dims_in_outputs
from ..passes.pipeline.samples import SampleDim, outputs_with_samples
from ..processes import watch
from ..processes.dtensors import redistributed, spec_of, whole_of
from .lengths import OwnLengths

Kind = Literal["global", "local", "sharded"]
# What an output answers without being gathered: its form, its place in autograd, and all that makes it a DTensor.
OF_SHAPE = frozenset("shape size dim ndim ndimension numel nelement nbytes __len__ stride is_contiguous".split())
_AS_IT_IS = OF_SHAPE.union(
    """dtype device layout requires_grad grad_fn is_leaf is_floating_point is_complex is_cuda is_meta is_sparse
    is_quantized element_size itemsize output_nr _version __hash__ names is_inference type placements device_mesh
    full_tensor to_local redistribute _local_tensor _spec __class__ __dict__""".split()
)
_OF_PARTS = frozenset("placements device_mesh to_local redistribute".split())  # what a DTensor says of the parts


class GlobalTensor(DTensor):
    """An output of a compiled model. It is gathered by the first function that reads it, which then has a plain
    tensor."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if name_of(function) in _AS_IT_IS or torch.compiler.is_compiling() or _is_with_dtensors(args, kwargs):
            with _torch.without_torch_function():
                return function(*args, **kwargs)
        return function(*tree_map(plain, args), **tree_map(plain, kwargs))

    def tolist(self):
        """Return the whole output as numbers."""
        return plain(self).tolist()

    def numpy(self, **options):
        """Return the whole output as an array."""
        return plain(self).numpy(**options)

    def __format__(self, form: str) -> str:
        return format(plain(self), form)


class ZigzagTensor(GlobalTensor):
    """An output that is cut in zigzag, which no DTensor says: its local values are around as if they were plain blocks.
    Whatever asks for more than its form reads the plain tensor."""

    _layout: Layout
    _mesh: Mesh

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if name_of(function) in _AS_IT_IS - _OF_PARTS:
            with _torch.without_torch_function():
                return function(*args, **kwargs)
        return function(*tree_map(plain, args), **tree_map(plain, kwargs))

    def full_tensor(self, **options):
        """Return the whole output, its places in their own order."""
        return plain(self)

    def to_local(self, **options):
        """Raise InputError: no plain part of the output is here."""
        raise InputError(
            "an output that is cut in zigzag has no plain part on this rank",
            fix='read it as it is, which gathers it, or pass outputs="sharded" to autopar.compile',
        )

    def redistribute(self, *args, **options):
        """Raise InputError, as `to_local` does."""
        return self.to_local()


class LocalTensor(GlobalTensor):
    """An output of a model that is compiled with inputs="local". It stands for a plain tensor of this rank's samples,
    which `_own` says."""

    _own: Own

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if name_of(function) in OF_SHAPE:
            return function(*tree_map(_example, args), **tree_map(_example, kwargs))
        if _is_with_dtensors(args, kwargs):
            raise InputError(
                "an output of this rank's samples meets a DTensor, such as a parameter of the model",
                fix='pass outputs="sharded" to autopar.compile for outputs that are DTensors, or inputs="global"',
            )
        return super().__torch_function__(function, types, args, kwargs)


def _example(value: Any) -> Any:
    """Return what has the shape of this rank's part of an output; anything else as it is."""
    return value._own.shortened(value._own.example) if isinstance(value, LocalTensor) else value


def name_of(function) -> str:
    """Return the name of a function, or of the attribute that it reads."""
    name = getattr(function, "__name__", "")
    return getattr(function.__self__, "__name__", "") if name == "__get__" else name


def _is_with_dtensors(args: tuple, kwargs: dict) -> bool:
    """Return whether a user's own DTensors, or parameters, are among the arguments: then an output counts as one of
    them."""
    return any(isinstance(a, DTensor) and not isinstance(a, GlobalTensor) for a in tree_flatten((args, kwargs))[0])


def plain(value: Any) -> Any:
    """Return the plain tensor that an output stands for, gathered once; anything else as it is."""
    if not isinstance(value, GlobalTensor):
        return value
    with _torch.without_torch_function():
        known = value.__dict__.get("_plain")
        if known is None or (torch.is_grad_enabled() and value.requires_grad and not known.requires_grad):
            with watch.collective("the parts of an output"):
                if isinstance(value, LocalTensor):
                    known = value._own.shortened(_OwnPart.apply(value, value._own))
                elif isinstance(value, ZigzagTensor):
                    known = _Straight.apply(value)
                else:
                    known = _PlainGradient.apply(value.full_tensor())
            value.__dict__["_plain"] = known
    return known


def own_parts(values):
    """Return a structure with plain tensors in the place of outputs of this rank's samples."""
    return tree_map(lambda value: plain(value) if isinstance(value, LocalTensor) else value, values)


class _PlainGradient(torch.autograd.Function):
    """The identity, whose gradient is a plain tensor: beside a parameter (`loss + p.square().sum()`) it is a
    DTensor."""

    @staticmethod
    def forward(ctx, whole: Tensor) -> Tensor:
        return whole.view_as(whole)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        return gradient.full_tensor() if isinstance(gradient, DTensor) else gradient


class _Straight(torch.autograd.Function):
    """The whole of an output that is cut in zigzag. Its gradient is a DTensor in plain blocks."""

    @staticmethod
    def forward(ctx, value: Any) -> Tensor:
        ctx.spec, ctx.layout, ctx.mesh = value._spec, value._layout, value._mesh
        return straightened(DTensor.full_tensor(value.detach()), ctx.layout, ctx.mesh)

    @staticmethod
    def backward(ctx, gradient: Tensor) -> Tensor:
        whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
        here = dict(zip(ctx.mesh.names, ctx.spec.mesh.get_coordinate()))
        return _torch.as_dtensor(local_part(whole, in_blocks(ctx.layout), ctx.mesh, here), ctx.spec)


class _OwnPart(torch.autograd.Function):
    """Takes this rank's samples of an output. What is computed of them counts as one of `own.parts` equal parts."""

    @staticmethod
    def forward(ctx, value: Any, own: Own) -> Tensor:
        ctx.own = own
        if own.held is not None:
            whole = straightened(DTensor.full_tensor(value.detach()), own.held, own.mesh)
            return local_part(whole, own.layout, own.mesh, dict(zip(own.mesh.names, own.spec.mesh.get_coordinate())))
        return redistributed(value.detach(), own.layout, own.mesh, own.spec.mesh).detach()

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return _torch.as_dtensor(gradient.contiguous() / ctx.own.parts, ctx.own.spec), None


@dataclass(frozen=True)
class Own:
    """Says which part of an output is that of a rank's samples: its global `layout` over the mesh (`spec` as a DTensor)
    has as many `parts`. `example` has the shape and dtype of a part, without values; `shortened` leaves this rank's own
    length of it, where ranks differ (autopar/runtime/lengths.py). `held`: how ranks have it, if that is in zigzag."""

    mesh: Mesh
    layout: Layout
    spec: Any
    parts: int
    example: Tensor
    shortened: Callable[[Tensor], Tensor] = lambda part: part
    held: Layout | None = None

    @classmethod
    def of(cls, sample_dim: SampleDim, like: Tensor, axes: tuple[str, ...], mesh: Mesh, device_mesh) -> Own:
        """Return the part of a global output that has its samples at `sample_dim`, of which each rank along `axes`
        passes some."""
        cut = [(axes, sample_dim[1]) if dim == sample_dim[0] else ((), 1) for dim in range(like.dim())]
        layout = Layout(tuple(a for a, _ in cut), (), tuple(n for _, n in cut))
        shape = local_shape(like.shape, layout, mesh, dict(zip(mesh.names, device_mesh.get_coordinate())))
        spec = spec_of(layout, like.shape, like.dtype, mesh, device_mesh)
        parts = math.prod(map(mesh.size, axes))
        return cls(mesh, layout, spec, parts, torch.empty(shape, dtype=like.dtype, device="meta"))


def _at(number: int | Line, sizes: Sizes) -> int:
    return number.whole(sizes) if isinstance(number, Line) else number


@dataclass(frozen=True)
class OutputForm:
    """Hands the user an output of which a rank computes a part: `spec` says which, None of a number, and `zigzag` the
    layout and the mesh if it is cut so. `length_dims`: where the dims of inputs are in it, by their names."""

    kind: Kind
    spec: Any
    own: Own | None
    length_dims: Callable[[Collection[str]], Found] = lambda inputs: Found()
    name: str = ""
    zigzag: tuple[Layout, Mesh] | None = None

    def of(self, local: Tensor, lengths: OwnLengths | None = None) -> Tensor:
        """Return the output, given what the rank computed of it, in the rank's own lengths."""
        if self.spec is None:
            return local.detach()
        if self.kind == "sharded":
            return _torch.as_dtensor(local if self.zigzag is None else self._in_blocks(local, *self.zigzag), self.spec)
        if self.own is not None:
            output = cast(LocalTensor, _torch.as_dtensor(local, self.spec, LocalTensor))
            output._own = self.own if lengths is None else replace(self.own, shortened=self._shortened(lengths))
            return output
        if self.zigzag is not None:
            held = cast(ZigzagTensor, _torch.as_dtensor(local, self.spec, ZigzagTensor))
            held._layout, held._mesh = self.zigzag
            return held
        if all(placement.is_replicate() for placement in self.spec.placements):
            return local.detach()
        return _torch.as_dtensor(local, self.spec, GlobalTensor)

    def _in_blocks(self, local: Tensor, layout: Layout, mesh: Mesh) -> Tensor:
        """Return this rank's plain block of an output of which it has one in zigzag."""
        whole = whole_of(local, self.spec.shape, layout, mesh, self.spec.mesh)
        return local_part(whole, in_blocks(layout), mesh, dict(zip(mesh.names, self.spec.mesh.get_coordinate())))

    def _shortened(self, lengths: OwnLengths) -> Callable[[Tensor], Tensor]:
        return lambda part: lengths.shortened(part, self.length_dims(lengths.inputs), self.spec.shape, self.name)


class OutputForms:
    """Knows the forms of the outputs of a call, for the ranks of a mesh (of a stage). `fixed`: the layouts in which the
    user passes inputs, by name; `axes`: along them they are parts of the batch, with inputs="local"."""

    def __init__(
        self,
        kind: Kind,
        captured: Captured,
        fixed: Mapping[str, Layout],
        axes: tuple[str, ...],
        mesh: Mesh,
        device_mesh,
    ):
        self.kind, self.axes, self.mesh, self.device_mesh = kind, axes, mesh, device_mesh
        self.returns, self.graph = captured.returns, captured.graph
        self.samples = {shape[0] for shape in captured.signature.shapes if shape}
        self.length_dims = lru_cache(1)(self._length_dims)
        outputs = outputs_of(captured.graph)
        sample_dims: Sequence[SampleDim | None] = [None] * len(outputs)
        if kind == "local" and axes:
            cut = {name for name, layout in fixed.items() if layout.dims and layout.dims[0] == axes}
            sample_dims = outputs_with_samples(captured.graph, cut)
        found = [(r.name, n, dim) for (n, r), dim in zip(outputs, sample_dims) if r.kind == "output"]
        self.values: dict[str, Tensor] = {name: node.meta["val"] for name, node, _ in found}  # of global shapes
        self.sample_dims = {name: dim for name, _, dim in found}

    @staticmethod
    def following(forms: Mapping[Sizes, OutputForms]) -> tuple[Callable[[Sizes], OutputForms], frozenset[Line]]:
        """Return what gives the forms for any sizes, and the lines of the numbers in them, given those for some sizes.
        Raises Differs."""
        newest = forms[max(forms)]
        if len({repr(f.sample_dims) for f in forms.values()}) > 1:
            raise Differs("outputs have their samples elsewhere at other sizes")
        shapes = {size: {name: list(value.shape) for name, value in f.values.items()} for size, f in forms.items()}
        found = follow(shapes)

        def at(sizes: Sizes) -> OutputForms:
            made = copy.copy(newest)
            made.values = {
                name: torch.empty([_at(number, sizes) for number in found[name]], dtype=like.dtype, device="meta")
                for name, like in newest.values.items()
            }
            return made

        return at, frozenset(number for shape in found.values() for number in shape if isinstance(number, Line))

    def of(self, layouts: Mapping[str, Layout | None]) -> list[OutputForm]:
        """Return the forms of outputs in these layouts, by name."""
        return [self.form(name, layout) for name, layout in layouts.items()]

    def form(self, name: str, layout: Layout | None) -> OutputForm:
        """Return the form of an output of which the rank computes the part that a global layout gives it."""
        like, sample_dim = self.values[name], self.sample_dims[name]
        if layout is None or not like.dim():
            return OutputForm(self.kind, None, None)
        spec = spec_of(layout, like.shape, like.dtype, self.mesh, self.device_mesh)
        own = Own.of(sample_dim, like, self.axes, self.mesh, self.device_mesh) if sample_dim is not None else None
        zigzag = (layout, self.mesh) if in_zigzag(layout) else None
        own = replace(own, held=layout) if own is not None and zigzag else own
        found = lambda inputs: self.length_dims(inputs)[name]  # noqa: E731
        return OutputForm(self.kind, spec, own, found, self.returns.names[int(name)], zigzag)

    def _length_dims(self, inputs: Collection[str]) -> dict[str, Found]:
        """Return where the dims of inputs are in each output. A dim that has as many places as there are samples, each
        of which is one, has no other places."""
        found = {
            role.name: of_output
            for (_, role), of_output in zip(outputs_of(self.graph), dims_in_outputs(self.graph, inputs))
            if role.kind == "output"
        }
        for name, of_output in found.items():
            dim, parts = self.sample_dims[name] or (0, 0)
            if parts == 1 and self.values[name].shape[dim] in self.samples:
                of_output.lost.pop(dim, None)
        return found
