"""`path/model.py:function`: a user's own model, from a function that returns (model, example_inputs)."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

from torch import nn

from ..errors import ModelError, nearest


def build_from_file(text: str, **wanted) -> tuple[nn.Module, object]:
    """Call the function and return its (model, example_inputs) as they are.

    The function is given those of `wanted` (batch, seq, device, dtype) that it has parameters for. Raises ModelError if
    the file or function is missing, fails, or returns something else."""
    file, _, name = text.rpartition(":")
    module = load(text)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        known = nearest(name, functions) if functions else "a function that returns (model, example_inputs)"
        raise ModelError(f"{file} has no function {name!r}", fix=f"use {known}")
    accepted = inspect.signature(function).parameters
    try:
        result = function(**{key: value for key, value in wanted.items() if key in accepted})
    except Exception as error:
        raise ModelError(f"{text} raised {type(error).__name__}: {error}", source=_line_in(file, error)) from error
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise ModelError(
            f"{text} returned {type(result).__name__}, not a pair of a module and its inputs",
            fix="return (model, example_inputs)",
        )
    return result


def load(text: str) -> ModuleType:
    """Return the module of a text's file, which runs once, with all that it registers. Raises ModelError if it is not
    there, or cannot be imported."""
    path = Path(text.rpartition(":")[0]).expanduser()
    if not path.is_file():
        siblings = [p.name for p in path.parent.glob("*.py")] if path.parent.is_dir() else []
        known = f"use {nearest(path.name, siblings)}" if siblings else "check the path"
        raise ModelError(f"there is no file {path}", fix=known)
    return _imported(path, path.stat().st_mtime_ns)


@lru_cache
def _imported(path: Path, written: int) -> ModuleType:
    """Import a file, once for each time that it was written; it may import what lies beside it."""
    spec = importlib.util.spec_from_file_location(f"autopar_user_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickling look their module up by name
    if (folder := str(path.resolve().parent)) not in sys.path:
        sys.path.insert(0, folder)
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        raise ModelError(
            f"importing {path} raised {type(error).__name__}: {error}", source=_line_in(str(path), error)
        ) from error
    return module


def _line_in(file: str, error: BaseException) -> str | None:
    """Return the innermost "file:line" of the user's file in the traceback."""
    line, trace = None, error.__traceback__
    while trace is not None:
        if Path(trace.tb_frame.f_code.co_filename).name == Path(file).name:
            line = trace.tb_lineno
        trace = trace.tb_next
    return f"{file}:{line}" if line else None
