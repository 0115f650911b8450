"""Choose stages, the mesh inside of them and a micro-batch for so many devices; or no stages at all.

Every combination is a mesh pp x dp x cp x tp and a number of samples that a replica computes at once. What a sample
costs depends on cp and tp, hardly on pp: so some plans of a micro-batch of one sample for both, at rising prices of
memory, say how fast and how large all combinations with them are, by the formulas of schedules, with as much computed
again as the fullest rank must (planner/pipeline/model.py). The most promising combinations are searched
(autopar/planner/pipeline/search.py), the best of them is evaluated, and the plan is that or, if it is faster, the best
one without stages (planner/spmd/mesh_search.py). Of a batch of one sample stages are tried where nothing else fits.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ...cost.compute import flops_of
from ...errors import AutoparError, MicroBatchError, StageError, StrategyError
from ...frontend.export import Captured
from ...ir.graph import is_op
from ...ir.mesh import Mesh
from ...plans.entries import MeshCandidate
from ...plans.pipeline import AXIS
from ...schedule.actions import Schedule
from ...schedule.catalogue import KINDS
from ..objective.checkpoint_min_cut import FULL
from ..problem.offload import ACTIVATIONS, NONE
from ..solver.minimize import BeyondCutoff
from ..spmd import mesh_search
from ..spmd.batch import samples_of
from ..spmd.fixed_recompute import AUTO
from ..spmd.plan_options import PlanOptions
from ..spmd.planned import Planned
from .candidate import Candidate
from .evaluate import timing_of
from .on_host import with_values_on_host
from .plan import check_solver, described, kinds_of, promise, with_plans_by_stage
from .search import Estimate, PipelineSearch

DOMINATED = ("1f1b", "interleaved_1f1b")  # zero-bubble schedules take no more, as they are priced
SAMPLES = (1, 2, 4)  # of a replica at once that are tried
MOST_CONTEXT = 16  # devices that share a sequence
MOST_SEARCHED = 4  # combinations
MOST_EVALUATED = 6  # estimates, until none that is left is faster than the best that fits
DOUBT = 1.05  # times the seconds of the best plan: what is guessed to take longer is not searched

Report = Callable[[str], None]


@dataclass(frozen=True)
class Combination:
    """A mesh with stages, and what a replica computes at once."""

    mesh: Mesh
    samples: int  # of a replica at once
    micro_batches: int

    @property
    def stages(self) -> int:
        """Return the ranks along the pipeline."""
        return self.mesh.size(AXIS)


def combinations(devices: int, node: int, batch: int, most_stages: int) -> list[Combination]:
    """Return all combinations that are considered: tp inside of a node, stages the farthest apart, and a batch that
    replicas can share. Where it has too few samples for that, or with the largest tp for as many micro-batches as
    there are stages, several devices of a replica share its sequence over an axis cp."""
    found = []
    inner = [t for t in range(1, node + 1) if node % t == 0 and devices % t == 0]
    for tp in inner:
        counts = [p for p in range(2, min(most_stages, devices // tp) + 1) if devices // tp % p == 0]
        plain = [(p, 1) for p in counts if batch % (devices // tp // p) == 0]
        shared = [(p, _context_ways(devices // tp // p, batch, p if plain else 1)) for p in counts]
        some = shared if tp == inner[-1] or not plain else []
        for stages, cp in dict.fromkeys([*plain, *((p, c) for p, c in some if c)]):
            replicas = devices // tp // stages // cp
            axes = [(AXIS, stages), ("dp", replicas), ("cp", cp), ("tp", tp)]
            mesh = Mesh(*map(tuple, zip(*((name, size) for name, size in axes if size > 1 or name == AXIS))))
            samples = [b for b in SAMPLES if batch % (replicas * b) == 0]
            found += [Combination(mesh, b, batch // (replicas * b)) for b in samples]
    return found


def _context_ways(devices: int, batch: int, least: int) -> int | None:
    """Return by how many devices sequences are shared, so that the others cut the batch evenly into `least`
    micro-batches or more; None if no number does that."""
    ways = (c for c in range(1, min(devices, MOST_CONTEXT) + 1) if devices % c == 0)
    return next((c for c in ways if batch % (devices // c) == 0 and batch * c // devices >= least), None)


@dataclass(frozen=True)
class Point:
    """The cost of a micro-batch of one sample a replica on the devices that one stage has: seconds and saved
    bytes of all stages, and the same with all computed again; `state_bytes` of all stages. `left`: the share of a
    bubble that weight gradients cannot fill, (F + I - W) / (F + I + W) by Qi et al., arXiv 2401.10241, with half of the
    backward's compute as W."""

    seconds: float
    saved_bytes: float
    full_seconds: float
    full_saved_bytes: float
    state_bytes: float
    left: float

    @staticmethod
    def of(planned: Planned) -> Point:
        """Return what a plan of a micro-batch of one sample costs, as it is and with all computed again."""
        e, full = planned.evaluation, planned.solver.blocks.at_level(planned.evaluation, FULL)
        kinds = [v.kind for v in planned.problem.vertices]
        retained = sum(
            bytes_ for (v, _, _), bytes_ in e.saved.items() if kinds[v] == "parameter"
        )  # once for all micro-batches
        state = e.resident_bytes + e.gradient_bytes + e.whole_gradient_bytes + retained
        left = 1 - e.compute["backward"] / max(e.seconds, 1e-30)
        return Point(e.seconds, e.saved_bytes - retained, full.seconds, full.saved_bytes - retained, state, left)

    def guess(self, one: Combination, kinds: Sequence[tuple[str, int]], room_bytes: float, segments: int) -> float:
        """Guess the seconds of a step with the best of some schedules, infinite if it cannot fit. Of so many equal
        segments the slowest rank has a whole number in each of its stages."""
        p, m = one.stages, one.micro_batches
        best = math.inf
        for kind, v in kinds:
            if p * v > segments:
                continue
            timing = timing_of(kind, p, v, self.left)
            held = timing.in_flight(p, 0, m) * one.samples / p
            excess = self.state_bytes / p + held * self.saved_bytes - room_bytes
            freed = max(held * (self.saved_bytes - self.full_saved_bytes), 1.0)
            if excess <= freed:
                recompute = max(0.0, excess / freed) * (self.full_seconds - self.seconds)
                seconds, share = (self.seconds + recompute) * one.samples, v * math.ceil(segments / (p * v)) / segments
                best = min(
                    best, timing.step_seconds([seconds * share] + [seconds * (1 - share) / (p - 1)] * (p - 1), m)
                )
        return best


