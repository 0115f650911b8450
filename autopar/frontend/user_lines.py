"""Find where in the user's code something stands: the lines outside of torch, autopar and Python's own library."""

from __future__ import annotations

import functools
import inspect
import linecache
import os
import re
import sys
from collections.abc import Callable
from types import CodeType, FrameType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx

from ..errors import AutoparError

P = ParamSpec("P")
T = TypeVar("T")
_FRAME = re.compile(r'File "([^"]+)", line (\d+)')
_LIBRARIES = sys.stdlib_module_names | {"torch", "autopar"}
_PATHS = (
    os.path.dirname(torch.__file__) + os.sep,
    os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep,
    "<",
)


def line_now() -> str | None:
    """Return the innermost of the user's lines that run now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and not _is_users(frame):
        frame = frame.f_back
    return None if frame is None else _text(frame.f_code.co_filename, frame.f_lineno)


def line_of_node(node: fx.Node) -> str:
    """Return the innermost of the user's lines that made a node; an empty text if there is none."""
    trace = node.meta.get("stack_trace") or ""
    frames = [(path, line) for path, line in _FRAME.findall(trace) if not path.startswith(_PATHS)]
    return _text(*frames[-1]) if frames else ""


def line_of_error(error: BaseException) -> str | None:
    """Return the innermost of the user's lines that an exception went through, with what is written there."""
    found, trace = None, error.__traceback__
    while trace is not None:
        if _is_users(trace.tb_frame):
            found = trace.tb_frame.f_code.co_filename, trace.tb_lineno
        trace = trace.tb_next
    return f"{found[0]}:{found[1]}: {linecache.getline(*found).strip()}" if found else None


def line_of_definition(function: object) -> str | None:
    """Return the line where a function of the user's is defined."""
    plain: Any = getattr(function, "__func__", function)
    code: CodeType | None = getattr(inspect.unwrap(plain), "__code__", None)
    if code is None or code.co_filename.startswith(_PATHS):
        return None
    return f"{_text(code.co_filename, code.co_firstlineno)}, {code.co_qualname}"


def located(function: Callable[P, T]) -> Callable[P, T]:
    """Return the function, with the line that calls it in the errors of autopar that say no other."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            return function(*args, **kwargs)
        except AutoparError as error:
            error.locate(line_now())
            raise

    return wrapper


def _is_users(frame: FrameType) -> bool:
    """Return whether a frame is of the user's code: of a model builder of autopar's too, but not of its command."""
    package, _, rest = frame.f_globals.get("__name__", "").partition(".")
    path = frame.f_code.co_filename
    if not path.endswith(".py") or path.startswith("<"):
        return False
    return package not in _LIBRARIES or (package == "autopar" and rest.startswith("models"))


def _text(path: str, line: int | str) -> str:
    return f"{os.path.basename(path)}:{line}"
