"""An op that does for the rows beyond the capacity of devices what a graph did for those up to it, round by round.

    made = in_rounds("t0 = autopar.round_rows.default(w0, w1, w5, 0); ...", [result], [order, table, x, weight], ...)

The program is text (autopar/ops/row_pieces.py) that does one round: `r0`, `r1` are results, into which it writes or
adds, `w0`, `w1` what it reads, then the number of the round and the names of the groups. Where no rows are beyond, it
does nothing: then nothing is computed twice. What is between exists for one round.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.library import custom_op

from .capped_rows import rounds_of
from .row_pieces import Name, parsed

Step = tuple[Callable[..., Any], Sequence[Any], Mapping[str, Any]]


@custom_op("autopar::in_rounds", mutates_args=("results",))
def in_rounds(
    program: str,
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tables: Sequence[Tensor],
    others: str,
    group_name: str,
) -> Tensor:
    """Return how many rounds were made, the first one, which is not made here, among them. The members of
    `group_name`, if one is named, make equally many; `others`: groups beside it that collectives of the program
    have, with semicolons between."""
    steps = rounds(program, results, inputs, tables, others, group_name)
    value = None
    while True:
        try:
            target, args, kwargs = steps.send(value)
        except StopIteration as end:
            return end.value
        value = target(*args, **kwargs)
        del args, kwargs


def rounds(
    program: str,
    results: Sequence[Tensor],
    inputs: Sequence[Tensor],
    tables: Sequence[Tensor],
    others: str,
    group_name: str,
) -> Generator[Step, Any, Tensor]:
    """Yield each call of an op of all rounds, which takes its value, and return how many rounds were made."""
    known, made, groups = parsed(program), max(map(rounds_of, tables)), (group_name, *others.split(";"))
    fixed: dict[str, Any] = {f"r{i}": x for i, x in enumerate(results)}
    for number in range(1, made):
        values = fixed | {f"w{i}": x for i, x in enumerate((*inputs, number, *groups))}
        for step in known.steps:
            values[step.name] = yield step.target, _filled(step.args, values), _filled(step.kwargs, values)
            for name in step.last:
                del values[name]
    return torch.tensor(made)


def _filled(value: Any, values: Mapping[str, Any]) -> Any:
    """Return arguments of an op with values in the places of their names."""
    if isinstance(value, Name):
        return values[value.name]
    if isinstance(value, dict):
        return {key: _filled(item, values) for key, item in value.items()}
    return type(value)(_filled(item, values) for item in value) if isinstance(value, (list, tuple)) else value


in_rounds.register_fake(
    lambda program, results, inputs, tables, others, group_name: torch.empty((), dtype=torch.int64, device="cpu")
)