def search(
    captured: Captured,
    devices: int,
    options: PlanOptions,
    name: str = "model",
    schedule: str | Schedule = AUTO,
    stages_per_rank: int | None = None,
    report: Report = lambda text: None,
    is_free: bool = False,
) -> Planned:
    """Return the best plan over all meshes that are tried, with stages (alone, if a schedule is asked for) and without,
    which its `meshes` list; with `is_free` several micro-batches without stages are tried too. Raise what planning
    raises, if there is no plan for any."""
    check_solver(options)
    asked, flat, reported = schedule not in (None, AUTO) or stages_per_rank is not None, None, ()
    tour = _MeshSearch(captured, devices, options, name, _kinds(schedule, stages_per_rank), report)
    may_be_staged = options.strategy is None and options.micro_batches == 1
    may_be_staged &= options.offload in (NONE, ACTIVATIONS)  # parameters on the host are tried without stages alone
    is_last = not asked and tour.waits_for_each_stage
    if may_be_staged and not is_last:
        tour.run()
    refusal: AutoparError | None = tour.error if asked else None
    if not asked:
        cutoff = replace(options.search, cutoff_seconds=DOUBT * tour.seconds)
        try:
            flat = mesh_search.search(captured, devices, replace(options, search=cutoff), name, report, is_free)
            reported = flat.meshes
        except BeyondCutoff as error:
            reported = error.candidates
        except AutoparError as error:
            refusal = error
            if may_be_staged and is_last:
                tour.run()
    staged = tour.planned() if flat is None or tour.seconds < flat.plan.step_seconds else None
    if (
        staged is None and flat is None and refusal is None and not asked
    ):  # what was estimated does not fit when it is evaluated
        flat = mesh_search.search(captured, devices, options, name, report, is_free)
        reported = flat.meshes
    candidates = tuple(sorted((*reported, *tour.reported()), key=_order))
    if staged and (flat is None or staged.plan.step_seconds < flat.plan.step_seconds):
        return replace(staged, staged=replace(staged.stages, plan=replace(staged.plan, meshes=candidates)))
    if flat is None:
        raise refusal or StageError(
            f"no mesh of {devices} devices was found with stages that fit this model and batch",
            fix="use another batch, more devices, or leave the schedule out",
        )
    return replace(flat, meshes=candidates)


