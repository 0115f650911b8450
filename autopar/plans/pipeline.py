"""Say for a plan what its micro-batches and stages are: where the stages begin, which schedule they follow, and what
each of them costs.

A stage is a program on the mesh without the pipeline's axis; the plan's sharding is over that mesh, for one
micro-batch. Without an axis pp there is one stage, on all devices; with one micro-batch too, the step is one program.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache

from ..errors import PipelineError, StageError
from ..ir.mesh import Mesh
from ..schedule.actions import Schedule
from ..schedule.catalogue import KINDS, Kind, canonical, make
from ..schedule.pairs import in_pairs
from ..schedule.play import play
from ..schedule.played import Played

AXIS = "pp"
ALONE = "device"  # the axis of a stage that is one device


def sizes_of(samples: int, micro_batches: int) -> tuple[int, ...]:
    """Return the samples of each of the micro-batches of a batch: equal ones, or the first ones with one more than the
    others."""
    least, more = divmod(samples, micro_batches)
    return (least + 1,) * more + (least,) * (micro_batches - more)


@dataclass(frozen=True)
class StageCost:
    """One stage, of one device: seconds of a micro-batch's forward, of the gradients of its input and of its
    parameters, and of what it sends to the next stage and back; bytes of its parameters with gradients and optimizer
    state, of what a micro-batch saves for its backward, and at the peak of the step."""

    forward_seconds: float
    input_seconds: float
    weight_seconds: float
    transfer_seconds: float
    sent_bytes: float
    state_bytes: float
    activation_bytes: float
    peak_bytes: float
    parameters: int
    name: str = ""


@dataclass(frozen=True)
class Pairs:
    """Forwards beside the backwards of the micro-batches before (passes/pipeline/side_by_side.py). `turns`: ops at
    whose waits for rows of experts one of them gives way to the other. Of a step: `beside_seconds`, in which rows
    travel while the other may compute, and `gained_seconds`, by which it is shorter than one micro-batch after the
    other. `gained_by_stage`: by which a pair of the stage's forward and backward is shorter, where there are
    several."""

    turns: tuple[str, ...]
    beside_seconds: float
    gained_seconds: float
    gained_by_stage: tuple[float, ...] = ()


@dataclass(frozen=True)
class Pipeline:
    """`ranks` devices along `axis`, one where the mesh has no such axis; stages begin at the forward ops `cuts`, in the
    graph of one of `micro_batches`, of which `row_chunks` that follow one another are chunks of the same rows' tokens.
    By stage: `costs`, of the largest micro-batch, or of a mean chunk of it, and `owners`, the parameters and buffers
    that it reads. `samples`: of the whole batch, 0 where all micro-batches are taken as equal. `attention_share`: of
    the seconds of a mean chunk, those of its attention, which has ever more keys to go over. `pairs`: how forwards run
    beside the backwards of micro-batches before, if they do."""

    axis: str = AXIS
    ranks: int = 1
    schedule: str = "1f1b"
    micro_batches: int = 1
    stages_per_rank: int = 1
    cuts: tuple[str, ...] = ()
    costs: tuple[StageCost, ...] = ()
    owners: tuple[tuple[str, ...], ...] = ()
    samples: int = 0
    row_chunks: int = 1
    attention_share: float = 0.0
    pairs: Pairs | None = None

    def __post_init__(self) -> None:
        if len(self.cuts) + 1 != self.ranks * self.stages_per_rank:
            raise StageError(
                f"{len(self.cuts) + 1} stages do not fill {self.ranks} ranks with {self.stages_per_rank} each"
            )

    @property
    def is_staged(self) -> bool:
        """Return whether there are several stages."""
        return bool(self.cuts)

    @property
    def is_one_program(self) -> bool:
        """Return whether a step is one micro-batch through one stage."""
        return not self.cuts and self.micro_batches == 1

    def mesh_of_stage(self, mesh: Mesh) -> Mesh:
        """Return the mesh of one stage."""
        return inside(mesh, self.axis)

    def pp_rank_of(self, coordinate: Mapping[str, int]) -> int:
        """Return the rank along the axis of a device at a coordinate of the whole mesh."""
        return coordinate[self.axis] if self.ranks > 1 else 0

    @property
    def orders(self) -> Schedule:
        """Return the actions of all ranks. Raise StrategyError for a schedule that there is not."""
        kind = KINDS[canonical(self.schedule)]
        counts = self.ranks, self.micro_batches, self.stages_per_rank, self.row_chunks
        return _made(self.schedule, kind, *counts, self.pairs is not None)

    @property
    def shares(self) -> tuple[float, ...]:
        """Return what each micro-batch takes of the seconds of the largest, or of a mean chunk of it: work is in
        proportion to samples, and that of a causal attention to the keys up to a chunk's own."""
        chunks, rows = self.row_chunks, self.micro_batches // self.row_chunks
        sizes = sizes_of(self.samples, rows) if self.samples else (1,) * rows
        keys = [(2 * chunk + 1) / chunks for chunk in range(chunks)]  # of the mean chunk's
        of_chunk = [1 + self.attention_share * (more - 1) for more in keys]
        return tuple(size / sizes[0] * share for size in sizes for share in of_chunk)

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages of a rank along the axis."""
        return self.orders.stages_of(rank)

    @property
    def balance(self) -> float:
        """Return the seconds of the slowest stage divided by those of the mean one."""
        times = [c.forward_seconds + c.input_seconds + c.weight_seconds for c in self.costs]
        return max(times) * len(times) / sum(times) if sum(times) else 1.0

    def played(self) -> Played:
        """Return the step as it is predicted."""
        c = self.costs
        return play(
            self.orders,
            [x.forward_seconds for x in c],
            [x.input_seconds for x in c],
            [x.weight_seconds for x in c],
            [x.transfer_seconds for x in c[:-1]],
            shares=self.shares,
            gained_seconds=self.gained_by_stage,
        )

    @property
    def gained_by_stage(self) -> tuple[float, ...]:
        """Return by stage the seconds by which a pair of its forward and backward is shorter than both."""
        return (self.pairs and self.pairs.gained_by_stage) or (0.0,) * (len(self.cuts) + 1)


@lru_cache(maxsize=64)
def _made(
    name: str, kind: Kind, ranks: int, micro_batches: int, stages_per_rank: int, row_chunks: int, pairs: bool
) -> Schedule:
    """Make a schedule once for each kind that has the name: a user may put another in its place."""
    made = make(name, ranks, micro_batches, stages_per_rank, row_chunks=row_chunks)
    return in_pairs(made) if pairs else made


def axis_of(mesh: Mesh) -> str | None:
    """Return the pipeline's axis: the one that is named pp, if it has more than one device; else None."""
    return AXIS if mesh.axis_sizes.get(AXIS, 1) > 1 else None


