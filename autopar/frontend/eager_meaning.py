"""Give a few methods of tensors their eager meaning, in a way that a trace keeps.

`parameter.requires_grad_(False)` keeps gradients from what is computed with it afterwards, which a trace forgets, since
it is no op. Hooks of tensors, backwards inside of a forward and generators of its own would serve once, while tracing,
and are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from unittest import mock

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError

_REQUIRES_GRAD = Tensor.requires_grad
_STANDS_IN = "_autopar_stands_in"
_REFUSED: dict[Callable, tuple[str, str]] = {
    Tensor.register_hook: ("a hook of a tensor", "write what the hook does as a torch.autograd.Function"),
    Tensor.retain_grad: ("retain_grad", "return the tensor, and call torch.autograd.grad outside of the model"),
    Tensor.backward: ("backward", "compute gradients outside of the model"),
    Tensor.register_post_accumulate_grad_hook: (
        "a hook of a gradient",
        "register it on the parameters of the compiled model",
    ),
}


class EagerMeaning(TorchFunctionMode):
    """Inside, methods of tensors in the forward of `model` mean what they mean in eager torch."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model
        self._frozen: dict[int, tuple[Tensor, Tensor]] = {}  # what stands for a parameter, and the parameter
        self._stack = ExitStack()

    def __enter__(self):
        for name in ("grad", "backward"):
            self._stack.enter_context(mock.patch.object(torch.autograd, name, _refused_gradient))
        self._has_gradients = torch.is_grad_enabled()
        return super().__enter__()

    def __exit__(self, kind, error, trace) -> None:
        super().__exit__(kind, error, trace)
        self._stack.close()
        for stand_in, parameter in self._frozen.values():
            self._replace(stand_in, parameter)
        if kind is None and self._frozen:
            name = next(
                name for name, p in self.model.named_parameters() if any(p is q for _, q in self._frozen.values())
            )
            raise CaptureError(
                f"the forward freezes {name} and leaves it so",
                fix="freeze it before compiling, or let it train again afterwards",
            )

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = getattr(function, "__name__", "")
        if name in ("__get__", "__set__"):
            if name == "__set__" and getattr(function, "__self__", None) is _REQUIRES_GRAD:
                self._set_trainable(args[0], bool(args[1]))
                return None
        elif function is Tensor.requires_grad_:
            return self._set_trainable(args[0], bool(args[1] if len(args) > 1 else kwargs.get("requires_grad", True)))
        elif function is torch._C._set_grad_enabled:
            if args[0] and not self._has_gradients:
                raise CaptureError(
                    "the forward switches gradients on inside of a call without gradients",
                    fix="call the model with gradients",
                )
        elif kwargs.get("generator") is not None:
            raise CaptureError(
                f"the forward draws random numbers from a generator of its own ({name})",
                fix="leave generator= out: a compiled model draws from a counter that is the same on every rank",
            )
        elif name == "_pack_padded_sequence":
            raise CaptureError(
                "the forward packs sequences by their lengths, which are values of a tensor: how many steps a "
                "recurrent layer takes depends on them",
                fix="run the layer on the padded sequences, and mask what is behind their ends (a bidirectional one "
                "takes each sequence turned by torch.gather); or keep the layer in a model that is not compiled",
            )
        elif function in _REFUSED:
            what, fix = _REFUSED[function]
            raise CaptureError(f"the forward calls {what}, which would run once, while it is traced", fix=fix)
        return function(*args, **kwargs)

    def _set_trainable(self, tensor: Tensor, trains: bool) -> Tensor:
        """Return the tensor that stands for this one from here on."""
        if id(tensor) in self._frozen:
            stand_in, parameter = self._frozen[id(tensor)]
            if trains:
                del self._frozen[id(tensor)]
                self._replace(stand_in, parameter)
                return parameter
            return tensor
        is_parameter = any(tensor is p for m in self.model.modules() for p in m._parameters.values())
        if not is_parameter:
            return tensor.requires_grad_(trains) if tensor.is_leaf else tensor
        if trains == tensor.requires_grad:
            return tensor
        if trains:
            raise CaptureError(
                "the forward lets a frozen parameter train",
                fix="set requires_grad before compiling, and use detach() in the forward",
            )
        stand_in = tensor.detach()
        setattr(stand_in, _STANDS_IN, True)
        self._frozen[id(stand_in)] = stand_in, tensor
        self._replace(tensor, stand_in)
        return stand_in

    def _replace(self, old: Tensor, new: Tensor) -> None:
        for module in self.model.modules():
            for name, value in module._parameters.items():
                if value is old:
                    module._parameters[name] = new


def is_stand_in(tensor: Tensor | None) -> bool:
    """Return whether a tensor stands for a parameter that the forward has frozen."""
    return hasattr(tensor, _STANDS_IN)


def _refused_gradient(*args, **kwargs):
    raise CaptureError(
        "the forward takes a gradient (torch.autograd.grad), which would be a constant in its graph",
        fix="compute derivatives outside of the model, or write them as ops of the forward",
    )
