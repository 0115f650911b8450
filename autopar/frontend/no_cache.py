"""Models of transformers, called without the cache of keys and values that they return by default.

Training never reads it, and a plan would keep it. Where a model would have returned one, its output has an object that
says so as soon as it is read. The model is asked for no cache by something that is false and knows whether the model
looked: an encoder that has no cache to return never does.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys

from torch import nn

from ..errors import AbsentError, CaptureError
from .user_lines import line_now

FIELDS = {"cache", "past_key_values", "past_buckets_states", "cache_params", "state"}
IN_EVAL = {"mamba", "mamba2", "falcon_mamba", "rwkv"}  # types of models that return none while they train


class Unwanted:
    """The value of `use_cache`: false. `was_read`: whether a model asked, where it does not ask in order to warn that
    there is no cache with labels, as Bart does."""

    was_read = False

    def __bool__(self) -> bool:
        self.was_read |= sys._getframe(1).f_locals.get("labels") is None
        return False


class NoCache:
    """A stand-in for a cache in an output. Whatever reads it raises AbsentError."""

    __slots__ = ()

    def __getattr__(self, name: str):
        raise AbsentError(
            f"a compiled model returns no cache of keys and values ({name} is looked up in it): it is called with "
            f"use_cache=False",
            source=line_now(),
            fix="generate with a plain model: save_pretrained(folder), and load the folder",
        )

    def __getitem__(self, at):
        return self.__getattr__(f"[{at}]")

    def __len__(self) -> int:
        return self.__getattr__("the length")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, NoCache)

    def __hash__(self) -> int:
        return hash(NoCache)

    def __repr__(self) -> str:
        return "no cache"


def keeps_cache(model: nn.Module) -> bool:
    """Return whether a call takes `use_cache`, by name or among the keywords of a model whose configuration has it."""
    takes = inspect.signature(model.forward).parameters
    is_open = any(p.kind is p.VAR_KEYWORD for p in takes.values())
    return "use_cache" in takes or (is_open and bool(_setting(model, "use_cache", False)))


def marked(model: nn.Module, kwargs: dict, output):
    """Return the output of a call with a NoCache where the model would have returned a cache. Raises CaptureError if
    it would have had a place in a tuple."""
    asked = kwargs.get("use_cache")
    if not isinstance(asked, Unwanted) or not asked.was_read or not _setting(model, "use_cache", True):
        return output
    if any(m.training and vars(m).get("gradient_checkpointing") for m in model.modules()):  # the model has read it too
        return output
    if type(output) is tuple and not kwargs.get("return_dict", _setting(model, "return_dict", True)):
        raise CaptureError(
            "the model returns a tuple with a cache of keys and values in it, and a compiled model computes none",
            fix="pass use_cache=False (or set it in the config), or leave out return_dict=False",
        )
    if model.training and getattr(getattr(model, "config", None), "model_type", None) in IN_EVAL:
        return output
    if dataclasses.is_dataclass(output):
        for name in FIELDS.intersection(field.name for field in dataclasses.fields(output)):
            if getattr(output, name) is None:
                setattr(output, name, NoCache())
    return output


def _setting(model: nn.Module, name: str, default: bool) -> bool:
    return bool(getattr(getattr(model, "config", None), name, default))
