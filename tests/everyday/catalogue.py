"""All scripts by name."""

from __future__ import annotations

from . import averages, classify, generate, language, loops, pairs, shards  # noqa: F401  they add their scripts
from .script import SCRIPTS  # noqa: F401
