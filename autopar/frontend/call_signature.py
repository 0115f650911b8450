"""Describe how a module is called and what it returns, as flat lists of tensors.

A traced graph takes tensors and gives tensors. `CallSignature` takes a user's (args, kwargs) apart and tells whether a
later call has the same form; `Returns` puts outputs back into the object that the model returns (a dataclass, a
transformers ModelOutput, nested containers), the loss first if there is one.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch
from torch import nn

from .._torch import tree_flatten, tree_unflatten
from ..errors import CaptureError, InputError
from .constants import text_of, value_of
from .effects import Effect, Refill, Slot
from .no_cache import NoCache
from .open_numbers import OpenNumber, plain

_PLAIN = (
    bool,
    int,
    float,
    complex,
    str,
    bytes,
    enum.Enum,
    torch.dtype,
    torch.device,
    torch.Size,
    NoCache,
)  # constants of an output


def split_example(example_inputs) -> tuple[tuple, dict]:
    """Return `(args, kwargs)` of an example, which is a dict of keyword arguments, an (args, kwargs) pair, a tuple, or
    one tensor. Raises InputError for anything else."""
    if isinstance(example_inputs, Mapping):
        return (), dict(example_inputs)
    if isinstance(example_inputs, (tuple, list)):
        pair = tuple(example_inputs)
        if len(pair) == 2 and isinstance(pair[0], (tuple, list)) and isinstance(pair[1], Mapping):
            return tuple(pair[0]), dict(pair[1])
        return pair, {}
    if isinstance(example_inputs, torch.Tensor):
        return (example_inputs,), {}
    raise InputError(
        f"example_inputs must be a dict, a tuple or an (args, kwargs) pair, got {type(example_inputs).__name__}",
        fix="pass the batch as you pass it to the model, such as dict(input_ids=ids, labels=ids)",
    )


@dataclass
class CallSignature:
    """The structure of one call: tensors are inputs of the graph, everything else is a constant of it."""

    spec: object
    names: tuple[str, ...]  # one a leaf, for messages: "input_ids", "args[0]"
    constants: tuple  # one a leaf; Ellipsis where a tensor goes
    shapes: tuple[tuple[int, ...] | None, ...]  # global
    dtypes: tuple[torch.dtype | None, ...]
    differentiated: tuple[bool, ...]  # whether the call computes a gradient for the leaf
    values: tuple = ()  # of the constants, as they were at that call (see constants.py)
    numbers: tuple[OpenNumber | None, ...] = ()  # one a leaf, of floats that are tensors for the graph

    @staticmethod
    def of(args: tuple, kwargs: dict) -> tuple[CallSignature, list[torch.Tensor]]:
        """Return the signature of a call and its tensors. Raises InputError for a tensor that is empty or sparse."""
        leaves, spec = tree_flatten((args, kwargs))
        numbers = tuple(x if isinstance(x, OpenNumber) else None for x in leaves)
        leaves = [x if number is None else number.tensor() for x, number in zip(leaves, numbers)]
        is_tensor = [isinstance(x, torch.Tensor) for x in leaves]
        signature = CallSignature(
            spec,
            tuple(leaf_names(args, kwargs)),
            tuple(... if t else x for x, t in zip(leaves, is_tensor)),
            tuple(tuple(x.shape) if t else None for x, t in zip(leaves, is_tensor)),
            tuple(x.dtype if t else None for x, t in zip(leaves, is_tensor)),
            tuple(t and needs_gradient(x) for x, t in zip(leaves, is_tensor)),
            tuple(None if t else value_of(x, n) for x, t, n in zip(leaves, is_tensor, leaf_names(args, kwargs))),
            numbers,
        )
        tensors = [x for x, t in zip(leaves, is_tensor) if t]
        for name, x in zip(signature.tensor_names, tensors):
            if not x.numel():
                raise InputError(f"{name} is empty", shape=tuple(x.shape), fix="pass at least one sample")
            if x.layout != torch.strided:
                raise InputError(f"{name} is a sparse tensor ({x.layout})", fix=f"pass {name}.to_dense()")
        return signature, tensors

    @property
    def samples(self) -> int:
        """Return dim 0 of the first tensor that has dims, 1 if none has."""
        return next((shape[0] for shape in self.shapes if shape), 1)

    @cached_property
    def tensor_names(self) -> list[str]:
        """Return the names of the arguments that are tensors, in their order."""
        return [n for n, c in zip(self.names, self.constants) if c is ...]

    @cached_property
    def differentiated_names(self) -> list[str]:
        """Return the names of the leaves for which the call computes a gradient."""
        return [name for name, wanted in zip(self.names, self.differentiated) if wanted]

    @cached_property
    def keywords(self) -> list[str]:
        """Return the names of the keyword arguments, in the order of the compiled call."""
        return list(self.rebuild([None] * len(self.tensor_names))[1])

    @cached_property
    def open_numbers(self) -> dict[str, OpenNumber]:
        """Return the floats that are tensors for the graph, by name."""
        return {name: number for name, number in zip(self.names, self.numbers) if number is not None}

    def keeping_open(self, names: Collection[str]) -> CallSignature:
        """Return the signature in which no other floats than those of these names are tensors."""
        if set(self.open_numbers) <= set(names):
            return self
        leaves = [n if n is not None else c for n, c in zip(self.numbers, self.constants)]
        leaves = [x.value if isinstance(x, OpenNumber) and n not in names else x for n, x in zip(self.names, leaves)]
        is_closed = [isinstance(x, float) and number is not None for x, number in zip(leaves, self.numbers)]

        def without(values: tuple, closed: Callable = lambda x, name: None) -> tuple:
            return tuple(closed(x, n) if c else v for x, n, c, v in zip(leaves, self.names, is_closed, values))

        return replace(
            self,
            constants=without(self.constants, lambda x, name: x),
            shapes=without(self.shapes),
            dtypes=without(self.dtypes),
            differentiated=without(self.differentiated, lambda x, name: False),
            values=without(self.values, value_of),
            numbers=without(self.numbers),
        )

    def other_numbers(self, other: CallSignature) -> set[str]:
        """Return the names of the floats of a call that have any value, or another one, in a call of the same form."""
        if (self.spec, self.names) != (other.spec, other.names):
            return set()
        mine, theirs = zip(self.constants, self.values), zip(other.constants, other.values, other.numbers)
        return {
            name
            for name, (x, value), (y, before, number) in zip(self.names, mine, theirs)
            if type(x) is float and (number is not None or type(y) is float and value != before)
        }

    def shape_of(self, name: str) -> tuple[int, ...] | None:
        """Return the global shape of the leaf of this name, None if it is not a tensor."""
        return self.shapes[self.names.index(name)]

    def rebuild(self, tensors) -> tuple[tuple, dict]:
        """Return `(args, kwargs)` with the given tensors in place."""
        it = iter(tensors)
        return tree_unflatten([next(it) if c is ... else c for c in self.constants], self.spec)

    def match(self, args: tuple, kwargs: dict, parts: tuple | None = None) -> list[torch.Tensor] | None:
        """Return the tensors of another call if it has this form, None if not. `parts` gives the shapes of tensors that
        are not DTensors, if these are not the global ones (local inputs)."""
        if list(kwargs) != self.keywords and kwargs.keys() == set(self.keywords):
            kwargs = {name: kwargs[name] for name in self.keywords}  # in the order they were compiled in
        leaves, spec = tree_flatten((args, kwargs))
        if len(leaves) != len(self.constants) or spec != self.spec:
            return None
        tensors = []
        for name, leaf, constant, value, whole, part, dtype, differentiated, number in zip(
            self.names,
            leaves,
            self.constants,
            self.values,
            self.shapes,
            parts or self.shapes,
            self.dtypes,
            self.differentiated,
            self.numbers,
        ):
            if constant is ...:
                if type(leaf) is float and number is not None:
                    tensors.append(torch.tensor(leaf, dtype=dtype))
                    continue
                if number is not None or not isinstance(leaf, torch.Tensor) or leaf.dtype != dtype:
                    return None
                if needs_gradient(leaf) != differentiated:
                    return None
                if leaf.shape != (whole if hasattr(leaf, "placements") else part):
                    return None
                tensors.append(leaf)
            elif isinstance(leaf, torch.Tensor) or value_of(leaf, name) != value:
                return None
        return tensors


def describe_call(args: tuple, kwargs: dict) -> str:
    """Describe a call's arguments by name: `x (4, 6), scale=2.0`, with the dtype of tensors that are neither float32
    nor int64, and `with gradient` if the call computes one."""
    words = []
    for name, leaf in sorted(zip(leaf_names(args, kwargs), tree_flatten((args, kwargs))[0])):
        if isinstance(leaf, torch.Tensor):
            usual = leaf.dtype in (torch.float32, torch.int64)
            dtype = "" if usual else f" {str(leaf.dtype).removeprefix('torch.')}"
            words.append(f"{name} {tuple(leaf.shape)}{dtype}" + (" with gradient" if needs_gradient(leaf) else ""))
        elif isinstance(leaf, OpenNumber):
            words.append(f"{name}=any float")
        else:
            words.append(f"{name}={text_of(leaf)}")
    return ", ".join(words) or "nothing"


def needs_gradient(tensor: torch.Tensor) -> bool:
    """Return whether autograd records a call that takes the tensor, for the tensor's own sake."""
    return tensor.requires_grad and torch.is_grad_enabled()


