"""A call of the user's module as a function of flat tensors, which is what is traced."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from .. import _torch
from .._torch import tree_flatten, tree_map
from ..errors import InputError
from .call_signature import CallSignature, LossOutput, Returns
from .cumulative_average import traced_cumulative_average
from .eager_meaning import EagerMeaning
from .effects import TensorTables, effects_of
from .fake_parameters import Held, refreshed
from .idioms import traced_idioms
from .no_cache import Unwanted, keeps_cache, marked
from .open_numbers import TracedNumber
from .precision import computing_in, narrowed, upcast
from .watch import Watch

ROOT = "model"  # name of the user's module inside the traced wrapper


class Found:
    """Names that turn up while a call is traced: in no container, of which torch puts the contents back afterwards."""

    def __init__(self) -> None:
        self.names: frozenset[str] = frozenset()

    def add(self, name: str) -> None:
        """Note a name."""
        self.names |= {name}


class FlatCall(nn.Module):
    """The user's module as a function of flat tensors; without a cache, which training never reads. `dtype` is what it
    computes in (see autopar/frontend/precision.py), None for its own types; `as_eager`: the module does not learn that
    it is being traced; `loss_alone`: a loss that requires a gradient is the only output that has one; `with_gradients`:
    whether the call is made where gradients are recorded. `watch` sees what the forward reads and leaves in the
    module's attributes, which is a part of the call then; without one, the module just runs."""

    def __init__(
        self,
        model: nn.Module,
        signature: CallSignature,
        returns: Returns,
        loss_fn: Callable | None,
        dtype: torch.dtype | None = None,
        loss_alone: bool = True,
        held: Sequence[Held] = (),
        watch: Watch | None = None,
    ):
        super().__init__()
        self.add_module(ROOT, model)
        self.signature, self.returns, self.loss_fn, self.dtype, self.held = signature, returns, loss_fn, dtype, held
        self.as_eager, self.loss_alone, self.watch, self.with_gradients = False, loss_alone, watch, True
        self.numbers_read = Found()

    def forward(self, *tensors):
        """Call the model on the tensors of the signature, in their order, and return its output flat."""
        numbers = self.signature.open_numbers
        leaves = [
            TracedNumber(numbers[name].value, x, partial(self.numbers_read.add, name)) if name in numbers else x
            for name, x in zip(self.signature.tensor_names, tensors)
        ]
        with computing_in(getattr(self, ROOT), self.dtype), refreshed(self.held), _torch.as_if_eager(self.as_eager):
            return self._call(*self.signature.rebuild(leaves))

    def _call(self, args: tuple, kwargs: dict):
        model = getattr(self, ROOT)
        loss_kwargs = {}
        if self.loss_fn is not None:
            kwargs, loss_kwargs = _route(model.forward, self.loss_fn, kwargs)
        if keeps_cache(model) and "use_cache" not in kwargs:
            kwargs = {**kwargs, "use_cache": Unwanted()}
        args, kwargs = tree_map(lambda x: narrowed(x, self.dtype), (args, kwargs))
        with self._seen() as leaves:
            output = marked(model, kwargs, model(*args, **kwargs))
            if self.loss_fn is not None:
                output = LossOutput(self.loss_fn(output, **loss_kwargs), output)
            outputs = self.returns.take_apart(output)
            leaves(outputs)
        self.returns.differentiable = [o.requires_grad for o in outputs[: self.returns.count]]
        if (at := self.returns.loss) is not None:
            wide = outputs[at] if self.dtype is None else upcast(outputs[at])
            wanted = self.returns.differentiable
            # of a frozen model something may train later
            self.returns.loss_alone = self.loss_alone and (wanted[at] or not any(wanted))
            outputs = [wide if i == at else o.detach() if self.returns.loss_alone else o for i, o in enumerate(outputs)]
        inputs = [x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor)]
        return tuple(_apart(outputs, [*model.parameters(), *inputs]))

    @contextmanager
    def _seen(self) -> Iterator[Callable[[list[Tensor]], None]]:
        """Watch what runs inside. Yields a function that appends what the run leaves in attributes to its outputs, to
        be called last. Afterwards the module's attributes are as they were."""
        if self.watch is None:
            yield lambda outputs: None
            return
        model = self.watch.model  # while torch traces, submodules are reached through others that stand for them
        tables = TensorTables(model)

        def leave(outputs: list[Tensor]) -> None:
            self.returns.own_buffers = _own_buffers(model, outputs)
            values, others = tables.replaced(casts=self.dtype is not None)
            self.returns.effects = effects_of(self.watch, others, outputs, self.returns.names)
            self.returns.count = len(outputs)
            self.returns.buffers = {len(outputs) + i: name for i, name in enumerate(values)}
            outputs += values.values()

        try:
            with torch.set_grad_enabled(self.with_gradients), traced_idioms(), traced_cumulative_average():
                with EagerMeaning(model), self.watch.run():
                    yield leave
        finally:
            self.watch.undo()
            tables.undo()


def _own_buffers(model: nn.Module, outputs: list[Tensor]) -> dict[int, tuple[nn.Module, str]]:
    """Return where the buffers are that the model returns themselves, by the positions of the outputs."""
    buffers = {
        id(b): (module, leaf) for module in model.modules() for leaf, b in module._buffers.items() if b is not None
    }
    return {at: buffers[id(output)] for at, output in enumerate(outputs) if id(output) in buffers}


def _apart(outputs: list[Tensor], leaves: Iterable[Tensor]) -> list[Tensor]:
    """Return the outputs, each in memory of its own if it has a gradient: torch traces no gradient through an output
    that is a view of a parameter, an input or another output."""
    taken, result = {_torch.storage_key(p) for p in leaves}, []
    for output in outputs:
        if output.requires_grad and _torch.storage_key(output) in taken:
            output = output.clone()
        taken.add(_torch.storage_key(output))
        result.append(output)
    return result


def _route(forward: Callable, loss_fn: Callable, kwargs: dict) -> tuple[dict, dict]:
    """Split the keyword arguments of the call: they go to the loss function if it takes them and to the model if that
    takes them. Raises InputError for one that neither takes."""
    model_takes, loss_takes = inspect.signature(forward).parameters, dict(inspect.signature(loss_fn).parameters)
    loss_takes.pop(next(iter(loss_takes), None), None)  # the output
    is_open, loss_is_open = (any(p.kind is p.VAR_KEYWORD for p in t.values()) for t in (model_takes, loss_takes))
    to_loss = {k: v for k, v in kwargs.items() if k in loss_takes or (loss_is_open and k not in model_takes)}
    to_model = {k: v for k, v in kwargs.items() if k in model_takes or (is_open and k not in to_loss)}
    if unknown := next((k for k in kwargs if k not in to_loss and k not in to_model), None):
        taken = ", ".join(dict.fromkeys((*model_takes, *loss_takes)))
        raise InputError(f"neither the model nor loss_fn takes {unknown}", fix=f"pass some of {taken}")
    return to_model, to_loss
