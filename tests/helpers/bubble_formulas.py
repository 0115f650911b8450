"""Closed forms of idle time and memory, as the papers give them, to hold against a schedule that is played.

With p ranks, m micro-batches, v stages a rank, and F, I, W the seconds of all stages of one rank, B for F+I+W:

| schedule                | idle seconds a rank  | in its own window | in flight               | exact for            |
|-------------------------|----------------------|-------------------|-------------------------|----------------------|
| naive                   | (p-1) m B            | the same          | 1                       | all                  |
| gpipe                   | (p-1) B              | the same          | m                       | all                  |
| 1f1b                    | (p-1) B              | the same          | p-r on rank r           | all                  |
| interleaved_1f1b        | (p-1) B / v          | the same          | (v-1) p + 2 (p-1-r) + 1 | m a multiple of p    |
| zb_h1                   | (p-1) (F+I-W)        | the same          | p                       | m >= p, W <= F, I    |
| zb_h2                   | (p-1) max(F, F+I-2W) | (p-1) (F+I-2W)    | 2p-1                    | m >= 2p-1, W <= F, I |
| interleaved_zero_bubble | (p-1) (F+I-W) / v    | the same          | v p                     | as both              |
| zbv                     | (p-1) F / 2          | 0                 | 2p                      | m >= 2p-1, F = I = W |
| dualpipev               | (p-1) (F+I-W) / 2    | the same          | 2p+1                    | m >= 2p, F = I = W   |
| v_half                  | (p-1) B / 2          | the same          | 2 floor(p/2) + 2        | at most, F = I = W   |
| v_min                   | (p-1) B 2/3          | the same          | 2 ceil((p+2)/3)         | at most, F = I = W   |

Idle time is counted in the whole makespan or in the rank's own window (autopar/schedule/played.py says what for).
Memory is counted as `Played.peak` does, with 1 for each stage and micro-batch: divided by v it is in micro-batches of
the whole rank. It is never more than v m.

Sources: GPipe arXiv 1811.06965, section 2.3; 1F1B and interleaved arXiv 2104.04473, section 2.2; ZB-H1, ZB-H2 and ZB-V
arXiv 2401.10241, sections 2 and 6; V-Half and V-Min arXiv 2405.15362; DualPipeV arXiv 2412.19437, section 3.2.1, whose
F and B overlap: here they do not, so that the idle time is another one than the paper's.
"""

from __future__ import annotations

from autopar.schedule.catalogue import KINDS, canonical
from autopar.schedule.phases import round_size


def idle_seconds(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, forward: float = 1.0,
                 input_: float = 1.0, weight: float = 1.0, in_window: bool = False) -> float:  # fmt: skip
    """Return the seconds that a rank waits. `forward`, `input_`, `weight`: seconds of all stages of a rank together."""
    name, v = _canonical(name, stages_per_rank)
    batch, one_third = forward + input_ + weight, forward + input_ - weight
    by_name = {
        "naive": micro_batches * batch, "gpipe": batch, "1f1b": batch, "interleaved_1f1b": batch / v,
        "zb_h1": one_third, "zb_h2": max(0.0 if in_window else forward, one_third - weight),
        "interleaved_zero_bubble": one_third / v, "zbv": 0.0 if in_window else forward / v, "dualpipev": one_third / v,
        "v_half": batch / 2, "v_min": batch * 2 / 3,
    }  # fmt: skip
    return (ranks - 1) * by_name[name]


def bubble(name: str, ranks: int, micro_batches: int, stages_per_rank: int | None = None, forward: float = 1.0,
           input_: float = 1.0, weight: float = 1.0, in_window: bool = False) -> float:  # fmt: skip
    """Return idle time over total time: (p-1)/p for naive, (p-1)/(m+p-1) for gpipe and 1f1b, (p-1)/(v m+p-1) for
    interleaved_1f1b."""
    idle = idle_seconds(name, ranks, micro_batches, stages_per_rank, forward, input_, weight, in_window)
    return idle / (idle + micro_batches * (forward + input_ + weight))


def in_flight(name: str, ranks: int, micro_batches: int, rank: int = 0, stages_per_rank: int | None = None) -> int:
    """Return the most micro-batches that a rank holds, counted once for each of its stages."""
    name, v = _canonical(name, stages_per_rank)
    p, m = ranks, micro_batches
    kind = KINDS[name]
    if kind.in_flight is not None:
        return min(v * m, kind.in_flight(p, v, m))
    interleaved = (v - 1) * round_size(p, m) + 2 * (p - 1 - rank) + 1
    by_name = {"naive": 1, "gpipe": m, "1f1b": p - rank, "interleaved_1f1b": interleaved, "dualpipev": 2 * p + 1}
    return min(v * m, by_name[name])


def _canonical(name: str, stages_per_rank: int | None) -> tuple[str, int]:
    name = canonical(name)
    return name, stages_per_rank or KINDS[name].chunks or 2
