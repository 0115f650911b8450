"""torch.compile: what it is given so that it keeps the order of a graph, and what it raises."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def in_given_order(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return arguments of torch.compile with which Inductor does not reorder the ops of a graph to save memory, unless
    it is told to by these."""
    from torch._inductor import list_mode_options

    given = {name: value for name, value in options.items() if value is not None or name == "dynamic"}
    mode, chosen = given.get("mode"), given.get("options")
    if given.get("backend", "inductor") != "inductor" or (mode and chosen):
        return given  # what torch does not take, it refuses itself
    of_mode = list_mode_options(given.pop("mode"), given.get("dynamic")) if mode else {}
    return {**given, "options": {"reorder_for_peak_memory": False, **of_mode, **(chosen or {})}}


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch.compile raises of a graph that it cannot compile."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)
