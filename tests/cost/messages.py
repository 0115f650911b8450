"""The textbooks' all-reduce algorithms message by message on numpy vectors, each step counted.

A step is a dict {(source, target): message}; all messages of a step are on their way at once. An algorithm takes one
vector a node and returns each node's result with the network that carried it.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

import numpy as np

Messages = dict[tuple[int, int], np.ndarray]


@dataclass
class Network:
    """Counts what `deliver` carries."""

    steps: list[dict[tuple[int, int], int]] = field(default_factory=list)

    def deliver(self, messages: Messages) -> Messages:
        self.steps.append({pair: message.nbytes for pair, message in messages.items()})
        return {pair: message.copy() for pair, message in messages.items()}

    @property
    def total_bytes(self) -> int:
        return sum(sum(step.values()) for step in self.steps)

    def node_bytes(self, node: int) -> int:
        """Return the bytes that pass the node's link one after the other: the larger of sent and received, a step."""
        total = 0
        for step in self.steps:
            sent, received = defaultdict(int), defaultdict(int)
            for (source, target), bytes_ in step.items():
                sent[source] += bytes_
                received[target] += bytes_
            total += max(sent[node], received[node])
        return total

    @property
    def max_node_bytes(self) -> int:
        return max(self.node_bytes(node) for node in {node for step in self.steps for pair in step for node in pair})

    @property
    def offsets(self) -> list[set[int]]:
        """Return for each step how far apart the nodes are that talk."""
        return [{abs(a - b) for a, b in step} for step in self.steps]


def parameter_server(vectors: list[np.ndarray]) -> tuple[list[np.ndarray], Network]:
    network, server = Network(), len(vectors)
    pushed = network.deliver({(i, server): v for i, v in enumerate(vectors)})
    total = sum(pushed.values())
    pulled = network.deliver({(server, i): total for i in range(server)})
    return [pulled[server, i] for i in range(server)], network


def sequential(vectors):
    network, server = Network(), len(vectors)
    total = sum(network.deliver({(i, server): v})[i, server] for i, v in enumerate(vectors))
    return [network.deliver({(server, i): total})[server, i] for i in range(server)], network


def ring(vectors):
    network, n = Network(), len(vectors)
    blocks = [np.array_split(v.copy(), n) for v in vectors]
    for phase, add in ((0, True), (1, False)):
        for step in range(n - 1):
            sent = {(i, (i + 1) % n): blocks[i][(i + phase - step) % n] for i in range(n)}
            for (i, target), block in network.deliver(sent).items():
                at = (i + phase - step) % n
                blocks[target][at] = blocks[target][at] + block if add else block
    return [np.concatenate(b) for b in blocks], network


def parallel(vectors):
    network, n = Network(), len(vectors)
    arrived = network.deliver({(i, j): vectors[i] for i in range(n) for j in range(n) if i != j})
    return [vectors[j] + sum(arrived[i, j] for i in range(n) if i != j) for j in range(n)], network


def _folded(vectors, exchange):
    """`exchange` among a power of two of the nodes, the others handing in before and taking the result after."""
    network, n = Network(), len(vectors)
    p = 1 << (n.bit_length() - 1)
    held = [v.copy() for v in vectors]
    if n > p:
        for (_, target), v in network.deliver({(p + i, i): held[p + i] for i in range(n - p)}).items():
            held[target] = held[target] + v
    held[:p] = exchange(network, held[:p])
    if n > p:
        for (_, target), v in network.deliver({(i, p + i): held[i] for i in range(n - p)}).items():
            held[target] = v
    return held, network


def recursive_doubling(vectors):
    def exchange(network, held):
        offset = 1
        while offset < len(held):
            arrived = network.deliver({(i, i ^ offset): held[i] for i in range(len(held))})
            held = [held[i] + arrived[i ^ offset, i] for i in range(len(held))]
            offset *= 2
        return held

    return _folded(vectors, exchange)


def halving_doubling(vectors):
    def exchange(network, held):
        p, size = len(held), len(held[0])
        low, high, offset = [0] * p, [size] * p, 1
        while offset < p:  # each keeps the half of its range that its bit says, and adds the partner's
            middle = [(low[i] + high[i]) // 2 for i in range(p)]
            keeps_upper = [bool(i & offset) for i in range(p)]
            given = [(low[i], middle[i]) if keeps_upper[i] else (middle[i], high[i]) for i in range(p)]
            arrived = network.deliver({(i, i ^ offset): held[i][start:stop] for i, (start, stop) in enumerate(given)})
            for i in range(p):
                low[i], high[i] = (middle[i], high[i]) if keeps_upper[i] else (low[i], middle[i])
                held[i][low[i] : high[i]] += arrived[i ^ offset, i]
            offset *= 2
        while offset > 1:  # and back: each hands over its whole range
            offset //= 2
            arrived = network.deliver({(i, i ^ offset): held[i][low[i] : high[i]] for i in range(p)})
            ranges = [(low[i ^ offset], high[i ^ offset]) for i in range(p)]
            for i, (start, stop) in enumerate(ranges):
                held[i][start:stop] = arrived[i ^ offset, i]
                low[i], high[i] = min(low[i], start), max(high[i], stop)
        return held

    return _folded(vectors, exchange)


ALGORITHMS = {
    f.__name__: f for f in (parameter_server, sequential, ring, parallel, recursive_doubling, halving_doubling)
}
