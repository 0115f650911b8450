"""Programs that do not hold yet, by what they wait for. Nothing is to be added; test_programs.py says which can go."""

from __future__ import annotations

_BY_REASON: dict[str, tuple[str, ...]] = {}
NOT_YET = {name: reason for reason, names in _BY_REASON.items() for name in names}
