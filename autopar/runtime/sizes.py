"""Find the sizes of a call that need no capture of their own: what all ranks decide together about programs that follow
sizes.

A call in another size than one before (a length, a last batch, both) is traced with the sizes open, and once at sizes
that tell most: the number of samples changes too, so that a last batch needs nothing more. From then on no call of this
family is traced, or planned: one that leaves remainders that were not met is lowered at two sizes, any other one costs
milliseconds. Where no program follows, each size is captured as any new call is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch.distributed as dist

from .._torch import OpenSizes
from ..codegen.follow_size import Differs, Sizes, is_telling
from ..codegen.sized_graphs import SizedGraphs
from ..errors import AutoparError
from ..frontend.call_signature import CallSignature
from ..plans.plan import Plan
from ..processes import agree
from .capture import Capture, Point, Traced
from .following import Family, Program, lines_of
from .following_pipeline import SizedPipeline
from .maker import Maker
from .sized_calls import Dims, batch_place, differing_dims, partners, resized, with_batch

TRIES = 4  # captures after which no family is looked for any more, if none was found
POINTS = (2, 3)  # sizes from which a program is made: three if two do not tell

_log = logging.getLogger("autopar")


class Served(NamedTuple):
    """Hold what runs a call that was not captured: its form, a capture of its family, the program and the sizes."""

    traced: Traced
    capture: Capture
    program: object
    step: Any  # a Step or a PipelineStep
    sizes: Sizes


class SizeFamilies:
    """The families of calls of one module, whose programs follow their sizes."""

    def __init__(self) -> None:
        self.known: list[Family] = []
        self.failures = 0

    def find(
        self, example: Callable[[], tuple], state: tuple, captures: Sequence[Capture], maker: Maker
    ) -> Served | None:
        """Return what serves a call without a capture of its own; None if nothing does. `example` gives the call on
        global shapes and the layouts that it fixes; `state`: as a Capture has it. All ranks call it together."""
        whole, fixed = agree.everywhere(example)
        signature, _ = CallSignature.of(*whole)
        served = self._serving(signature, fixed, state, maker)
        if served is None and self._extend(signature, fixed, state, captures, maker):
            served = self._serving(signature, fixed, state, maker)
        return served

    def _serving(self, signature: CallSignature, fixed: Mapping, state: tuple, maker: Maker) -> Served | None:
        if not self.known:
            return None

        def sizes_of_families() -> dict[int, Sizes]:
            found = {}
            for at, family in enumerate(self.known):
                base = family.base
                if base.state == state and base.traced.fixed == fixed and base.holds():
                    sizes = family.sizes(signature)
                    if sizes is not None and sizes not in family.failed:
                        found[at] = sizes
            return found

        everyone = agree.from_all(sizes_of_families)
        for at in sorted(set(everyone[0]).intersection(*everyone[1:])):
            family, sizes = self.known[at], everyone[0][at]
            program = self._program(family, sizes, maker)
            if program is not None:
                captured = replace(family.base.traced.captured, signature=signature)
                traced = replace(family.base.traced, captured=captured, content=None)
                return Served(traced, family.base, program.step, program.step.at(sizes), sizes)
        return None

    def _program(self, family: Family, sizes: Sizes, maker: Maker) -> Program | None:
        """Return the program of a family that serves some sizes, made if it is not there yet."""
        everyone = agree.from_all(lambda: [i for i, p in enumerate(family.programs) if p.serves(sizes)])
        if common := set(everyone[0]).intersection(*everyone[1:]):
            return family.programs[min(common)]
        reasons = ["no other sizes leave the same remainders"]
        for count in POINTS:
            chosen = agree.from_rank_zero(partial(family.points_for, sizes, count))
            if chosen is None or not all(self._is_lowered(family, at, maker) for at in chosen):
                break
            made: list[Program] = []

            def reason(chosen=chosen, made=made) -> str:
                try:
                    made.append(Program.of({at: family.points[at] for at in chosen}, family.batch))
                    return "" if made[0].serves(sizes) else "shards leave other remainders"
                except Differs as differs:
                    return str(differs)

            reasons = [text for text in agree.from_all(reason) if text]
            if not reasons:
                family.programs += made
                return made[0]
        family.failed.add(sizes)
        _tell(family.dims, reasons)
        return None

    def _is_lowered(self, family: Family, sizes: Sizes, maker: Maker) -> bool:
        """Return whether the call of a family at some sizes could be lowered, which is done now if it is not yet."""
        if sizes not in family.points:
            traced = agree.everywhere(lambda: family.at(sizes))
            point = maker.point(traced, family.base.plan)
            if point is not None:
                family.points[sizes] = point
        return sizes in family.points

    def _extend(
        self, signature: CallSignature, fixed: Mapping, state: tuple, captures: Sequence[Capture], maker: Maker
    ) -> bool:
        """Look for a family of the call and of a capture, which is traced at other sizes too. Return whether one was
        found."""

        def near() -> int | None:
            for at, capture in reversed([*enumerate(captures)]):
                may_follow = not capture.follows_size and capture.state == state and capture.traced.fixed == fixed
                if may_follow and capture.holds() and differing_dims(_form(capture), signature):
                    return at
            return None

        found = agree.from_all(near)
        if self.failures >= TRIES or found[0] is None or len({*found}) > 1:
            return False
        base = captures[found[0]]
        differing = differing_dims(_form(base), signature)
        assert differing is not None, "the capture is near"
        dims, at, wanted = differing
        with_samples = with_batch(_form(base), dims, at)
        for every in (with_samples, (dims, at)) if with_samples != (dims, at) else ((dims, at),):
            opened: list[OpenSizes] = []
            chosen = agree.from_rank_zero(partial(_points, base, *every, wanted, opened, maker))
            if chosen is None:
                continue
            dims, sizes, others = chosen
            if self._add(base, dims, sizes, others, opened, maker):
                return True
        self.failures += 1
        return False

    def _add(
        self,
        base: Capture,
        dims: Dims,
        sizes: Sizes,
        others: Sequence[Sizes],
        opened: Sequence[OpenSizes],
        maker: Maker,
    ) -> bool:
        """Trace the call of a capture at one or two other sizes, and add the family if their graphs are alike."""
        traced, reasons = {sizes: base.traced}, ["no other sizes tell more"]
        for other in others:
            try:
                traced[other] = maker.trace_form(base.traced, resized(_form(base), dims, other))
            except AutoparError as error:
                reasons = [str(error)]
                break
            made: list[Family] = []

            def reason(made=made) -> str:
                if any(t.captured.returns != base.returns for t in traced.values()):
                    return "the model returns something else"
                try:
                    graphs = SizedGraphs({at: t.captured.graph_module for at, t in traced.items()})
                    lines = lines_of(opened[0], [*traced]) if opened else ()
                except Differs as differs:
                    return str(differs)
                batch, known = batch_place(_form(base), dims), {sizes: Point(base.traced, base.plan, base.step)}
                first = next(iter(opened), None)
                made.append(Family(dims, base, graphs, first, lines, batch, _period(base.plan), known))
                return ""

            reasons = [text for text in agree.from_all(reason) if text]
            if not reasons:
                self.known += made
                return True
        _tell(dims, reasons)
        return False

    def points(self) -> list[Point]:
        """Return what the programs are made of."""
        return [point for family in self.known for point in family.points.values()]

    def follow_deferred(self) -> list[object]:
        """Give the programs the graphs for gradients that wait for their reduction, which their points have by now;
        return those that cannot have them, which serve no more. All ranks call it together."""
        lost: list[object] = []
        for family in self.known:
            for program in [*family.programs]:
                if isinstance(program.step, SizedPipeline):  # of graphs that may be others by now
                    is_lost = program.step.is_deferring != program.step.newest.is_deferring
                elif program.step.can_wait:
                    continue
                else:
                    is_lost = not all(agree.from_all(partial(_follows_deferred, program)))
                if is_lost:
                    lost.append(program.step)
                    family.programs.remove(program)
        return lost


def _points(base: Capture, dims: Dims, at: Sizes, wanted: Sizes, opened: list[OpenSizes], maker: Maker):
    """Return the dims that can be left open in the call of a capture, its sizes `at` there, and one or two other sizes
    that tell most; None if the user's code does not take one way at these and at those `wanted` first. Adds what it
    says of them to `opened`."""
    try:
        found = maker.open_sizes(base.traced, dims)
    except AutoparError as error:
        _log.info("sizes cannot be left open: %s", error)
        return None
    kept = [place for place in range(len(at)) if place not in found.known]
    if not {*range(len(wanted))} <= {*kept}:
        return None
    opened.append(found.without_known())
    sizes, others = tuple(at[place] for place in kept), list[Sizes]()
    if not opened[0].holds(sizes) or not opened[0].holds((*wanted, *sizes[len(wanted) :])):
        return None
    for other in partners(sizes, _period(base.plan)):
        if all(is_telling(other, o) for o in (sizes, *others)) and opened[0].holds(other):
            others.append(other)
            if len(others) == POINTS[-1] - 1:
                break
    return _of_places(dims, kept), sizes, others


def _follows_deferred(program: Program) -> bool:
    try:
        graphs = {sizes: point.step.graphs for sizes, point in program.points.items()}
        return program.step.graphs.follow(graphs) <= program.lines and program.step.can_wait
    except Differs:
        return False


def _form(capture: Capture) -> CallSignature:
    return capture.traced.captured.signature


def _period(plan: Plan) -> int:
    return plan.mesh.devices * plan.micro_batches


def _of_places(dims: Dims, kept: Sequence[int]) -> Dims:
    """Return the dims whose sizes are at some places."""
    found = {n: {d: kept.index(p) for d, p in of.items() if p in kept} for n, of in dims.items()}
    return {name: of for name, of in found.items() if of}


def _tell(dims: Dims, reasons: Sequence[str]) -> None:
    if dist.get_rank() == 0:
        _log.info("%s is captured at every size: %s", ", ".join(dims), reasons[0])
