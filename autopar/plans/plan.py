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
from .attentions import AttentionScheme
from .entries import (
    Alternative,
    BatchCandidate,
    Collective,
    ExpertCopies,
    Flops,
    MeshCandidate,
    Offloaded,
    Output,
    Region,
    Routing,
    StageSharding,
)
from .file import MEMORY_KINDS, VERSION, Json
from .pipeline import Pairs, Pipeline, StageCost
from .program import DecidedProgram
from .saved_on_host import SavedOnHost
from .sharding import Sharding
from .sharding_data import sharding_from_json, sharding_to_json
from .text import plan_text
from .tiled import TiledRegion

if TYPE_CHECKING:
    from torch import fx

# fields that a file leaves out where they say nothing
LEFT_OUT = (
    "reduce_dtype state_dtype outputs batches tiled packed fp8 attentions routing unmade_bytes saved_on_host "
    "beside_seconds shardings expert_capacity hot_experts expert_copies".split()
)


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
    saved_on_host: SavedOnHost | None = None  # of what the backward reads
    flops: Flops = Flops()
    program: DecidedProgram = DecidedProgram()
    state_dtype: str | None = None  # of the optimizer's tensors, if that is narrower than their parameter
    execution: str = "eager"  # or "compiled": fused by torch.compile, launches hidden (autopar/cost/compute.py)
    reduce_dtype: str | None = None  # gradients are added up over devices in this type if it is narrower than theirs
    outputs: tuple[Output, ...] = ()  # empty if all are whole on every device
    unmade_bytes: float = 0.0  # of outputs of all micro-batches, which are made when they are read; 0: they are kept
    tiled: tuple[TiledRegion, ...] = ()  # regions whose inner tensors are never whole
    packed: int = 0  # attentions among documents in a row, told apart by numbers and not by a mask of all pairs
    attentions: tuple[AttentionScheme, ...] = ()  # empty where no sequence is cut
    fp8: str = ""  # what computes in FP8 if the planner chose that, as autopar.FP8.parse reads it, or "none"
    beside_seconds: float = 0.0  # of communication, what loops hide beside products
    routing: Routing | None = None  # of experts whose rows are sent to them
    expert_capacity: float | None = None  # times the mean of rows that a device takes of experts in one round
    hot_experts: int = 0  # of each layer, whose matrices are copied to all devices in the place of their rows
    expert_copies: ExpertCopies | None = None  # what that costs
    pipeline: Pipeline = Pipeline()  # the sharding is of one micro-batch, on the mesh of a stage
    shardings: tuple[StageSharding, ...] = ()  # of stages; empty if all are sharded alike
    planning_seconds: float = field(default=0.0, compare=False)

    def __str__(self) -> str:
        return plan_text(self)

    def to_json(self) -> Json:
        """Return plain data, without the time that planning took, so equal plans are equal bytes."""
        values = vars(self) | {
            "mesh": str(self.mesh), "sharding": sharding_to_json(self.sharding), "version": VERSION,
        }  # fmt: skip
        values.pop("planning_seconds")
        for name in LEFT_OUT:
            if not values[name]:
                values.pop(name)
        data: Json = json.loads(json.dumps(values, default=asdict))  # lists for tuples
        if self.pipeline.pairs is None:
            data["pipeline"].pop("pairs")
        data["hash"] = file.content_hash(data)
        return data

    @property
    def row_chunks(self) -> int:
        """Return into how many chunks of their tokens rows are cut."""
        return self.pipeline.row_chunks

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
                "tiled": tuple(TiledRegion(**t) for t in fields.get("tiled", ())),
                "shardings": tuple(
                    StageSharding(tuple(s["stages"]), s["layouts"]) for s in fields.get("shardings", ())
                ),
                "attentions": tuple(AttentionScheme(**a) for a in fields.get("attentions", ())),
                "offloaded": Offloaded(**fields["offloaded"]),
                "saved_on_host": _saved_on_host(fields["saved_on_host"]) if "saved_on_host" in fields else None,
                "flops": Flops(**fields.get("flops", {})),
                "program": DecidedProgram(**fields.get("program", {})),
                "routing": Routing(**fields["routing"]) if "routing" in fields else None,
                "expert_copies": ExpertCopies(**fields["expert_copies"]) if "expert_copies" in fields else None,
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
        from .check import check_decisions, check_saved_on_host, check_tiled

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
            check_tiled(graph, self.tiled)
            check_saved_on_host(graph, self.saved_on_host)


def _saved_on_host(data: Json) -> SavedOnHost:
    return SavedOnHost(**data | {"values": tuple((name, output) for name, output in data["values"])})


def _pipeline_from_json(data: Json, mesh: Mesh) -> Pipeline:
    costs = tuple(StageCost(**c) for c in data["costs"])
    if pairs := data.get("pairs"):
        lists = {name: tuple(pairs[name]) for name in ("turns", "gained_by_stage") if name in pairs}
        data = data | {"pairs": Pairs(**pairs | lists)}
    pipeline = Pipeline(
        **data | {"cuts": tuple(data["cuts"]), "costs": costs, "owners": tuple(map(tuple, data["owners"]))}
    )
    counts = {len(costs), len(pipeline.owners)}
    if mesh.axis_sizes.get(pipeline.axis, 1) != pipeline.ranks or counts - {0, len(pipeline.cuts) + 1}:
        raise ValueError("the pipeline does not match the mesh")
    catalogue.checked(pipeline.schedule, pipeline.ranks, pipeline.micro_batches, pipeline.stages_per_rank)
    return pipeline
