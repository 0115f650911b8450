"""Ready model builders and published sizes. `build("llama3-8b", batch=64, seq=2048)` makes one; see registry.py."""

from .registry import build, check, names, resolve

__all__ = ["build", "check", "names", "resolve"]
