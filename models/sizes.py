"""Check what the sizes of a model must satisfy, refused with the numbers before a weight is made."""

from __future__ import annotations

from ..errors import ModelError


def require_positive(config: object, *names: str) -> None:
    """Raise ModelError unless each named field of the config is a positive integer."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name}={value!r} is not a positive integer", fix=f"set {name} to 1 or more")


def require_divides(config: object, part: str, whole: str) -> None:
    """Raise ModelError unless field `part` divides field `whole`."""
    a, b = getattr(config, part), getattr(config, whole)
    if b % a:
        near = min((d for d in range(1, b + 1) if b % d == 0), key=lambda d: (abs(d - a), d))
        raise ModelError(f"{part}={a} does not divide {whole}={b}", fix=f"set {part}={near}, or another {whole}")
