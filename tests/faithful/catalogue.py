"""All programs, by topic and by name."""

from __future__ import annotations

from importlib import import_module

from .program import Program

TOPICS = (
    "state", "statistics", "attributes", "memories", "gradients", "losses", "inputs", "outputs", "modes", "grad_modes",
    "hooks", "randomness", "seeding", "functions", "layers", "training", "saving", "containers", "huggingface",
    "threads",
)  # fmt: skip
PROGRAMS: dict[str, Program] = {}
for topic in TOPICS:
    PROGRAMS |= getattr(import_module(f".{topic}", __package__), topic).programs


def chosen(patterns: list[str]) -> list[Program]:
    """Those whose name starts with, or has in it, one of the patterns; all without a pattern."""
    return [p for name, p in PROGRAMS.items() if not patterns or any(pattern in name for pattern in patterns)]
