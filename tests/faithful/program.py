"""A program: a model, the batches that it is called with, and what its user does with it.

    @program()
    def temperature():
        '''A plain number of the model is set between calls.'''
        class Scaled(nn.Module): ...

        def script(run):
            run(1)          # calls the model on batch(1), goes backward, records all that can be compared
            run.model.temperature = 2.0
            run(2)

        return Scaled(), lambda seed: (randn(seed, 4, 6),), script

The function is called once for the eager run and once for the compiled one, with the same seeds, and the same script
runs on both. The model is compiled for batch(0). Without a script it is called on batch(1) and batch(2).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch


@dataclass(frozen=True)
class Program:
    """`name` is `topic/function`. `refused`: a word of the AutoparError that is wanted instead of an equal run; "" for
    any. `raises`: whether the script ends with an exception in eager mode, as it then must when compiled; None if that
    is not known. `tolerance`: of tensors, relative to their largest element. `options`: arguments of autopar.compile.
    `alone`: runs on one process only. `source`: file:line, for reports. `rounded(precision)`: the same computed with
    other rounding, which tells how exact the eager run itself is."""

    name: str
    build: Callable
    refused: str | None = None
    raises: bool | None = False
    tolerance: float = 3e-5
    options: dict = field(default_factory=dict)
    alone: bool = False
    source: str = ""
    rounded: Callable[[str], list[Program]] | None = None


class Topic:
    """The programs of one file, by name; `topic(...)` is the decorator that adds one."""

    def __init__(self, name: str):
        self.name = name.rpartition(".")[2]
        self.programs: dict[str, Program] = {}

    def __call__(self, **settings) -> Callable:
        def add(build: Callable) -> Callable:
            self.add(build.__name__, build, **settings)
            return build

        return add

    def add(self, name: str, build: Callable, **settings) -> None:
        code = inspect.unwrap(build).__code__ if hasattr(build, "__code__") else None
        source = f"{code.co_filename.rpartition('/')[2]}:{code.co_firstlineno}" if code else ""
        full = f"{self.name}/{name}"
        assert full not in self.programs, full
        self.programs[full] = Program(full, build, source=source, **settings)


def randn(seed: int, *shape: int, **options) -> torch.Tensor:
    """Normal numbers that depend on the seed and the shape alone."""
    tensor = torch.randn(shape, generator=torch.Generator().manual_seed(1000 + seed))
    return tensor.to(options.pop("dtype", tensor.dtype)).requires_grad_(options.pop("requires_grad", False))


def ids(seed: int, high: int, *shape: int) -> torch.Tensor:
    """Integers below `high`."""
    return torch.randint(0, high, shape, generator=torch.Generator().manual_seed(2000 + seed))


def one(*shape: int, **options) -> Callable:
    """Batches of a single tensor of normal numbers."""
    return lambda seed: (randn(seed, *shape, **options),)


def calls(*shapes: Sequence[int]) -> Callable:
    """Return a script that calls the model on one tensor of normal numbers of each of these shapes."""

    def script(run) -> None:
        for seed, shape in enumerate(shapes, 1):
            run.call(randn(seed, *shape))

    return script
