"""Compile a module at its first call: what `autopar.compile(model, mesh)` returns without example_inputs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from torch import nn

from ..errors import InputError
from ..frontend.user_lines import located
from .source_attributes import OfSource


class CompiledAtFirstCall(OfSource):
    """Turns into the compiled module, in place, at the first call. `compile_for((args, kwargs))` makes that module."""

    def __init__(self, source: nn.Module, compile_for: Callable[[tuple[tuple, dict]], nn.Module]):
        super().__init__(source, ("_compile_for", "_waiting"))
        self._compile_for = compile_for
        self._waiting: list[ExitStack] = []  # of no_sync contexts that were entered before there is a module

    @located
    def forward(self, *args, **kwargs):
        """Compile for this call, become the compiled module, and run it."""
        compiled, waiting = self._compile_for((args, kwargs)), self._waiting
        object.__setattr__(self, "__dict__", compiled.__dict__)  # one state: what is set on the one is set on the other
        self.__class__ = type(compiled)
        for stack in waiting:
            stack.enter_context(self.no_sync())
        return self.forward(*args, **kwargs)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients as ParallelModule.no_sync does, once the first call has made the module."""
        waiting = self._waiting
        with ExitStack() as stack:
            waiting.append(stack)
            try:
                yield
            finally:
                waiting.remove(stack)

    def _refuse(self, *args, **kwargs):
        raise InputError(
            "the model is compiled at its first call and has no parameters before it",
            fix="pass example_inputs to autopar.compile, then build the optimizer",
        )

    named_parameters = named_buffers = state_dict = load_state_dict = _apply = _refuse
