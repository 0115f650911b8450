"""A module with fake parameters for as long as it is traced.

Tracing reads shapes only. With fake tensors on one device in place of its parameters, a model gives the same graph
whether its own are on the meta device, on a GPU or already taken over; nothing of the graph holds on to their memory;
and a precision can be tried without casting a weight. Where parameters and buffers belong is recorded before a model is
taken over, so that a rank that keeps only some of them can still trace all.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from .. import _torch
from ..errors import MovedParameterError
from ..ops.counter_rng import contiguous_strides
from .user_lines import line_now

DEVICE = torch.device("cpu")


@dataclass(frozen=True)
class Form:
    """Hold what tracing needs to know of a parameter or buffer."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    trainable: bool


@dataclass(frozen=True)
class Tables:
    """Say where the tensors of one module belong: the first qualified name of each, by the name that the module itself
    has for it; None for a parameter or buffer that is None."""

    module: nn.Module
    parameters: dict[str, str | None]
    buffers: dict[str, str | None]


@dataclass(frozen=True)
class Held:
    """A place in a list or dict of a module that holds one of its parameters or buffers beside the table, as torch's
    recurrent layers do: `container[key]` is what `owner` has as `leaf`."""

    container: list | dict
    key: object
    owner: nn.Module
    leaf: str

    def refresh(self) -> None:
        """Put into the container what the table has now."""
        self.container[self.key] = getattr(self.owner, self.leaf)


