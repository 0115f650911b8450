"""Counters: attributes that a forward only counts on, `self.steps += 1`, and does not read for anything else.

Whether that is so is found in the bytecode of the functions that the forward reaches: each mention of the attribute's
name must be in a statement that adds a constant to it. One that is set to a value is no counter.
"""

from __future__ import annotations

import dis
import functools
import types

from .names import Reach, is_library
from .watch import Write


def step_of(write: Write, reach: Reach) -> int | float:
    """Return what a run added to a number that is only counted on, 0 if it is anything else."""
    before, now = write.before, write.now()
    if type(before) not in (int, float) or type(now) is not type(before) or is_library(type(write.owner).__module__):
        return 0
    if any(_mentions(code, write.name) for code in reach.functions):
        return 0
    return now - before


@functools.lru_cache(4096)
def _mentions(code: types.CodeType, name: str) -> bool:
    """Return whether code reads or sets an attribute `name` for anything else than to count it on."""
    if any(isinstance(c, types.CodeType) and _mentions(c, name) for c in code.co_consts) or name in code.co_consts:
        return True
    if name not in code.co_names:
        return False
    steps = [s for s in dis.get_instructions(code) if s.opname not in ("CACHE", "EXTENDED_ARG", "PRECALL")]
    counted = 0
    for at, step in enumerate(steps):
        if step.argval != name or step.opname not in ("LOAD_ATTR", "LOAD_METHOD", "LOAD_GLOBAL", "LOAD_NAME"):
            continue
        following = [(s.opname, s.argval) for s in steps[at + 1 : at + 6]]
        following = [entry for entry in following if entry[0] not in ("SWAP", "ROT_TWO", "LOAD_FAST")]
        expected = [("LOAD_CONST", None), ("BINARY_OP", (0, 13)), ("STORE_ATTR", (name,))]  # `+` or `+=` a constant
        if len(following) < 3 or any(op != o or (w and v not in w) for (op, v), (o, w) in zip(following, expected)):
            return True
        counted += 1
    return sum(s.opname == "STORE_ATTR" and s.argval == name for s in steps) != counted
