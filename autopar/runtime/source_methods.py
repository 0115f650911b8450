"""Methods of the model on the compiled module: `model.num_parameters()`, `model.generate(...)`.

A method runs on the source, and where it calls the model it calls the compiled module. All else that it computes with
parameters is refused: here they are parts of parameters.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch import nn

from .. import _torch
from .._torch import TorchDispatchMode, tree_flatten
from ..errors import SourceMethodError
from ..frontend.fake_parameters import is_tracing
from ..frontend.user_lines import line_now


def method_of_source(module: nn.Module, source: nn.Module, name: str, method: Callable) -> Callable:
    """Return a method of `source` that calls the compiled `module` for the model. Raises SourceMethodError where it
    computes with parameters itself."""

    if is_tracing():  # for a forward of the user's
        return method

    def called(*args, **kwargs):
        with _torch.without_dispatch_modes(), _calling(source, None):  # it may be traced
            return module(*args, **kwargs)

    @functools.wraps(method)
    def run(*args, **kwargs):
        if is_tracing():
            return method(*args, **kwargs)
        with _calling(source, called), _WithoutParameters(module, f"{type(source).__name__}.{name}"):
            return method(*args, **kwargs)

    return run


@contextmanager
def _calling(source: nn.Module, call: Callable | None) -> Iterator[None]:
    """Inside, who calls the source calls `call`; None: the source."""
    state, name = vars(source), "_compiled_call_impl"  # which nn.Module.__call__ looks for
    before = state.get(name)
    state[name] = call
    try:
        yield
    finally:
        state[name] = before
        if before is None:
            del state[name]


class _WithoutParameters(TorchDispatchMode):
    """Refuses ops on the parameters of a module."""

    def __init__(self, module: nn.Module, method: str):
        super().__init__()
        self.parameters, self.method = {id(p) for p in module.parameters()}, method

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if any(id(value) in self.parameters for value in tree_flatten((args, kwargs))[0]):
            raise SourceMethodError(
                f"{self.method} is a method of the source model that computes with parameters ({function}) beside the "
                "model's call, and autopar.compile took them over",
                source=line_now(),
                fix="call the method before autopar.compile if it sets something, let it call self(...) instead of "
                "layers, or save_pretrained(folder) and call it on a plain model with that folder",
            )
        return function(*args, **kwargs or {})
