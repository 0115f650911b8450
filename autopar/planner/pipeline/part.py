"""Add up the cost of one part of a cut model: its seconds by kind of work, and its bytes.

W, the part of the backward that may wait, is told apart from the rest of it (autopar/planner/pipeline/stage_costs.py).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace

from ...ir.block_order import block_of
from ..objective.loads import Load

FORWARD, INPUT, WEIGHT = "forward", "input", "weight"


@dataclass
class Work:
    """Seconds of a micro-batch: of compute, of recomputation, and of transfers, `every` micro-batch's and what one of a
    step alone carries (`once`)."""

    every: Load
    once: Load
    compute: float = 0.0
    recompute: float = 0.0

    @classmethod
    def empty(cls, streams: int) -> Work:
        """Return no work, on so many streams."""
        return cls(Load.empty(streams), Load.empty(streams))

    def __add__(self, other: Work) -> Work:
        return Work(
            self.every + other.every,
            self.once + other.once,
            self.compute + other.compute,
            self.recompute + other.recompute,
        )

    def apart(self) -> Work:
        """Return equal work, to which others may add."""
        return Work.empty(len(self.every.waited)) + self

    @property
    def moved(self) -> float:
        """Return the seconds of all transfers that every micro-batch makes, without copies to the host and back."""
        return self.every.total - self.every.host

    def seconds(self, overlap: float, is_once: bool = False) -> float:
        """Return what the busiest stream needs, as Evaluation.seconds counts a phase."""
        load = self.every + self.once if is_once else self.every
        return load.with_compute(self.compute + self.recompute).seconds(overlap)

    def once_seconds(self, overlap: float) -> float:
        """Return how much longer a micro-batch takes that also carries what is moved once a step."""
        return self.seconds(overlap, True) - self.seconds(overlap)


def no_work(streams: int) -> dict[str, Work]:
    """Return a part's work before anything is added, on so many streams."""
    return {kind: Work.empty(streams) for kind in (FORWARD, INPUT, WEIGHT)}


@dataclass
class Part:
    """One part. `work`: by FORWARD, INPUT and WEIGHT. `stretch`: how much longer a micro-batch takes as it is played
    than its busiest streams need. `saved_bytes`: what a micro-batch holds from
    its forward to its backward; `resident`: parameters, optimizer state and buffers, by kind; `computing_bytes`: copies
    of parameters in the type that computes; `retained_bytes`: those that are gathered once and stay through the step;
    `gradient_bytes`: shards of gradients, and `whole_bytes`: what they are more while they wait for their reduction;
    `transient_bytes`: the most that comes and goes while an op of the part runs; `reducing_bytes`: the same while
    gradients that waited are reduced; `output_bytes`: what a micro-batch gives of the call's outputs; `host_bytes`:
    what the host has of it meanwhile; `kept_bytes`: of keys and values that a chunk of a row leaves to later ones,
    `kept_sum_bytes`: of the sums of their gradients, `growing_bytes`: what the last chunk's attention takes more than a
    mean one's (see kept_keys.py). `sent`, `returned`: bytes of each tensor that goes on to the next part in the
    forward, and of each that comes back from there. `modules`: of its forward ops, in order. All bytes but the host's
    are a device's."""

    work: dict[str, Work] = field(default_factory=lambda: no_work(1))
    overlap: float = 0.0
    stretch: float = 1.0
    parameter_seconds: float = 0.0  # of a step, the optimizer's and of parameters on the host
    saved_bytes: float = 0.0
    resident: Counter = field(default_factory=Counter)
    computing_bytes: float = 0.0
    retained_bytes: float = 0.0
    gradient_bytes: float = 0.0
    whole_bytes: float = 0.0
    transient_bytes: float = 0.0
    reducing_bytes: float = 0.0
    output_bytes: float = 0.0
    host_bytes: float = 0.0
    kept_bytes: float = 0.0
    kept_sum_bytes: float = 0.0
    growing_bytes: float = 0.0
    parameters: int = 0
    sent: list[float] = field(default_factory=list)
    returned: list[float] = field(default_factory=list)
    modules: list[str] = field(default_factory=list)

    def apart(self) -> Part:
        """Return an equal part, to whose work others may add; what it lists is shared."""
        return replace(self, work={kind: work.apart() for kind, work in self.work.items()})

    @property
    def forward_seconds(self) -> float:
        """Return the seconds of a micro-batch's forward."""
        return self.stretch * self.work[FORWARD].seconds(self.overlap)

    @property
    def backward_seconds(self) -> float:
        """Return the seconds of a micro-batch's whole backward."""
        return self.stretch * (self.work[INPUT] + self.work[WEIGHT]).seconds(self.overlap)

    @property
    def weight_seconds(self) -> float:
        """Return those seconds of the backward that make gradients of weights."""
        return min(self.stretch * self.work[WEIGHT].seconds(self.overlap), self.backward_seconds)

    @property
    def once_seconds(self) -> float:
        """Return the seconds of a step that come once, for all micro-batches: what parameters that are gathered for all
        of them take beside the first forward, what gradients take to be reduced beside the last backward, and what is
        done to parameters."""
        return self.once_waited_seconds + self.parameter_seconds

    @property
    def once_waited_seconds(self) -> float:
        """Return the seconds of a step that transfers take that are made once, beside what is computed meanwhile."""
        forward, backward = self.work[FORWARD], self.work[INPUT] + self.work[WEIGHT]
        return forward.once_seconds(self.overlap) + backward.once_seconds(self.overlap)

    @property
    def once_moved(self) -> float:
        """Return the seconds of all transfers that a step makes once."""
        return sum(work.once.total for work in self.work.values())

    @property
    def input_seconds(self) -> float:
        """Return those seconds of the backward that the part before waits for."""
        return self.backward_seconds - self.weight_seconds

    @property
    def resident_bytes(self) -> float:
        """Return the bytes of parameters, optimizer state and buffers."""
        return sum(self.resident.values())

    @property
    def state_bytes(self) -> float:
        """Return the bytes that stay, whatever runs: several micro-batches' gradients are there all the time."""
        return self.resident_bytes + self.computing_bytes + self.retained_bytes + self.gradient_bytes + self.whole_bytes

    @property
    def name(self) -> str:
        """Return `h.0 to h.5`, the first and the last block."""
        blocks = list(dict.fromkeys(block_of(m) or m for m in self.modules))
        return " to ".join(dict.fromkeys((blocks[0], blocks[-1]))) if blocks else ""
