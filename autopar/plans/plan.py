"""The plan: everything the planner decided for one model, mesh and hardware, as frozen data.

`print(plan)` is stable text (autopar/plans/text.py), `plan.save(path)` and `Plan.load(path)` are JSON with a
version, a content hash and the fingerprint of the graph that it was made for. `plan.sharding` is what the lowering
reads.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import AutoparError, PlanFormatError, PlanIncompatible
from ..ir.mesh import Mesh
from ..schedule import catalogue
from . import file
from .file import MEMORY_KINDS, VERSION, Json
from .pipeline import Pipeline, StageCost
from .program import DecidedProgram
from .sharding import Sharding
from .sharding_data import sharding_from_json, sharding_to_json
from .tiled import TiledLoss

if TYPE_CHECKING:
    from torch import fx


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
    by a device under balanced routing; `gathered_bytes`: if all devices got all tokens instead."""

    load: float
    worst_peak_bytes: float
    sent_bytes: float
    gathered_bytes: float


@dataclass(frozen=True)
class Flops:
    """The FLOPs of a step by the model's mathematics, over all devices, most of them in `dtype`, in which a device does
    `peak_per_second` at best. `published`: the largest share of that in published runs on such devices, 0 if none is
    known."""

    model: float = 0.0
    dtype: str = "fp32"
    peak_per_second: float = 0.0
    published: float = 0.0