def check_staged(
    mesh: Mesh, schedule: str | Schedule | None, stages_per_rank: int | None, sequence_chunks: int | None = None
) -> None:
    """Raise PipelineError for what only stages have, if the mesh has no axis for them, and for no number of chunks."""
    if sequence_chunks is not None and (type(sequence_chunks) is not int or sequence_chunks < 1):
        raise PipelineError(
            f"sequence_chunks is {sequence_chunks!r}", fix="give a whole number of chunks from 1 on, or leave it out"
        )
    if AXIS not in mesh.names and sequence_chunks not in (None, 1):
        raise PipelineError(
            f"chunks of a sequence follow one another through stages along an axis {AXIS}, which {mesh} has not",
            fix=f"name one, such as {AXIS}=2,{mesh}, or leave sequence_chunks out",
        )
    if AXIS not in mesh.names and (schedule not in (None, "auto") or stages_per_rank is not None):
        raise PipelineError(
            f"a schedule, or stages a rank, are for a mesh with an axis {AXIS}, not {mesh}",
            fix=f"name one, such as {AXIS}=2,{mesh}, or leave them out",
        )


def inside(mesh: Mesh, axis: str = AXIS) -> Mesh:
    """Return the mesh of one stage: without the pipeline's axis, or one device if there is no other; the same mesh if
    it has no such axis of more than one device."""
    if mesh.axis_sizes.get(axis, 1) == 1:
        return mesh
    left = [(n, s) for n, s in zip(mesh.names, mesh.sizes) if n != axis] or [(ALONE, 1)]
    return Mesh(*map(tuple, zip(*left)))


def rank_inside(mesh: Mesh, coordinate: Mapping[str, int]) -> int:
    """Return the rank, in the mesh of a stage, of a device at `coordinate` of the whole one."""
    rank = 0
    for name, size in zip(mesh.names, mesh.sizes):
        rank = rank * size + coordinate.get(name, 0)
    return rank
