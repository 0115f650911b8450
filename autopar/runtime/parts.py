"""A layer of the compiled model that is called by itself: `model.encoder(x)`, also from a method of the model.

It is a call of the model whose forward is that layer's: traced with the same parameters, planned with their layouts,
one capture for each layer and form of call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

from torch import nn

from .. import _torch
from ..errors import AutoparError
from ..frontend.fake_parameters import CallRefusal, is_tracing
from ..frontend.user_lines import line_now
from .source_attributes import OfSource

CALL = "_compiled_call_impl"  # what nn.Module.__call__ calls in the place of the forward and its hooks


def install(module: OfSource) -> None:
    """Let the layers of a compiled module run as its parts when they are called."""
    for name, layer in module._source.named_modules():
        if name and not isinstance(layer, OfSource):
            vars(layer)[CALL] = _call_of(module, name, layer)


def _call_of(module: OfSource, name: str, layer: nn.Module) -> Callable:
    @functools.wraps(layer.forward)
    def forward(*args, **kwargs):
        return layer(*args, **kwargs)

    forward.__qualname__ = name  # in the text of the call

    def call(*args, **kwargs):
        if is_tracing():
            return layer._call_impl(*args, **kwargs)
        if not _can_run_parts(module):
            CallRefusal()(layer, args)
        own = vars(module._source)
        before = own.get("forward")
        own["forward"] = forward
        try:
            with _torch.without_dispatch_modes():  # of a method that calls the layer
                step, inputs = module._captures.find(args, kwargs)
                return step(inputs)
        except AutoparError as error:
            error.locate(line_now())
            raise
        finally:
            own["forward"] = before
            if before is None:
                del own["forward"]

    return call


def _can_run_parts(module: OfSource) -> bool:
    """Return whether a call of the model is its forward and nothing else, in one program."""
    source = module._source
    hooks = [*source._forward_hooks.values(), *source._forward_pre_hooks.values()]
    has_more = module._captures.compiler.loss_fn is not None or not all(isinstance(hook, CallRefusal) for hook in hooks)
    return not has_more and module._captures.last.step.runs_layers
