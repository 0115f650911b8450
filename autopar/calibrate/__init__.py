"""Measures the machine that it runs on and writes a hardware profile: `autopar calibrate`.

measure.py      what one process measures: products, a copy, launches, collectives, both at once
launch.py       starts the processes, waits for them, ends them
fit.py          numbers that a planner needs from what was measured
profile.py      the profile as a table, and as TOML or JSON
fingerprint.py  where it was measured, and whether that is here
"""

from .fingerprint import fingerprint, stale
from .launch import measurements
from .profile import text, to_profile, to_table

__all__ = ["fingerprint", "measurements", "stale", "text", "to_profile", "to_table"]
