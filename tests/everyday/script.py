"""A training script as a PyTorch user writes it, and what is compared of it.

    @script()
    def classifier(parallel, log):
        '''Cross-entropy outside of the model.'''
        model = parallel(nn.Linear(4, 3), (x,))                 # the one line that differs
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        ...
        log(loss=loss.item())

`parallel` hands the model back, or compiles it for a batch like (x,). What the script logs is compared, so are the
gradients at each step of an optimizer, whichever it is, and the values of all models and optimizers at the end. The
random numbers of a script are those of a seed, and its default type is float64: sums in another order differ by 1e-12
then, and a mistake by more.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_pre_hook

from tests.faithful import snapshot


@dataclass(frozen=True)
class Script:
    """`run(parallel, log)` is the user's. `tolerance`: relative; `dtype`: torch's default type in it. `local`: each
    rank reads its own samples."""

    name: str
    run: Callable
    tolerance: float = 1e-9
    dtype: torch.dtype = torch.float64
    local: bool = False


SCRIPTS: dict[str, Script] = {}


def script(**settings) -> Callable:
    """Add a script under its function's name."""

    def add(run: Callable) -> Callable:
        assert run.__name__ not in SCRIPTS, run.__name__
        SCRIPTS[run.__name__] = Script(run.__name__, run, **settings)
        return run

    return add


@dataclass
class Log:
    """Holds what a script has logged, and what its optimizers and models had at each step and at the end."""

    records: list[dict[str, object]] = field(default_factory=list)
    models: list[nn.Module] = field(default_factory=list)

    def __call__(self, **values) -> None:
        found = (leaf for name, value in values.items() for leaf in snapshot.leaves(value, name))
        self.records.append({path: snapshot.copied(leaf) for path, leaf in found})

    def step(self, optimizer: Optimizer, args, kwargs) -> None:
        """Record the gradients that an optimizer is about to use."""
        parameters = (p for group in optimizer.param_groups for p in group["params"])
        self.records.append({f"gradient of {i}": snapshot.copied(p.grad) for i, p in enumerate(parameters)})

    def end(self) -> None:
        """Record the values of all models."""
        for model in self.models:
            values: dict[str, Tensor] = dict(model.named_parameters()) | dict(model.named_buffers())
            self.records.append({f"parameter {name}": snapshot.copied(value) for name, value in values.items()})


@contextmanager
def _as_usual(dtype: torch.dtype):
    """Inside, torch's default type is `dtype`."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def play(script: Script, compile_: Callable, rank: int = 0, world: int = 1) -> Log:
    """Run a script, with `compile_(model, batch, **options)` as its `parallel`, and return its log. `rank`, `world`:
    which part of the samples a script reads that reads its own."""
    log, part = Log(), (rank, world) if script.local else ()

    def parallel(model: nn.Module, batch, **options) -> nn.Module:
        log.models.append(compile_(model, batch, **options))
        return log.models[-1]

    hook = register_optimizer_step_pre_hook(log.step)
    torch.manual_seed(0)
    try:
        with _as_usual(script.dtype):
            script.run(parallel, log, *part)
            log.end()
    finally:
        hook.remove()
    return log
