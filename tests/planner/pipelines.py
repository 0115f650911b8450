"""Chains of segments at random, for the tests of the stage cut."""

from __future__ import annotations

import numpy as np

from autopar.planner.pipeline.model import RecomputeOption, Segment, Shared


def chain(rng: np.random.Generator, length: int, most_levels: int = 3, integer: bool = False) -> list[Segment]:
    """Pieces of up to four kinds with up to `most_levels` levels, slower ones with fewer bytes (not always convex)."""
    kinds = []
    for k in range(int(rng.integers(1, 5))):
        seconds, bytes_, levels = rng.integers(1, 20, 2), int(rng.integers(10, 60)), []
        for _ in range(int(rng.integers(1, most_levels + 1))):
            levels.append(RecomputeOption(float(seconds[0]), float(seconds[1]), bytes_))
            seconds, bytes_ = seconds + rng.integers(0, 10, 2), max(1, bytes_ - int(rng.integers(5, 25)))
        if not integer:
            levels = [
                RecomputeOption(l.forward_seconds * 0.137, l.backward_seconds * 0.211, l.activation_bytes)
                for l in levels
            ]
        sends = tuple(float(x) for x in rng.integers(0, 4, 2))
        numbers = (int(x) for x in rng.integers(0, 30, 3))
        kinds.append(Segment(f"kind{k}", tuple(levels), *numbers, sends, bool(rng.random() < 0.85)))
    return [kinds[int(k)] for k in rng.integers(0, len(kinds), length)]


def pairs(rng: np.random.Generator, segments: list[Segment]) -> list[Shared]:
    """None, one or two parameters shared by two segments each."""
    found = []
    for _ in range(int(rng.integers(0, 3))):
        first, second = sorted(rng.choice(len(segments), 2, replace=False).tolist())
        most = min(segments[first].state_bytes, segments[second].state_bytes) // 2
        found.append(Shared(first, second, int(rng.integers(0, most + 1)), float(rng.integers(0, 40))))
    return found
