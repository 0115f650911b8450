"""`path/model.py:function`: a user's own model, from a function that returns (model, example_inputs), or a model of
transformers alone."""

from __future__ import annotations

import importlib.util
import inspect
import sys
from functools import lru_cache
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor, nn

from ..errors import ModelError, nearest


def build_from_file(text: str, seed: int = 0, **wanted) -> tuple[nn.Module, object]:
    """Call the function and return its (model, example_inputs) as they are; a model of transformers alone gets inputs
    as one that is named by its config does.

    The function is given those of `wanted` (batch, seq, device, dtype) that it has parameters for, and draws random
    numbers that follow from `seed`. Raises ModelError if the file or function is missing, fails, or returns something
    else."""
    file, _, name = text.rpartition(":")
    module = load(text)
    function = getattr(module, name, None)
    if not callable(function):
        functions = [n for n, f in vars(module).items() if inspect.isfunction(f) and not n.startswith("_")]
        known = nearest(name, functions) if functions else "a function that returns (model, example_inputs)"
        raise ModelError(f"{file} has no function {name!r}", fix=f"use {known}")
    accepted = inspect.signature(function).parameters
    try:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            result = function(**{key: value for key, value in wanted.items() if key in accepted})
    except Exception as error:
        raise ModelError(f"{text} raised {type(error).__name__}: {error}", source=_line_in(file, error)) from error
    if _is_of_transformers(result):
        return result, _inputs(result, wanted["batch"], wanted["seq"], seed)
    if not (isinstance(result, tuple) and len(result) == 2 and isinstance(result[0], nn.Module)):
        raise ModelError(
            f"{text} returned {type(result).__name__}, neither a pair of a module and its inputs nor a model of "
            f"transformers",
            fix="return (model, example_inputs)",
        )
    return result


def _is_of_transformers(result: object) -> bool:
    """Return whether this is a model of transformers, which is not imported where nobody has."""
    transformers = sys.modules.get("transformers")
    return transformers is not None and isinstance(result, transformers.PreTrainedModel)


def _inputs(model, batch: int, seq: int, seed: int) -> dict[str, Tensor]:
    from .huggingface import check_length, example_inputs

    check_length(model.config, seq)
    return example_inputs(model, batch, seq, model.dtype, model.device, seed)


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
