"""Spans of segments that may be a stage under one of several plans of a micro-batch.

A span is there once for each plan that it may have and each that the stage before it may have: it leads from an end of
a span under the one to an end under the other, and takes the seconds that redistribute what passes between two plans
besides its own. So the shortest path over cuts chooses plans too (autopar/planner/pipeline/cut.py).
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .model import RankSegments
from .pareto import Variants
from .spans import Spans


class SpansByPlan(Spans):
    """All spans under all plans, sorted by `end`. `x`, `own`, `before`: the number of the span, of its plan and of the
    plan of the stage before."""

    def __init__(self, spans: Spans, others: Variants):
        self.plain, self.complete, self.borders = spans, spans.complete, others.borders
        self.plans = [spans, *map(spans.under, others.plans)]
        plans = range(len(self.plans))
        before, own, x = (one.ravel() for one in np.indices((len(plans), len(plans), len(spans.first))))
        order = np.argsort(spans.end[x] + own * spans.nodes, kind="stable")
        order = order[np.isfinite(self.borders[before, own])[order]]
        self.before, self.own, self.x = before[order], own[order], x[order]
        self.first = spans.first[self.x] + self.before * spans.nodes
        self.end = spans.end[self.x] + self.own * spans.nodes
        self.nodes = spans.nodes * len(plans)
        self.begin, self.finish = ([at + k * spans.nodes for k in plans] for at in (spans.begin[0], spans.finish[0]))
        self.shared_seconds = np.stack([one.shared_seconds for one in self.plans])[self.own, self.x]

    def seconds(self, flight: np.ndarray, limit: float) -> np.ndarray:
        """Return (stages, spans): the fewest seconds of each span as each stage, inf where it does not fit, or follows
        another plan as the first stage."""
        found = np.stack([one.seconds(flight, limit) for one in self.plans], 1)[:, self.own, self.x]
        found[1:] += self.borders[self.before, self.own]
        found[0, self.before != self.own] = np.inf
        return found

    def stage(self, x: int, flight: float, limit: float, follows: bool = True) -> RankSegments:
        """Return span `x` as the stage that holds `flight` micro-batches; `follows`: another one."""
        k = int(self.own[x])
        found = self.plans[k].stage(int(self.x[x]), flight, limit)
        border = float(self.borders[self.before[x], k]) if follows else 0.0
        return replace(found, seconds=found.seconds + border, plan=k)