def leaf_names(args: tuple, kwargs: dict) -> list[str]:
    """Return a name for each leaf of a call, in the order of its flat form: "input_ids", "args[0]", "batch.1"."""
    names = []
    for prefix, tree in [(f"args[{i}]", a) for i, a in enumerate(args)] + list(kwargs.items()):
        count = len(tree_flatten(tree)[0])
        names += [prefix] if count == 1 else [f"{prefix}.{i}" for i in range(count)]
    return names


@dataclass
class Returns:
    """Form of a model's output. `position` of a tensor is its place among the flat outputs of the graph. `effects`:
    what a call leaves in attributes of the model (see autopar/frontend/effects.py), from outputs behind those of the
    model."""

    template: object = None  # the output with Slot(position) in place of tensors
    count: int = 0
    loss: int | None = None  # position of the scalar loss
    loss_alone: bool = False  # whether the graph detaches the other outputs
    names: list[str] = field(default_factory=list)
    differentiable: list[bool] = field(default_factory=list)  # whether the output requires a gradient in eager torch
    effects: list[Effect | Refill] = field(default_factory=list)
    own_buffers: dict[int, tuple[nn.Module, str]] = field(default_factory=dict)  # outputs that are buffers themselves
    buffers: dict[int, str] = field(default_factory=dict)  # outputs behind the others that are new values of buffers

    @property
    def outputs(self) -> tuple[int, int | None, list[bool]]:
        """Return what a program knows of its outputs: how many there are, which is the loss, which require a
        gradient."""
        return self.count, self.loss, self.differentiable

    def only(self, positions: Sequence[int]) -> Returns:
        """Return what a forward returns that has but these outputs of the graph; how to rebuild the model's is left
        out."""
        new = {position: i for i, position in enumerate(positions)}
        kept = [position for position in positions if position < self.count]
        return Returns(
            count=len(kept),
            loss=None if self.loss is None else new[self.loss],
            loss_alone=self.loss_alone,
            names=[self.names[position] for position in kept],
            differentiable=[self.differentiable[position] for position in kept],
            buffers={new[position]: name for position, name in self.buffers.items() if position in new},
        )

    def take_apart(self, output) -> list[torch.Tensor]:
        """Flatten an output while tracing, and remember how to rebuild it."""
        tensors: list[torch.Tensor] = []
        self.names = []

        def walk(value, name):
            value = plain(value)
            if isinstance(value, torch.Tensor):
                tensors.append(value)
                self.names.append(name or "output")
                return Slot(len(tensors) - 1)
            if dataclasses.is_dataclass(value) and not isinstance(value, type):
                fields = {f.name: getattr(value, f.name, None) for f in dataclasses.fields(value)}
                return Built(type(value), {k: walk(v, f"{name}.{k}".lstrip(".")) for k, v in fields.items()})
            if isinstance(value, Mapping):
                items = {k: walk(v, f"{name}.{k}".lstrip(".")) for k, v in value.items()}
                return items if type(value) is dict or not hasattr(value, "clear") else Refilled(_emptied(value), items)
            if isinstance(value, tuple) and hasattr(value, "_fields"):
                return Built(type(value), {k: walk(v, f"{name}.{k}".lstrip(".")) for k, v in value._asdict().items()})
            if isinstance(value, (tuple, list)):
                return type(value)(walk(v, f"{name}[{i}]") for i, v in enumerate(value))
            if value is not None and not isinstance(value, _PLAIN):
                raise CaptureError(
                    f"the model returns a {type(value).__name__}{f' as {name}' if name else ''}, which may hold "
                    f"tensors",
                    fix="return tensors in a dict, tuple, list or dataclass, and call with use_cache=False",
                )
            return value

        self.template = walk(output, "")
        self.count = len(tensors)
        if not tensors:
            raise CaptureError("the model returns no tensor", fix="return the loss, or outputs to compute one from")
        self.loss = self._find_loss(output, tensors)
        return tensors

    @staticmethod
    def _find_loss(output, tensors) -> int | None:
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if isinstance(output, torch.Tensor):
            loss = output
        if isinstance(loss, torch.Tensor) and loss.dim() == 0:
            return next(i for i, t in enumerate(tensors) if t is loss)
        return None

    def rebuild(self, tensors):
        """Return the model's output object with the given tensors, and give attributes the values that the call leaves
        in them."""
        for effect in self.effects:
            effect.apply(tensors)
        if self.own_buffers:
            own = {
                at: getattr(module, leaf) for at, (module, leaf) in self.own_buffers.items() if hasattr(module, leaf)
            }
            tensors = [own.get(at, tensor) for at, tensor in enumerate(tensors)]
        return _filled(self.template, tensors)


