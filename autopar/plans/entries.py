"""The rows and figures that a plan lists beside its decisions."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Collective:
    """Collectives of one kind over the same axes in one phase: how many, bytes a device sends, predicted seconds."""

    kind: str
    axes: tuple[str, ...]
    phase: str
    count: int
    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class Region:
    """One row of the plan's table: a module, or `copies` equal ones, with layouts and costs (of all copies
    together)."""

    name: str
    copies: int
    ops: int
    weights: str
    activations: str
    compute_seconds: float
    communication_seconds: float
    bytes_: float
    collectives: dict[str, int]


@dataclass(frozen=True)
class Alternative:
    """An expert strategy costed by the same model, with what makes it fit: micro-batches, blocks that compute something
    again, offload. `note` says why there is no number. `mesh` and `schedule`: of a pipeline beside a plan without
    stages, on the same devices."""

    name: str
    step_seconds: float | None
    communication_seconds: float | None
    peak_bytes: float | None
    fits: bool
    note: str = ""
    micro_batches: int = 1
    recomputed_blocks: int = 0
    offload: str = "none"
    mesh: str = ""
    schedule: str = ""

    @property
    def label(self) -> str:
        """Return the name that texts have for it."""
        return f"{self.name} on {self.mesh}" if self.mesh else self.name


@dataclass(frozen=True)
class Output:
    """An output of a call, of global `shape`: bytes that a device sends and predicted seconds where it is read, and so
    gathered, which is no part of a step."""

    name: str
    shape: tuple[int, ...]
    layout: str
    wire_bytes: float
    seconds: float


@dataclass(frozen=True)
class StageSharding:
    """Stages of a pipeline that are sharded alike, and what is sharded otherwise in others: `layouts`, by what they are
    of."""

    stages: tuple[int, ...]
    layouts: dict[str, str]


@dataclass(frozen=True)
class MeshCandidate:
    """A mesh of a search over meshes: no plan for it takes less than `bound` seconds. `note` says why it was not
    searched on."""

    mesh: str
    bound: float
    step_seconds: float | None
    peak_bytes: float | None
    gap: float | None
    note: str = ""


@dataclass(frozen=True)
class BatchCandidate:
    """A batch of a search for the most tokens a second; without seconds no plan for it fits. `tokens`: of a step, as
    many as `samples` where inputs are no sequences of integers."""

    samples: int
    tokens: int
    step_seconds: float | None
    peak_bytes: float | None

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens of all devices a second; 0 where nothing fits."""
        return self.tokens / self.step_seconds if self.step_seconds else 0.0


@dataclass(frozen=True)
class Offloaded:
    """The part of a plan that is on the host: how many parameters, bytes for each device (gradients and optimizer state
    included), and seconds of a step for copies to the device and back and for the optimizer there."""

    parameters: int = 0
    host_bytes: float = 0.0
    copy_seconds: float = 0.0
    optimizer_seconds: float = 0.0

    @property
    def seconds(self) -> float:
        """Return the seconds of a step that the host and the way to it take."""
        return self.copy_seconds + self.optimizer_seconds


@dataclass(frozen=True)
class Routing:
    """Rows of experts that are where their experts are. `load`: rows that the busiest device is assumed to get over the
    mean of all; `worst_peak_bytes`: its peak if it gets all rows of every layer, 0 of stages. `sent_bytes`: of a step,
    by a device under balanced routing; `gathered_bytes`: if all devices got all tokens instead. `beside_seconds`: in
    which rows are on their way while products are computed, of a step, in stages of the mean rank; `gained_seconds`: by
    which the step is shorter so than if they were waited for at once."""

    load: float
    worst_peak_bytes: float
    sent_bytes: float
    gathered_bytes: float
    beside_seconds: float = 0.0
    gained_seconds: float = 0.0


@dataclass(frozen=True)
class ExpertCopies:
    """The cost of copies of hot experts' matrices. `load`: of the busiest device without them; `sent_bytes`: that a
    device sends in a step for copies and sums of their gradients, which take `seconds`, and `held_bytes` for those of
    one product."""

    load: float
    sent_bytes: float
    held_bytes: float
    seconds: float


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a step by the model's mathematics, over all devices, most of them in `dtype`, in which a device does
    `peak_per_second` at best. `published`: the largest share of that in published runs on such devices, 0 if none is
    known; `closed`: how many are of pairs of a query and a key that a causal mask closes, which no kernel computes."""

    model: float = 0.0
    dtype: str = "fp32"
    peak_per_second: float = 0.0
    published: float = 0.0
    closed: float = 0.0

    def times(self, share: float) -> Flops:
        """Return those of so many times the step."""
        return replace(self, model=share * self.model, closed=share * self.closed)
