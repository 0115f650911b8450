"""Under what a capture, a plan and a rank's program are kept in the cache (autopar/storage/compile_cache.py).

A key has all that is known before the work is done: versions of what does it, by content where that can be read, the
model's classes, forms and code, the call, the options. What a forward reads beyond is compared when an entry is taken
over (autopar/frontend/capture_data.py). A None for a key: this cannot be kept.
"""

from __future__ import annotations

import functools
import hashlib
import importlib.metadata
import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import FunctionType

import torch
from torch import nn

from .. import errors, models, passes
from ..adapt.order import Adaptation
from ..codegen import pass_manager
from ..frontend import autocast
from ..frontend.call_signature import CallSignature, split_example
from ..frontend.capture_data import call_data, model_data
from ..frontend.described import code_hash
from ..frontend.fake_parameters import Forms
from ..frontend.names import is_library
from ..ir.layout import Layout
from ..plans.plan import Plan
from ..runtime.capture import Traced
from ..storage.compile_cache import content_hash

PACKAGE = Path(__file__).resolve().parent.parent
GENERATED = {"_remote_module_non_scriptable"}  # torch writes it when parts of it are loaded
DEPENDENCIES = ("numpy", "ortools", "networkx")  # that decide what a plan is, beside torch


def sources(model: nn.Module) -> dict[str, str | None]:
    """Return what a model is written in: hashes of the files that define its classes, with the functions that are there
    now, and of all modules that are no library's; versions of the libraries. None for a file that cannot be read."""
    found: dict[str, str | None] = {}
    for name in {cls.__module__ for module in model.modules() for cls in type(module).__mro__}:
        root = name.partition(".")[0]
        if root not in ("torch", "builtins", "autopar"):
            found |= {root: _version(root), name: _file_hash(name), f"names of {name}": _names_in(name)}
    roots = {name.partition(".")[0] for name in list(sys.modules)}
    own = {root for root in roots - GENERATED if root == "__main__" or not is_library(root)}
    hashes = {name: _file_hash(name) for name in list(sys.modules) if name.partition(".")[0] in own}
    return found | {name: known for name, known in hashes.items() if known is not None}


def capture_key(
    sources: Mapping[str, str | None],
    model: nn.Module,
    example_inputs,
    loss_fn: Callable | None,
    forms: Forms,
    precision: str,
    adapt: Sequence[Adaptation],
    loss_alone: bool,
    with_gradients: bool,
) -> str | None:
    """Return the key of a model's call, which is given on global shapes. `sources`: as `sources` gives them."""
    if None in sources.values() or (loss_fn is not None and not isinstance(loss_fn, FunctionType)):
        return None  # what a loss holds beside code is not compared
    if any("forward" in vars(module) for module in model.modules()):
        return None  # a forward in the place of a class's, or a layer that is called by itself
    around = autocast.ambient()
    parts = [
        _versions(), dict(sources), model_data(model, forms),
        code_hash([loss_fn]) if loss_fn is not None else "",
        call_data(CallSignature.of(*split_example(example_inputs))[0]),
        [precision, repr(adapt), loss_alone, with_gradients],
        [repr(around), autocast.device_of(model, around), str(torch.get_default_dtype()), *_switches()],
    ]  # fmt: skip
    return _key("capture", parts)


def plan_key(
    content: str | None, asked: object, first: Plan | None = None, layouts: Mapping[str, Layout] | None = None
) -> str | None:
    """Return the key of the plan of a capture with this content. `asked`: a PlanRequest, or PlanOptions for a call that
    is planned with the `first` one's `layouts`. None where the user has added rules, strategies and the like."""
    if content is None or errors.added:
        return None
    later = None if first is None else [first.hash, {name: str(x) for name, x in (layouts or {}).items()}]
    return _key("plan", [_versions(), content, repr(asked), later])


def program_key(traced: Traced, plan: Plan, rank: int, device: torch.device) -> str | None:
    """Return the key of what a rank runs of a plan. None where passes or rules of the user's take part, and where
    somebody looks at the passes."""
    captured, is_looked_at = traced.captured, pass_manager.is_watched() or os.environ.get("AUTOPAR_CHECK") == "1"
    if traced.content is None or errors.added or captured.passes or is_looked_at:
        return None
    tensors = [getattr(captured.graph_module, n.target) for n in captured.graph.nodes if n.op == "get_attr"]
    constants = content_hash(traced.content.encode(), tensors)
    return _key("program", [_versions(), constants, plan.hash, rank, str(device), _switches()])


def _key(kind: str, parts: list) -> str | None:
    text = json.dumps([kind, *parts], sort_keys=True)
    return None if " at 0x" in text else text  # an object that has no other text than where it is


def _switches() -> list[bool]:
    """Return what of torch's global settings ops may be chosen by."""
    cuda = torch.backends.cuda
    attention = cuda.flash_sdp_enabled(), cuda.mem_efficient_sdp_enabled(), cuda.math_sdp_enabled()
    return [*attention, torch.are_deterministic_algorithms_enabled()]


def _versions() -> dict[str, str]:
    """Return versions of what traces and plans."""
    found = {"python": sys.version, "torch": torch.__version__, "autopar": _own_sources()}
    return found | {name: _version(name) for name in DEPENDENCIES}


def _names_in(module: str) -> str:
    """Return a hash of where the functions and classes in a module's globals come from: others may have been put there
    since it was imported."""
    held = vars(sys.modules[module]).items() if module in sys.modules else ()
    places = [f"{name} {x.__module__} {x.__qualname__}" for name, x in held if isinstance(x, (FunctionType, type))]
    return hashlib.sha256("\n".join(sorted(places)).encode()).hexdigest()


@functools.cache
def _version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def _file_hash(module: str) -> str | None:
    file: str | None = getattr(sys.modules.get(module), "__file__", None)
    try:
        return hashlib.sha256(Path(file or "").read_bytes()).hexdigest()
    except OSError:  # an interpreter's or a notebook's
        return None


@functools.cache
def _own_sources() -> str:
    """Return the hash of autopar's own code."""
    found = hashlib.sha256()
    for folder in (PACKAGE, *passes.__path__, *models.__path__):
        for file in sorted(Path(folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