@dataclass(frozen=True)
class Plan:
    """See the module. Seconds are of one training step, the optimizer's included; bytes are a device's. A step is one
    call with the whole batch, of so many `samples`, which is cut into `micro_batches`; their gradients are reduced
    together if the plan `reduces_once`. Collectives are those of all micro-batches."""

    model: str
    mesh: Mesh
    hardware: str
    precision: str
    optimizer: str
    strategy: str
    memory_limit_bytes: float
    step_seconds: float
    compute_seconds: float
    communication_seconds: float
    recompute_seconds: float  # of compute; what is moved again for it is communication
    exposed_seconds: float  # of the step, what communication takes that no compute hides
    bound: float  # no plan in the search space takes fewer seconds
    gap: float
    peak_bytes: float
    memory: dict[str, float]  # the most that is alive of each kind
    at_peak: dict[str, float]  # and what is alive of it when all together are most
    collectives: tuple[Collective, ...]
    regions: tuple[Region, ...]
    alternatives: tuple[Alternative, ...]
    recomputed: tuple[str, ...]  # blocks of which the backward computes all again
    recomputed_selectively: tuple[str, ...]  # and those of which only some of it
    recomputed_kinds: tuple[str, ...]  # of which kinds of ops that some is, the most frequent first
    warnings: tuple[str, ...]
    layouts: dict[str, str]  # of every parameter and input, by its own name
    sharding: Sharding = field(repr=False)
    reduce_scatter: str = "native"
    bucket_bytes: float = 0.0  # parameters and gradients travel in collectives of about this size
    fingerprint: str = ""
    parameter_elements: int = 0  # of the whole model, quantized weights as if they were dequantized
    trained_elements: int = 0
    reduces_once: bool = False  # gradients of all micro-batches together, not of each
    overlaps: bool = False  # parameters are gathered while the graphs compute, a bucket ahead
    samples: int = 0
    meshes: tuple[MeshCandidate, ...] = ()  # best first; empty if the mesh was given
    batches: tuple[BatchCandidate, ...] = ()  # the smallest first; empty if the batch was given
    update_seconds: float = 0.0  # of the optimizer on the device
    offloaded: Offloaded = Offloaded()
    flops: Flops = Flops()
    program: DecidedProgram = DecidedProgram()
    state_dtype: str | None = None  # of the optimizer's tensors, if that is narrower than their parameter
    execution: str = "eager"  # or "compiled": fused by torch.compile, launches hidden (autopar/cost/compute.py)
    reduce_dtype: str | None = None  # gradients are added up over devices in this type if it is narrower than theirs
    outputs: tuple[Output, ...] = ()  # empty if all are whole on every device
    unmade_bytes: float = 0.0  # of outputs of all micro-batches, which are made when they are read; 0: they are kept
    tiled: tuple[TiledLoss, ...] = ()  # last layers whose logits are never whole
    packed: int = 0  # attentions among documents in a row, told apart by numbers and not by a mask of all pairs
    routing: Routing | None = None  # of experts whose rows are sent to them
    pipeline: Pipeline = Pipeline()  # the sharding is of one micro-batch, on the mesh of a stage
    planning_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        from .text import plan_text

        return plan_text(self)

    def to_json(self) -> Json:
        """Return plain data, without the time that planning took, so equal plans are equal bytes."""
        values = vars(self) | {
            "mesh": str(self.mesh), "sharding": sharding_to_json(self.sharding), "version": VERSION,
        }  # fmt: skip
        values.pop("planning_seconds")
        for name in ("reduce_dtype", "state_dtype", "outputs", "batches", "tiled", "packed", "routing", "unmade_bytes"):
            if not values[name]:
                values.pop(name)
        data: Json = json.loads(json.dumps(values, default=asdict))  # lists for tuples
        data["hash"] = file.content_hash(data)
        return data

    @property
    def micro_batches(self) -> int:
        """Return into how many micro-batches a batch is cut."""
        return self.pipeline.micro_batches

    @property
    def precision_text(self) -> str:
        """Return the precision, and what gradients are reduced in if that is another type."""
        return self.precision + (f", gradients reduced in {self.reduce_dtype}" if self.reduce_dtype else "")

    @property
    def execution_text(self) -> str:
        """Return how the graphs are priced to run."""
        return "op by op" if self.execution == "eager" else "compiled, launches hidden"

    @property
    def utilization(self) -> float:
        """Return the share of the devices' peak that the model's FLOPs make up (MFU), 0 if that is not known."""
        peak = self.mesh.devices * self.step_seconds * self.flops.peak_per_second
        return self.flops.model / peak if peak else 0.0

    @property
    def optimizer_text(self) -> str:
        """Return the optimizer, and what its state is kept in if that is another type than the parameters'."""
        return self.optimizer + (f" with state in {self.state_dtype}" if self.state_dtype else "")

    def decides_as(self, other: Plan) -> bool:
        """Return whether another plan has the decisions and the figures of this one, for whatever call."""
        return replace(self, fingerprint=other.fingerprint, samples=other.samples) == other

    @property
    def hash(self) -> str:
        """Return the hash of all that is decided, as plan files hold it."""
        return str(self.to_json()["hash"])

    def save(self, path: str | Path, key: str | bytes | None = None) -> None:
        """Write the plan as JSON; with a `key`, signed by it."""
        file.write(path, self.to_json(), key)

    @staticmethod
    def load(path: str | Path, key: str | bytes | None = None) -> Plan:
        """Return the plan of a file. Raise PlanFormatError if the file is not a plan of this version, PlanTampered if
        it was changed after it was written or, with a `key`, not signed by it. Nothing in the file is executed or
        imported."""
        return Plan._of(file.read(path, key), str(path))

    @staticmethod
    def from_json(data: object, name: str = "plan") -> Plan:
        """Return the plan of what `to_json` returned. Raise the errors of `load`."""
        return Plan._of(file.check(data, name), name)

    @staticmethod
    def _of(data: Json, name: str) -> Plan:
        fields = {k: v for k, v in data.items() if k not in ("version", "hash", "signature")}
        try:
            mesh = Mesh.parse(fields["mesh"])
            pipeline = _pipeline_from_json(fields["pipeline"], mesh)
            fields |= {
                "mesh": mesh,
                "collectives": tuple(Collective(**(c | {"axes": tuple(c["axes"])})) for c in fields["collectives"]),
                "regions": tuple(Region(**r) for r in fields["regions"]),
                "alternatives": tuple(Alternative(**a) for a in fields["alternatives"]),
                **{key: {k: fields[key][k] for k in MEMORY_KINDS if k in fields[key]} for key in ("memory", "at_peak")},
                "recomputed": tuple(fields["recomputed"]),
                "recomputed_selectively": tuple(fields["recomputed_selectively"]),
                "recomputed_kinds": tuple(fields["recomputed_kinds"]),
                "warnings": tuple(fields["warnings"]),
                "outputs": tuple(Output(**(o | {"shape": tuple(o["shape"])})) for o in fields.get("outputs", ())),
                "tiled": tuple(TiledLoss(**t) for t in fields.get("tiled", ())),
                "offloaded": Offloaded(**fields["offloaded"]),
                "flops": Flops(**fields.get("flops", {})),
                "program": DecidedProgram(**fields.get("program", {})),
                "routing": Routing(**fields["routing"]) if "routing" in fields else None,
                "pipeline": pipeline,
                "meshes": tuple(MeshCandidate(**m) for m in fields["meshes"]),
                "batches": tuple(BatchCandidate(**b) for b in fields.get("batches", ())),
                "sharding": sharding_from_json(fields["sharding"], pipeline.mesh_of_stage(mesh)),
            }
        except (ValueError, IndexError, AutoparError) as error:
            reason = error.message if isinstance(error, AutoparError) else error
            raise PlanFormatError(f"{name} lacks or misstates a field: {reason}", fix="plan again") from None
        return Plan(**fields)

    def check_fits(self, graph: fx.Graph, mesh: Mesh) -> None:
        """Raise PlanIncompatible if the plan was made for another mesh or another graph, or takes a decision that the
        graph does not allow."""
        from ..ir.graph import fingerprint  # of torch, which a plan is read and printed without
        from .check import check_decisions, check_tiled

        if self.mesh != mesh:
            raise PlanIncompatible(
                f"the plan was made for mesh {self.mesh}, not {mesh}", mesh=mesh, fix="plan again for this mesh"
            )
        found = fingerprint(graph)
        if found != self.fingerprint:
            raise PlanIncompatible(
                f"the plan was made for another model, input shape or torch version: {self.model} with graph "
                f"{self.fingerprint[:12]}, this is {found[:12]}",
                fix=f"plan again with this model and these example_inputs; this plan is for {self.samples} samples"
                if self.samples
                else "plan again with this model and these example_inputs",
            )
        if self.micro_batches == 1:  # else they are about the graph of a micro-batch (see autopar/compiler.py)
            check_decisions(graph, self.sharding)
            check_tiled(graph, [t.node for t in self.tiled])


def _pipeline_from_json(data: Json, mesh: Mesh) -> Pipeline:
    costs = tuple(StageCost(**c) for c in data["costs"])
    pipeline = Pipeline(
        **data | {"cuts": tuple(data["cuts"]), "costs": costs, "owners": tuple(map(tuple, data["owners"]))}
    )
    counts = {len(costs), len(pipeline.owners)}
    if mesh.axis_sizes.get(pipeline.axis, 1) != pipeline.ranks or counts - {0, len(pipeline.cuts) + 1}:
        raise ValueError("the pipeline does not match the mesh")
    catalogue.checked(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.stages_per_rank)
    return pipeline