class Forms(dict[str, Form]):
    """The form of every parameter under its first name. `buffers`: the same of buffers; `tables`: where all of them
    belong; `held`: where else they are; `left`: values of buffers that this rank does not keep and no state dict has;
    `all_names`: of parameters, each with its first name."""

    def __init__(
        self,
        parameters: Mapping[str, Form],
        buffers: Mapping[str, Form],
        tables: tuple[Tables, ...],
        held: tuple[Held, ...],
    ):
        super().__init__(parameters)
        self.buffers, self.tables, self.held = dict(buffers), tables, held
        self.left: dict[str, Tensor] = {}
        self.all_names: dict[str, str] = {}

    @property
    def saved_buffers(self) -> set[str]:
        """Return the first names of the buffers that a state dict holds."""
        return {
            name
            for t in self.tables
            for leaf, name in t.buffers.items()
            if name is not None and leaf not in t.module._non_persistent_buffers_set
        }

    def without_gradients(self) -> Forms:
        """Return the same forms, none of which trains."""
        return self.training(dict.fromkeys(self, False))

    def training(self, trains: Mapping[str, bool]) -> Forms:
        """Return the same forms, of which those named in `trains` train or do not."""
        changed = {name: replace(form, trainable=trains.get(name, form.trainable)) for name, form in self.items()}
        forms = Forms(changed, self.buffers, self.tables, self.held)
        forms.left, forms.all_names = self.left, self.all_names
        return forms

    def copy_of(self, model: nn.Module, tensors: Mapping[str, Tensor]) -> nn.Module:
        """Return a copy of `model`, whose forms these are, that has these tensors by first name; they are not
        copied."""
        with self.installed(tensors), refreshed(self.held):
            plain = copy.deepcopy(model, {id(tensor): tensor for tensor in tensors.values()})
        for module in plain.modules():
            own = vars(module)
            own["_parameters"], own["_buffers"] = dict(module._parameters), dict(module._buffers)
            hooks = module._forward_pre_hooks
            for key in [key for key, hook in hooks.items() if isinstance(hook, CallRefusal)]:
                del hooks[key]
        return plain

    @contextmanager
    def installed(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Put `tensors`, by first name, everywhere where they belong. Afterwards everything is as it was."""
        tables = [
            (table, names)
            for t in self.tables
            for table, names in ((t.module._parameters, t.parameters), (t.module._buffers, t.buffers))
        ]
        before = [dict(table) for table, _ in tables]
        try:
            for table, names in tables:
                present = dict(table)
                table.clear()
                table.update(
                    {leaf: present.get(leaf) if name is None else tensors[name] for leaf, name in names.items()}
                )
                table.update({leaf: value for leaf, value in present.items() if leaf not in names})
            yield
        finally:
            for (table, _), values in zip(tables, before):
                table.clear()
                table.update(values)


@contextmanager
def refreshed(held: Iterable[Held]) -> Iterator[None]:
    """Inside, lists and dicts that hold parameters hold those that the tables have now."""
    before = [(h, h.container[h.key]) for h in held]
    try:
        for h, _ in before:
            h.refresh()
        yield
    finally:
        for h, value in before:
            h.container[h.key] = value


def _held_by(model: nn.Module) -> tuple[Held, ...]:
    """Find the parameters and buffers of `model` in the lists and dicts of its modules."""
    owners: dict[int, tuple[nn.Module, str]] = {}
    for module in model.modules():
        for leaf, tensor in (*module._parameters.items(), *module._buffers.items()):
            owners.setdefault(id(tensor), (module, leaf))
    found: list[Held] = []

    def search(container: list | dict) -> None:
        for key, value in enumerate(container) if isinstance(container, list) else container.items():
            if isinstance(value, Tensor) and id(value) in owners:
                found.append(Held(container, key, *owners[id(value)]))
            elif type(value) in (list, dict):
                search(value)

    for module in model.modules():
        for name, value in vars(module).items():
            if type(value) in (list, dict) and name not in ("_parameters", "_buffers"):
                search(value)
    return tuple(found)


def forms_of(model: nn.Module) -> Forms:
    """Return the form of every parameter of `model` under its first name, and where its tensors belong."""
    parameters = {name: Form(tuple(p.shape), p.dtype, p.requires_grad) for name, p in model.named_parameters()}
    buffers = {name: Form(tuple(b.shape), b.dtype, False) for name, b in model.named_buffers()}
    first = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    tables = tuple(
        Tables(
            module,
            *({leaf: first.get(id(x)) for leaf, x in table.items()} for table in (module._parameters, module._buffers)),
        )
        for module in model.modules()
    )
    forms = Forms(parameters, buffers, tables, _held_by(model))
    forms.all_names = {name: first[id(p)] for name, p in model.named_parameters(remove_duplicate=False)}
    return forms


def fake(mode, shape, dtype: torch.dtype) -> Tensor:
    """Return a fake tensor of `mode`, which has no memory."""
    stride = contiguous_strides([max(size, 1) for size in shape])
    return _torch.fake_tensor(mode, tuple(shape), stride, 0, dtype, DEVICE)


def attributes_of(module: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that are plain attributes of a module: to a graph they are buffers that no state dict has."""
    return {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}


def buffers_of(model: nn.Module) -> dict[str, Tensor]:
    """Return the buffers of a model and the tensors that are plain attributes of its modules, by their first names."""
    found: dict[int, tuple[str, Tensor]] = {}
    for path, module in model.named_modules():
        for leaf, tensor in (*module._buffers.items(), *attributes_of(module).items()):
            if tensor is not None and not isinstance(tensor, nn.Parameter):
                found.setdefault(id(tensor), (f"{path}.{leaf}" if path else leaf, tensor))
    return dict(found.values())


@contextmanager
def _attributes_as_buffers(
    model: nn.Module, mode, parameters: Mapping[int, Tensor], with_values: bool
) -> Iterator[set[str]]:
    """Inside, tensors that are plain attributes are in the tables of the modules, on the CPU, and fake unless they are
    `with_values`. Gives the names of those that require a gradient."""
    moved: list[tuple[nn.Module, dict[str, Tensor]]] = []
    made: dict[int, Tensor] = {}
    with_gradient: set[str] = set()
    for path, module in model.named_modules():
        attributes = attributes_of(module)
        for leaf, tensor in attributes.items():
            if tensor.requires_grad and id(tensor) not in parameters:
                with_gradient.add(f"{path}.{leaf}" if path else leaf)
            if id(tensor) not in made:
                is_fake = hasattr(tensor, "full_tensor") or tensor.is_meta or not with_values
                value = fake(mode, tensor.shape, tensor.dtype) if is_fake else tensor.detach().to(DEVICE)
                made[id(tensor)] = parameters.get(id(tensor), value)
        if attributes:
            moved.append((module, attributes))
    try:
        for module, attributes in moved:
            for leaf, tensor in attributes.items():
                del vars(module)[leaf]
                table = module._parameters if id(tensor) in parameters else module._buffers
                table[leaf] = made[id(tensor)]
                if table is module._buffers:
                    module._non_persistent_buffers_set.add(leaf)
        yield with_gradient
    finally:
        for module, attributes in moved:
            for leaf, tensor in attributes.items():
                module._buffers.pop(leaf, None), module._parameters.pop(leaf, None)
                module._non_persistent_buffers_set.discard(leaf)
                vars(module)[leaf] = tensor


@contextmanager
def fake_state(model: nn.Module, mode, forms: Mapping[str, Form], with_values: bool = True) -> Iterator[set[str]]:
    """Inside, the parameters of `model` are fake tensors of these forms, and its buffers are on the CPU (fake if they
    are meta or not on this rank, or not `with_values`), as are tensors that are plain attributes. Shared ones stay
    shared. Gives the names of buffers and attributes that require a gradient. Afterwards everything is as it was."""
    where = forms if isinstance(forms, Forms) else forms_of(model)
    tensors: dict[str, Tensor] = {}
    for name in where:
        tensors[name] = nn.Parameter(fake(mode, forms[name].shape, forms[name].dtype), forms[name].trainable)
    here = {
        name: buffer
        for t in where.tables
        for leaf, name in t.buffers.items()
        if (buffer := t.module._buffers.get(leaf)) is not None
    }
    for name, form in where.buffers.items():
        buffer = here.get(name, where.left.get(name))
        is_fake = buffer is None or buffer.is_meta or not with_values
        tensors[name] = fake(mode, form.shape, form.dtype) if is_fake else buffer.detach().to(DEVICE)
    carried = {name for name, buffer in here.items() if buffer.requires_grad}
    global _tracing
    owned = {
        id(value): tensors[name]
        for t in where.tables
        for table, names in ((t.module._parameters, t.parameters), (t.module._buffers, t.buffers))
        for leaf, name in names.items()
        if name is not None and (value := table.get(leaf)) is not None
    }
    calls = [(vars(m), vars(m).pop(_CALL)) for m in model.modules() if _CALL in vars(m)]  # layers run as they are
    with where.installed(tensors), _attributes_as_buffers(model, mode, owned, with_values) as with_gradient:
        _tracing += 1
        try:
            yield with_gradient | carried
        finally:
            _tracing -= 1
            for own, call in calls:
                own[_CALL] = call


_CALL = "_compiled_call_impl"  # what nn.Module.__call__ calls in the place of the forward and its hooks
_tracing = 0


def is_tracing() -> bool:
    """Return whether a model is being traced."""
    return _tracing > 0


class CallRefusal:
    """A hook of every module that was taken over: they are called when the model is traced, and by nobody else."""

    def __call__(self, module: nn.Module, args: tuple) -> None:
        if not _tracing:
            raise MovedParameterError(
                f"this {type(module).__name__} was taken over by autopar.compile and has parts of its parameters alone",
                source=line_now(),
                fix="call the module that compile returned",
            )


def tie_map(model: nn.Module) -> dict[str, str]:
    """Map every qualified name of a parameter or buffer to the first name of the same tensor."""
    first: dict[int, str] = {}
    ties = {}
    for named in (model.named_parameters(remove_duplicate=False), model.named_buffers(remove_duplicate=False)):
        for name, tensor in named:
            ties[name] = first.setdefault(id(tensor), name)
    return ties