def _filled(value, tensors):
    """Return a template with the tensors in its slots. It is no nested function: one that calls itself would keep
    them until garbage is collected."""
    if isinstance(value, Slot):
        return tensors[value.position]
    if isinstance(value, Built):
        return value.make({k: _filled(v, tensors) for k, v in value.fields.items()})
    if isinstance(value, Refilled):
        made = copy.copy(value.empty)
        made.update({k: _filled(v, tensors) for k, v in value.items.items()})
        return made
    if isinstance(value, dict):
        return {k: _filled(v, tensors) for k, v in value.items()}
    if isinstance(value, (tuple, list)):
        return type(value)(_filled(v, tensors) for v in value)
    return value


def _emptied(mapping: Mapping) -> Mapping:
    """Return a mapping of the same kind without items."""
    empty = copy.copy(mapping)
    empty.clear()
    return empty


@dataclass(frozen=True)
class Refilled:
    """A mapping of another class than dict (an OrderedDict, a defaultdict)."""

    empty: Mapping
    items: dict


@dataclass(frozen=True)
class Built:
    """A dataclass or named tuple, made from the fields that its class takes."""

    cls: type
    fields: dict

    @cached_property
    def arguments(self) -> list[str]:
        """Return the names of the fields that the class is made from."""
        taken = inspect.signature(self.cls).parameters
        return [name for name in self.fields if name in taken]

    def make(self, values: dict):
        """Make an instance of the class from those of the values that it takes."""
        return self.cls(**{name: values[name] for name in self.arguments})


@dataclass
class LossOutput:
    """The result of a model compiled with `loss_fn=`: the loss and the model's own output."""

    loss: torch.Tensor
    output: object
