"""Count the work of a function, which is the same on every machine, where its seconds are not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


def counted(function: Callable[..., Result], *arguments: object) -> tuple[Result, int]:
    """Return what a function returns for some arguments, and the calls of functions and of builtins that it made."""
    calls = 0

    def count(frame, event, argument):
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        result = function(*arguments)
    finally:
        sys.setprofile(before)
    return result, calls - 1  # the last one puts the profile back
