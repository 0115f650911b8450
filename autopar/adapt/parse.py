"""Adaptations as text, as the command line takes them: `r=16,lora_alpha=32,target_modules=q_proj+v_proj`."""

from __future__ import annotations

from dataclasses import fields
from typing import TypeVar

from ..errors import AdaptError, nearest

Kind = TypeVar("Kind")


def parse(kind: type[Kind], text: str, **defaults: object) -> Kind:
    """An adaptation from KEY=VALUE pairs between commas; several names in a value stand between plus signs. `defaults` are for
    keys that the text does not have. Raises AdaptError for a key that there is not and for a value that cannot be read."""
    known, given = {f.name: f.default for f in fields(kind)}, dict(defaults)
    for pair in filter(None, text.split(",")):
        key, equals, value = (part.strip() for part in pair.partition("="))
        if not equals or key not in known:
            raise AdaptError(f"{kind.__name__} has no {key!r}", fix=f"write KEY=VALUE with one of: {nearest(key, known)}")
        given[key] = _value(kind, key, value, known[key])
    return kind(**given)


def _value(kind: type, key: str, text: str, default: object) -> object:
    try:
        if isinstance(default, bool) and text.lower() in ("true", "false"):
            return text.lower() == "true"
        if isinstance(default, (int, float)) and not isinstance(default, bool):
            return float(text) if isinstance(default, float) or "." in text else int(text)
        if isinstance(default, bool):
            raise ValueError
    except ValueError:
        wanted = "true or false" if isinstance(default, bool) else "a number"
        raise AdaptError(f"{kind.__name__} has {key}={text!r}", fix=f"{key} is {wanted}, such as {default}") from None
    names = text.split("+")
    is_list = isinstance(default, tuple) or default == "all-linear"
    return names if len(names) > 1 or is_list and text != "all-linear" else text
