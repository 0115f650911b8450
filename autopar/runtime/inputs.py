"""The batch: its global form when compiling, this rank's part of it at every call."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch.distributed.tensor import DTensor, Replicate

from ..errors import InputError
from ..frontend.call_signature import CallSignature, describe_call, needs_gradient, split_example
from ..ir.layout import Layout, in_blocks, in_zigzag, local_part, local_shape
from ..ir.mesh import NOT_DATA, SEQUENCE_AXIS, Mesh
from ..plans.pipeline import axis_of
from ..processes import agree, watch
from ..processes.dtensors import as_dtensor, layout_of, redistributed, whole_of
from .outputs import own_parts


def data_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which inputs="local" means parts: those named for data, or the first one. Under a pipeline
    it is the first one that is not named for something else; none on a mesh that has no such axis, where the only part
    is the batch."""
    named = tuple(a for a in mesh.names if a.startswith("dp") or a == "data")
    if named or axis_of(mesh) is None:
        return named or mesh.names[:1]
    return tuple(a for a in mesh.names if a not in NOT_DATA)[:1]


def check_local(mesh: Mesh) -> None:
    """Raise InputError for inputs="local" on a mesh whose parts of the batch would be along the axis that is named for
    the sequence: whether a rank passes samples or a chunk of the sequence is not to be guessed."""
    if data_axes(mesh) == (SEQUENCE_AXIS,):
        raise InputError(
            f'inputs="local" gives each rank samples of its own, and {mesh} has no axis for them: along '
            f"{SEQUENCE_AXIS} ranks share samples",
            mesh=mesh,
            fix=f'pass the whole batch with inputs="global"; or chunks of the sequence as DTensors, Shard(1) along '
            f"{SEQUENCE_AXIS}; or name an axis of data, dp=1,{mesh}, along which ranks pass samples",
        )


def global_example(example_inputs, mode: str, mesh: Mesh) -> tuple[tuple[tuple, dict], dict[str, Layout]]:
    """Return `(args, kwargs)` of global shapes on the meta device, and the layouts that the user's own tensors fix, by
    input name: those of DTensors, and with inputs="local" of each rank's part."""
    signature, tensors = CallSignature.of(*split_example(own_parts(example_inputs)))
    axes = data_axes(mesh)
    fixed: dict[str, Layout] = {}
    whole = []
    for name, x in zip(signature.tensor_names, tensors):
        shape = list(x.shape)
        if isinstance(x, DTensor):
            fixed[name] = layout_of(x.placements, x.dim(), mesh, name)
        elif mode == "local":
            fixed[name] = Layout((axes, *((),) * (x.dim() - 1))) if x.dim() else Layout(())
            for axis in axes if x.dim() else ():
                shape[0] *= mesh.size(axis)
        empty = torch.empty(shape, dtype=x.dtype, device="meta", requires_grad=needs_gradient(x))
        whole.append(signature.open_numbers.get(name, empty))
    return signature.rebuild(whole), fixed


