"""Adaptations as text, as the command line takes them: `r=16,lora_alpha=32,target_modules=q_proj+v_proj`."""

from __future__ import annotations

import re
from dataclasses import fields
from typing import TypeVar

import torch

from ..errors import AdaptError, nearest
from .targets import ALL_LINEAR

Kind = TypeVar("Kind")


def parse(kind: type[Kind], text: str, first: str | None = None, **defaults: object) -> Kind:
    """Read an adaptation from KEY=VALUE pairs between commas; `first` is the key of a first word without one. Several
    names in a value stand between plus signs, and a text with signs that no name has is a regular expression.
    `defaults` are for keys that the text does not have. Raises AdaptError for a key that there is not and for a value
    that cannot be read."""
    known, given = {f.name: f.type for f in fields(kind)}, dict(defaults)
    for number, pair in enumerate(text.split(",") if first else filter(None, text.split(","))):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if number == 0 and first and not equals:
            key, equals, value = first, "=", key
        if not equals or key not in known:
            raise AdaptError(
                f"{kind.__name__} has no {key!r}", fix=f"write KEY=VALUE with one of: {nearest(key, known)}"
            )
        try:
            given[key] = _value(value, known[key])
        except ValueError as error:
            raise AdaptError(f"{kind.__name__} has {key}={value!r}", fix=f"{key} is {error}") from None
    return kind(**given)


def _value(text: str, annotated: str) -> object:
    """Return the value of a field that is annotated so. Raises ValueError with what it should be."""
    kind = annotated.removesuffix(" | None")
    if kind == "Targets":
        return text if text == ALL_LINEAR or re.search(r"[*\\^$|?()\[\]{}]", text) else text.split("+")
    if kind == "Sequence[str]":
        return text.split("+")
    if kind == "Sequence[int] | int":
        return [_number(int, word, "numbers such as 0+1") for word in text.split("+")]
    if "bool" in kind and text.lower() in ("true", "false"):
        return text.lower() == "true"
    if kind == "bool":
        raise ValueError("true or false")
    if kind in ("int", "float"):
        return _number(int if kind == "int" else float, text, "a number")
    if kind == "torch.dtype":
        if not isinstance(found := getattr(torch, text, None), torch.dtype):
            raise ValueError("a dtype, such as float32")
        return found
    if kind.startswith("Mapping"):
        raise ValueError("not for text: give it in a program")
    return text


def _number(kind: type, text: str, wanted: str) -> float:
    try:
        return kind(text)
    except ValueError:
        raise ValueError(wanted) from None
