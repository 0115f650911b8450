"""The all-reduce algorithms of the textbooks on equal links: steps, bytes of the busiest node, bytes in all.

With n nodes that each hold S bytes, the time is steps * latency + bytes of the busiest node / speed. A node sends and
receives at once; `max_node_bytes` counts what passes one after the other.

                      steps             busiest node       in all
    parameter_server  2                 2 n S              2 n S              all push to one more node, then pull
    sequential        2 n               2 n S              2 n S              the same, one worker after the other
    ring              2 (n - 1)         2 (n - 1) / n S    2 (n - 1) S        reduce-scatter, then all-gather, in a ring
    parallel          1                 (n - 1) S          n (n - 1) S        everyone sends to everyone
    recursive_doubling   log2 n         log2 n S           n log2 n S         vectors with the node 1, 2, 4, ... away
    halving_doubling     2 log2 n       2 (n - 1) / n S    2 (n - 1) S        halves, quarters, ... and back

Of the last two, n that is no power of two lets its n - p last nodes (p the power below) hand in their vectors first and
get the result last: two steps and 2 S bytes more. Sources: Li et al., "Scaling Distributed Machine Learning with the
Parameter Server", OSDI 2014; Thakur, Rabenseifner, Gropp, "Optimization of Collective Communication Operations in
MPICH", 2005.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class AllReduce:
    """One algorithm as functions: `steps(n)`, and bytes by n and the `size` in bytes of one node's vector."""

    steps: Callable[[int], int]
    max_node_bytes: Callable[[int, float], float]
    total_bytes: Callable[[int, float], float]

    def seconds(self, n: int, size, latency_seconds: float, bytes_per_second: float):
        """Return the seconds on equal links; 0 for one node."""
        if n == 1:
            return 0.0 * size
        return self.steps(n) * latency_seconds + self.max_node_bytes(n, size) / bytes_per_second


def power_below(n: int) -> int:
    """Return the largest power of two up to n."""
    return 1 << (n.bit_length() - 1)


def _log(n: int) -> int:
    return n.bit_length() - 1


def _folded(n: int) -> int:
    """Return the number of nodes that hand in first, as n is no power of two."""
    return n - power_below(n)


ALL_REDUCES = {
    "parameter_server": AllReduce(lambda n: 2, lambda n, size: 2 * n * size, lambda n, size: 2 * n * size),
    "sequential": AllReduce(lambda n: 2 * n, lambda n, size: 2 * n * size, lambda n, size: 2 * n * size),
    "ring": AllReduce(
        lambda n: 2 * (n - 1), lambda n, size: 2 * (n - 1) / n * size, lambda n, size: 2 * (n - 1) * size
    ),
    "parallel": AllReduce(lambda n: 1, lambda n, size: (n - 1) * size, lambda n, size: n * (n - 1) * size),
    "recursive_doubling": AllReduce(
        lambda n: _log(n) + 2 * (_folded(n) > 0),
        lambda n, size: (_log(n) + 2 * (_folded(n) > 0)) * size,
        lambda n, size: (power_below(n) * _log(n) + 2 * _folded(n)) * size,
    ),
    "halving_doubling": AllReduce(
        lambda n: 2 * _log(n) + 2 * (_folded(n) > 0),
        lambda n, size: (2 * (power_below(n) - 1) / power_below(n) + 2 * (_folded(n) > 0)) * size,
        lambda n, size: (2 * (power_below(n) - 1) + 2 * _folded(n)) * size,
    ),
}
