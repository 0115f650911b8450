"""Trace a mixture of experts of transformers in the order of its tokens.

Of the implementations that transformers has for experts, one takes the tokens in their order, each with the matrices of
its experts ("batched_mm"). The others sort the tokens of the whole batch by expert, after which no op knows which
sample a row is of, or loop over the experts that the batch needs. All of them compute the same. What the traced one
would copy, a matrix for each token, becomes `autopar::grouped_mm` (passes/canonicalize/experts.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

IN_ORDER, OTHERS = "batched_mm", (None, "eager", "grouped_mm")
SETTINGS = (
    "_experts_implementation",
    "_experts_implementation_internal",
)  # of a configuration; all give the same numbers


@contextmanager
def in_order(model: nn.Module) -> Iterator[None]:
    """Inside, the experts of `model` take tokens in their order."""
    configs = {
        id(c): c for m in model.modules() if hasattr(c := getattr(m, "config", None), "_experts_implementation")
    }.values()
    before = [
        (config, config._experts_implementation) for config in configs if config._experts_implementation in OTHERS
    ]
    try:
        for config, _ in before:
            config._experts_implementation = {"": IN_ORDER}  # of this configuration alone, not of those inside it
        yield
    finally:
        for config, name in before:
            config._experts_implementation = {"": name}