class Inputs:
    """Turns calls of one form into the local tensors that the rank's graph takes. `layouts`: by input name, those that
    the plan gives the inputs; `fixed`: those in which the user passes them, if they are not whole."""

    def __init__(
        self,
        signature: CallSignature,
        mode: str,
        layouts: Mapping[str, Layout],
        fixed: Mapping[str, Layout],
        mesh: Mesh,
        device_mesh,
    ):
        self.signature, self.is_local, self.layouts, self.fixed = signature, mode == "local", layouts, fixed
        self.mesh, self.device_mesh = mesh, device_mesh
        self.device = torch.device(device_mesh.device_type)
        self.coordinate = mesh.coordinate(torch.distributed.get_rank())
        self.parts = signature.shapes
        if self.is_local:
            self.parts = tuple(
                s if s is None else local_shape(s, fixed[n], mesh, self.coordinate)
                for n, s in zip(signature.names, signature.shapes)
            )

    def match(self, args: tuple, kwargs: dict) -> list[torch.Tensor] | None:
        """Return the tensors of a call, or None if it has another form."""
        if self.is_local:
            args, kwargs = own_parts((args, kwargs))
        return self.signature.match(args, kwargs, self.parts)

    def parts_of(self, name: str) -> int:
        """Return how many parts of an input ranks pass."""
        dims = self.fixed[name].dims if self.is_local else ()
        return math.prod(self.mesh.size(axis) for axis in (dims[0] if dims else ()))

    def text(self) -> str:
        """Return the form of a call, as a rank passes it: `x (4, 6), scale=2.0`."""
        like = zip(self.parts, self.signature.dtypes, self.signature.differentiated, self.signature.numbers)
        with torch.enable_grad():
            tensors = [
                number or torch.empty(s, dtype=d, device="meta", requires_grad=g)
                for s, d, g, number in like
                if s is not None
            ]
            return describe_call(*self.signature.rebuild(tensors))

    def check(self, tensors: list[torch.Tensor]) -> None:
        """Raise InputError on every rank if ranks that are to pass the same, all of them or those at one part of the
        batch, pass different tensors. What is a DTensor says itself which ranks have the same."""
        plain = [(n, t) for n, t in zip(self.signature.tensor_names, tensors) if not isinstance(t, DTensor)]
        part = tuple((a, self.coordinate[a]) for a in data_axes(self.mesh)) if self.is_local else None
        agree.check_batches([n for n, _ in plain], [t for _, t in plain], part)

    def local(self, tensors: list[torch.Tensor]) -> list[torch.Tensor]:
        """Return this rank's parts of a call's tensors, through which gradients flow back to them. Raises InputError
        for a DTensor of another mesh."""
        return [
            _Part.apply(t, self, name) if needs_gradient(t) else self._local(name, t)
            for name, t in zip(self.signature.tensor_names, tensors)
        ]

    def as_passed(self, name: str, like: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
        """Return values of which this rank has the part `local`, in the form in which the user passes `like`: whole, as
        a part of the batch, or as a DTensor of the same placements. Collective where that form is another one."""
        layout, shape = self.layouts[name], self.signature.shape_of(name) or ()
        if not isinstance(like, DTensor) and (
            self.fixed.get(name, layout) == layout if self.is_local else layout.is_replicated
        ):
            return local.to(like.device)
        with watch.collective(f"the parts of {name}"):
            if in_zigzag(layout):  # which no DTensor is
                placed = self.fixed.get(name, Layout.replicated(len(shape)))
                values = whole_of(local.contiguous(), shape, layout, self.mesh, self.device_mesh)
                local, layout = local_part(values, placed, self.mesh, self.coordinate), placed
            whole = as_dtensor(local.contiguous(), shape, layout, self.mesh, self.device_mesh)
            if isinstance(like, DTensor):
                return whole.redistribute(
                    self.device_mesh, [Replicate() if p.is_partial() else p for p in like.placements]
                )
            if self.is_local:
                return redistributed(whole, self.fixed[name], self.mesh, self.device_mesh).to(like.device)
            return whole.full_tensor().to(like.device)

    def _local(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        layout = self.layouts.get(name)
        if layout is None:  # the graph does not read it
            return tensor
        if isinstance(tensor, DTensor):
            self._check_mesh(name, tensor)
            return redistributed(tensor, layout, self.mesh, self.device_mesh)
        if not self.is_local:
            return local_part(tensor, layout, self.mesh, self.coordinate).to(self.device)
        if self.fixed[name] == layout:
            return tensor.to(self.device)
        shape = self.signature.shape_of(name)  # a given plan may want it otherwise
        whole = as_dtensor(tensor.to(self.device), shape, self.fixed[name], self.mesh, self.device_mesh)
        return redistributed(whole, layout, self.mesh, self.device_mesh)

    def _check_mesh(self, name: str, tensor: DTensor) -> None:
        if tensor.device_mesh != self.device_mesh:
            raise InputError(
                f"{name} is a DTensor of another mesh",
                mesh=tensor.device_mesh,
                fix="use the mesh given to autopar.compile",
            )

    def shard(self, args: tuple, kwargs: dict) -> tuple | dict:
        """Return a batch as DTensors; see ParallelModule.shard_inputs."""
        batch = next((x.dims[0] for x in self.layouts.values() if x.dims), ())

        def sharded(name, value):
            if not isinstance(value, torch.Tensor) or isinstance(value, DTensor):
                return value
            layout = self.layouts.get(name)
            layout = layout and in_blocks(layout)
            if layout is None or len(layout.dims) != value.dim():
                layout = Layout((batch, *((),) * (value.dim() - 1))) if value.dim() else Layout(())
            part = local_part(value, layout, self.mesh, self.coordinate).to(self.device)
            return as_dtensor(part, value.shape, layout, self.mesh, self.device_mesh)

        if kwargs:
            return {name: sharded(name, value) for name, value in kwargs.items()}
        return tuple(sharded(f"args[{i}]", value) for i, value in enumerate(args))


class _Part(torch.autograd.Function):
    """This rank's part of a tensor of the user; the gradient of the part becomes one in the form of the tensor. Of the
    rank's own samples it is that of the rank's loss, as under DDP, of which the whole batch's is the mean."""

    @staticmethod
    def forward(ctx, tensor: torch.Tensor, inputs: Inputs, name: str):
        ctx.set_materialize_grads(False)
        ctx.inputs, ctx.name = inputs, name
        ctx.like = tensor if isinstance(tensor, DTensor) else torch.empty(0, device=tensor.device)
        return inputs._local(name, tensor).detach()

    @staticmethod
    def backward(ctx, gradient: torch.Tensor | None):
        if gradient is None:  # of an input that no output depends on
            return None, None, None
        gradient = ctx.inputs.as_passed(ctx.name, ctx.like, gradient)
        return gradient if isinstance(ctx.like, DTensor) else gradient * ctx.inputs.parts_of(ctx.name), None, None


class WholeInputs(Inputs):
    """Under a pipeline every rank gets the whole batch, which is cut into micro-batches and then as each stage wants
    it: a micro-batch is a stretch of the batch, whoever has its samples, so that what it draws does not depend on how
    they came. Parts of the batch travel to the ranks that have others, once a call."""

    def _local(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            if not self.is_local or self.fixed[name].is_replicated:
                return tensor.to(self.device)
            shape = self.signature.shape_of(name)
            tensor = as_dtensor(tensor.to(self.device), shape, self.fixed[name], self.mesh, self.device_mesh)
        self._check_mesh(name, tensor)
        with watch.collective(f"the parts of {name}"):
            return tensor.full_tensor()