class _MeshSearch:
    """Searches of combinations, and the best estimates so far."""

    def __init__(
        self,
        captured: Captured,
        devices: int,
        options: PlanOptions,
        name: str,
        kinds: list[tuple[str, int]],
        report: Report,
    ):
        self.captured, self.options, self.name, self.report = captured, replace(options, baselines=False), name, report
        self.kinds, self.batch = kinds, samples_of(captured.signature)
        self.room = float(options.memory_bytes or options.hardware.memory_bytes) - options.hardware.reserve_bytes
        node = options.hardware.links[0].devices or devices
        self.segments = _segments(captured)
        self.every = combinations(devices, node, self.batch, self.segments // 2)
        self.found: dict[Combination, list[Estimate]] = {}
        self.error: AutoparError | None = None

    @property
    def seconds(self) -> float:
        """Return the seconds of the best estimate that fits, infinite if there is none."""
        return min((one.step_seconds for one in self._estimates() if one.fits), default=math.inf)

    @property
    def waits_for_each_stage(self) -> bool:
        """Return whether there is one micro-batch in all of them, so that one stage computes at a time: slower than all
        devices at once, and of use where nothing else fits."""
        return all(one.micro_batches == 1 for one in self.every)

    def run(self) -> None:
        """Search the combinations that promise most."""
        try:
            guesses = sorted(self._guesses(), key=lambda pair: (pair[0], str(pair[1].mesh), pair[1].samples))
            for guess, one in guesses[:MOST_SEARCHED]:
                if guess > DOUBT * self.seconds or guess == math.inf:
                    break
                self.found[one] = self._search(one).estimates()
        except MicroBatchError as error:
            self.error = error

    def planned(self) -> Planned | None:
        """Evaluate the best of what was searched and return the fastest that fits; None if nothing fits."""
        candidates: list[Candidate] = []
        for one in sorted((one for one in self._estimates() if one.fits), key=promise)[:MOST_EVALUATED]:
            fastest = min((t.evaluated.step_seconds for t in candidates if t.fits), default=math.inf)
            if one.step_seconds < fastest:
                candidates.append(one.search.evaluated(one))
        fitting = [t for t in candidates if t.fits]
        if not fitting:
            return None
        fastest = min(fitting, key=lambda t: t.evaluated.step_seconds).search
        own = [one for one in self._estimates() if one.search is fastest]
        fitting = [t for t in with_plans_by_stage(own, fitting) if t.fits]
        fitting = with_values_on_host(own, fitting)
        return described(fitting[0], fitting, self.captured, fitting[0].search.whole_mesh, [], self.batch)

    def reported(self) -> list[MeshCandidate]:
        """Return how each combination that was searched fared, by its best estimate."""
        rows = []
        for one, estimates in self.found.items():
            best = min(estimates, key=promise)
            note = f"{best.schedule}, {one.micro_batches} micro-batches" + ("" if best.fits else ", does not fit")
            gap = 1 - best.search.bound / best.step_seconds
            rows.append(MeshCandidate(str(one.mesh), best.search.bound, best.step_seconds, best.peak_bytes, gap, note))
        return rows

    def _estimates(self) -> list[Estimate]:
        return [e for estimates in self.found.values() for e in estimates]

    def _search(self, one: Combination) -> PipelineSearch:
        return PipelineSearch(
            self.captured, one.micro_batches, one.mesh, self.options, self.name, self.kinds, self.report
        )

    def _guesses(self) -> Iterator[tuple[float, Combination]]:
        """Iterate over every combination with the seconds of a step that it may take."""
        alike: dict[tuple[int, int], list[Combination]] = {}
        for one in self.every:
            sizes = one.mesh.axis_sizes
            alike.setdefault((sizes.get("cp", 1), sizes.get("tp", 1)), []).append(one)
        for own in alike.values():
            singles = [one for one in own if one.samples == 1]
            points = [Point.of(planned) for planned in self._search(singles[len(singles) // 2]).plans.at_prices()]
            yield from (
                (min(point.guess(one, self.kinds, self.room, self.segments) for point in points), one) for one in own
            )


def _kinds(schedule: str | Schedule, stages_per_rank: int | None) -> list[tuple[str, int]]:
    kinds = kinds_of(schedule, stages_per_rank)
    if given := KINDS[kinds[0][0]].given if len(kinds) == 1 else None:
        raise StrategyError(
            f"schedule {given.name} is for {given.ranks} ranks", fix=f"give a mesh with pp={given.ranks}"
        )
    return [one for one in kinds if one[0] not in DOMINATED] or kinds


def _segments(captured: Captured) -> int:
    """Return about how many segments a model can be cut into: two of each module of a list of
    equal blocks, or, without one, one of each
    op with FLOPs."""
    if captured.compact is not None:
        names = captured.compact.names
        return 2 * (names.first + (names.count - 1) * names.period)
    return sum(1 for n in captured.graph.nodes if is_op(n) and n.meta["phase"] == "forward" and flops_of(n))


def _order(one: MeshCandidate) -> tuple:
    return math.inf if one.step_seconds is None else one.step_seconds, one.bound, one.mesh
