"""`model.generate(...)` with a cache of keys and values, as models of transformers sample by default.

A token costs one row of the model then, for which no collective is worth its start. So the weights are gathered once a
call, on every rank and in the type that the model computes in, and a plain copy of the model around them generates with
the code of its own class: the tokens are the plain model's, and with inputs="local" each rank has its own prompts and
ends when they end. With use_cache=False nothing is gathered: each token is a call of the compiled model.
"""

from __future__ import annotations

import functools
import logging
import math
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from .._torch import tree_flatten
from ..errors import AdaptError, MemoryInfeasibleError
from ..frontend.fake_parameters import is_tracing
from ..frontend.precision import compute_dtype, computing_in, narrowed, stays_wide
from ..frontend.user_lines import line_now
from ..processes import agree
from ..utils.format import size
from . import copies

STATE = ("parameters", "gradients", "optimizer", "buffers")  # of a plan's memory, what stays between steps
_told: weakref.WeakSet[nn.Module] = weakref.WeakSet()
_log = logging.getLogger("autopar")


def with_cache(module, method: Callable) -> Callable:
    """Return the model's `generate`, given as the method that calls the compiled module, which gathers the weights
    where it is to keep keys and values."""

    @functools.wraps(method)
    def run(*args, **kwargs):
        return (
            _generate(module, args, kwargs)
            if _keeps_cache(module._source, args, kwargs) and not is_tracing()
            else method(*args, **kwargs)
        )

    return run


def _keeps_cache(source: nn.Module, args: tuple, kwargs: dict) -> bool:
    """Return whether a call keeps keys and values: what it is told, else what the model's configuration says."""
    if not hasattr(source, "prepare_inputs_for_generation"):
        return False
    configs = [*_given(args, kwargs), source.generation_config]
    said = [kwargs.get("use_cache"), *(getattr(config, "use_cache", None) for config in configs)]
    return bool(next((word for word in said if word is not None), True))


def _given(args: tuple, kwargs: dict) -> list:
    """Return the configuration that a call is given, if it is."""
    given = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    return [] if given is None else [given]


def _generate(module, args: tuple, kwargs: dict) -> Any:
    """Call `generate` of the source's class on whole weights, and return what it returns. All ranks call it together,
    each may pass prompts of its own.

    Raises MemoryInfeasibleError on all ranks if the weights, and the keys and values of the longest text, do not fit
    beside what a step keeps; AdaptError for a model with adapters that are not merged."""
    if module.quantized_names or (module._adapters is not None and not module._adapters.merged):
        raise AdaptError(
            "generate keeps keys and values with whole weights of the plain model, which has no adapters",
            source=line_now(),
            fix="pass use_cache=False, or merge_adapter() first",
        )
    dtype = compute_dtype(module.plan.precision)
    wide = _stays_wide(module)

    def taken(name: str, tensor: Tensor) -> Tensor:
        return tensor if name in wide else narrowed(tensor, dtype)

    gathered = _gathered_bytes(module, lambda name: None if name in wide else dtype)
    agree.everywhere(lambda: _check_fits(module, gathered, _cache_bytes(module._source, dtype, args, kwargs)))
    start = time.perf_counter()
    plain = copies.plain_model(module, taken)
    if module not in _told:
        _told.add(module)
        if dist.get_rank() == 0:
            _log.info(
                "generate: each call gathers %s of weights on every rank, which took %.2f s; use_cache=False gathers "
                "none and computes all tokens again for each new one",
                size(gathered),
                time.perf_counter() - start,
            )
    with torch.no_grad(), computing_in(plain, dtype):
        return plain.generate(*args, **kwargs)


def _stays_wide(module) -> set[str]:
    """Return the first names of the tensors that no precision narrows."""
    tables = (t for t in module._forms.tables if stays_wide(t.module))
    return {name for t in tables for name in (*t.parameters.values(), *t.buffers.values()) if name is not None}


def _gathered_bytes(module, dtype_of: Callable[[str], torch.dtype | None]) -> int:
    """Return the bytes of the weights of which this rank has not the whole, in the type that they are gathered in."""
    total = 0
    for name, form in module._forms.items():
        layout, dtype = module.layouts.get(name), dtype_of(name)
        is_cast = dtype is not None and form.dtype.is_floating_point and form.dtype.itemsize > dtype.itemsize
        if name in module.elsewhere or is_cast or layout is None or not layout.is_replicated:
            total += math.prod(form.shape) * (dtype if is_cast and dtype is not None else form.dtype).itemsize
    return total


def _cache_bytes(source: nn.Module, dtype: torch.dtype | None, args: tuple, kwargs: dict) -> int:
    """Return the bytes of keys and values of the longest text that a call may make; 0 where the model's configuration
    does not say what a layer keeps."""
    prompt = next((x for x in tree_flatten((args, kwargs))[0] if isinstance(x, Tensor) and x.dim() == 2), None)
    config: Any = source.config
    config = config.get_text_config(decoder=True) if hasattr(config, "get_text_config") else config
    asked = [*_given(args, kwargs), source.generation_config][0]

    def setting(name: str, default: Any = None) -> Any:
        found = kwargs.get(name, getattr(asked, name, None))
        return default if found is None else found

    of_all, layers, width = (
        getattr(config, name, 0) for name in ("num_attention_heads", "num_hidden_layers", "hidden_size")
    )
    if prompt is None or not (of_all and layers and width):
        return 0
    heads = getattr(config, "num_key_value_heads", None) or of_all
    head = getattr(config, "head_dim", None) or width // of_all
    new = setting("max_new_tokens")
    length = prompt.shape[1] + new if new is not None else max(setting("max_length", 20), prompt.shape[1])
    rows = prompt.shape[0] * setting("num_beams", 1) * setting("num_return_sequences", 1)
    item = (dtype or next(iter(source.parameters())).dtype).itemsize
    return 2 * layers * heads * head * length * rows * item


def _check_fits(module, gathered: int, cache: int) -> None:
    limit = module.plan.memory_limit_bytes
    kept = sum(module.plan.memory.get(kind, 0.0) for kind in STATE)
    missing = int(kept + gathered + cache - limit)
    if missing > 0:
        parts = {"what a step keeps": kept, "whole weights": float(gathered), "keys and values": float(cache)}
        raise MemoryInfeasibleError(
            f"generate gathers the weights on every rank, and needs {size(kept + gathered + cache)} of {size(limit)}",
            missing_bytes=missing,
            breakdown=parts,
            source=line_now(),
            fix="pass use_cache=False, which gathers nothing and computes all tokens again for each new one, fewer or "
            "shorter texts, or save_pretrained(folder) and generate with a program of its own",
        )
