"""From a joint graph and a plan to what one rank runs: the list of passes, in order.

Used by the runtime for its own rank and by the simulator for all of them, so both run the same graphs.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from torch import fx

from ..errors import VerifyError
from ..frontend.export import Captured
from ..ir.layout import Layout
from ..passes.distribute import defer
from ..passes.distribute.bucket import bucket
from ..passes.distribute.in_place import in_place
from ..passes.distribute.localize import localize
from ..passes.distribute.lower_ops import lower_ops
from ..passes.distribute.overlap import overlap
from ..passes.distribute.partition import Parts, partition
from ..passes.distribute.recompute import recompute
from ..plans.plan import Plan
from . import pass_manager
from .python_code import is_collective
from .verify_graph import check_global, check_local, check_sharding, collective_call


@dataclass(frozen=True)
class RankProgram:
    """One rank's graphs: the local joint graph, and its forward and backward parts."""

    rank: int
    local: fx.GraphModule
    parts: Parts

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Return (group, what, shape) of each collective in the order of the calls: "dp", "forward all_reduce(sum)
        float32 over dp: mm_1", (8, 4). All ranks have the same groups and texts, and the ranks of one group the same
        shapes too."""
        return collectives_of(("forward", self.parts.forward), ("backward", self.parts.backward))


def collectives_of(*graphs: tuple[str, fx.GraphModule | None]) -> list[tuple[str, str, tuple[int, ...]]]:
    """List the collectives of graphs with their names, as `RankProgram.collectives` does."""
    found = []
    for phase, part in graphs:
        for node in filter(is_collective, part.graph.nodes if part is not None else ()):
            group, op, reduction, dtype, shape = collective_call(node)
            op = f"{op}({reduction})" if reduction else op
            tensor = node.meta["collective"].tensor if "collective" in node.meta else node.name
            found.append((group, f"{phase} {op} {dtype} over {group}: {tensor}", shape))
    return found


def passes_of(plan: Plan, rank: int) -> Iterator[tuple[str, Callable[[fx.GraphModule], fx.GraphModule]]]:
    """Iterate over the passes from the global joint graph to one rank's, with their names."""
    yield "localize", lambda graph: localize(graph, plan.sharding, rank, plan.reduce_scatter)
    yield "recompute", lambda graph: recompute(graph, plan.sharding.again)
    yield "lower_ops", lower_ops
    yield "bucket", lambda graph: bucket(graph, plan.bucket_bytes)
    yield "in_place", in_place
    if plan.overlaps:
        yield "overlap", overlap


def lower(captured: Captured, plan: Plan, rank: int, check: bool | None = None) -> RankProgram:
    """Run all passes for one rank; with `check` (default: AUTOPAR_CHECK=1) the verifier runs after each."""
    check = os.environ.get("AUTOPAR_CHECK") == "1" if check is None else check
    graph = captured.graph_module
    if check:
        check_global(graph)
        check_sharding(graph, plan.sharding)
    for name, run in passes_of(plan, rank):
        graph = pass_manager.run_pass(name, run, graph)
        if check:
            check_local(graph, plan.mesh)
    return RankProgram(rank, graph, pass_manager.run_pass("partition", partition, graph))


@dataclass(frozen=True)
class DeferredProgram:
    """One rank's graphs for gradients that are added up before they are reduced: `backward` takes what the backward of
    the RankProgram takes and leaves the gradients of the parameters `layouts` in these layouts; `reduce` takes those,
    in this order, and gives them as the RankProgram would."""

    backward: fx.GraphModule
    reduce: fx.GraphModule
    layouts: dict[str, Layout]

    def collectives(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """List the collectives as `RankProgram.collectives` does."""
        return collectives_of(("backward", self.backward), ("backward", self.reduce))


def lower_deferred(captured: Captured, plan: Plan, rank: int, saved: tuple[str, ...]) -> DeferredProgram:
    """Return a rank's graphs for gradient accumulation, next to a forward that saves the values `saved`. Raises
    VerifyError if they need others."""
    graph, whole = captured.graph, captured.graph_module
    for name, run in passes_of(replace(plan, sharding=defer.without_reductions(graph, plan.sharding)), rank):
        whole = pass_manager.run_pass(f"deferred {name}", run, whole)
    parts = partition(whole)
    if parts.saved != saved:
        raise VerifyError(
            "a backward without reductions needs other saved values than the one with them", mesh=plan.mesh
        )
    reduce, sharding = defer.reductions(graph, plan.sharding)
    for name, run in passes_of(replace(plan, sharding=sharding), rank):
        reduce = pass_manager.run_pass(f"reductions {name}", run, reduce)
    return DeferredProgram(parts.backward, reduce, defer.unreduced_layouts(graph, plan.sharding))
