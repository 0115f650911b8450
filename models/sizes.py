"""Check what the sizes of a model must satisfy, refused with the numbers before a weight is made, or while too many
are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..errors import ModelError

MOST_LAYERS = 10_000
MOST_MODULES = 200_000  # that a model is made of; with an expert a module, a trillion parameters have some 120,000


def require_positive(config: object, *names: str) -> None:
    """Raise ModelError unless each named field of the config is a positive integer."""
    for name in names:
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"{name}={value!r} is not a positive integer", fix=f"set {name} to 1 or more")
        if name == "layers":
            require_few_layers(name, value)


def require_few_layers(name: str, value: int) -> None:
    """Raise ModelError for more layers than anybody waits for."""
    if value > MOST_LAYERS:
        raise ModelError(f"{name}={value} is more than {MOST_LAYERS:,}", fix=f"set {name} to fewer")


def require_divides(config: object, part: str, whole: str) -> None:
    """Raise ModelError unless field `part` divides field `whole`."""
    a, b = getattr(config, part), getattr(config, whole)
    if b % a:
        near = min((d for d in range(1, b + 1) if b % d == 0), key=lambda d: (abs(d - a), d))
        raise ModelError(f"{part}={a} does not divide {whole}={b}", fix=f"set {part}={near}, or another {whole}")


@contextmanager
def bounded() -> Iterator[None]:
    """Let models be made inside, but for those of more than MOST_MODULES modules, or that this machine has no memory
    for: they are a ModelError."""
    from torch.nn.modules.module import register_module_module_registration_hook

    made = 0

    def count(module, name: str, part) -> None:
        nonlocal made
        made += 1
        if made > MOST_MODULES:
            raise ModelError(f"the model has more than {MOST_MODULES:,} modules", fix="give it fewer layers")

    hook = register_module_module_registration_hook(count)
    try:
        yield
    except (MemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "allocate memory" not in str(error):
            raise
        raise ModelError(
            "the model or its batch is larger than the memory of this machine",
            fix="use smaller sizes, or plan it without weights: device='meta'",
        ) from error
    finally:
        hook.remove()
