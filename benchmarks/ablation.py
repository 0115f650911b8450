"""Measure what each mechanism of the search for a plan earns: the same searches with one of them off.

    OMP_NUM_THREADS=1 python benchmarks/ablation.py [WORD ...] [--rows TEXT] > benchmarks/results/ablation.txt

A case is captured once and searched with everything on, then once a mechanism without it; WORDs choose cases, TEXT the
rows that have it in their names. Seconds
are of the process's CPU; where the search itself ran longer than `LIMIT` times the whole one it is stopped. `plan`: how
much longer the plan without the mechanism takes a step (negative: the mechanism cost something); `gap`: what is then
proven; `CPU`: seconds of the search as a multiple of those with everything on. Experts are left out but for the row
that says what starting from their plans earns.
"""

from __future__ import annotations

import contextlib
import signal
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from unittest import mock

from autopar import compiler, models
from autopar.frontend.fake_parameters import forms_of
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.planner.objective.checkpoint_blocks import Blocks
from autopar.planner.objective.checkpoint_min_cut import FULL, Rematerialization
from autopar.planner.pipeline import micro_batch_plans
from autopar.planner.pipeline import plan as pipeline_plan
from autopar.planner.pipeline import search as pipeline_search
from autopar.planner.pipeline.cut_interleaved import Loops
from autopar.planner.pipeline.model import StageCut
from autopar.planner.pipeline.plan import plan_pipeline
from autopar.planner.pipeline.played_cuts import PlayedCuts
from autopar.planner.solver import memory_limit, search
from autopar.planner.solver import minimize as minimize_module
from autopar.planner.solver.cutting_planes import Cuts
from autopar.planner.solver.local_search import LocalSearch
from autopar.planner.solver.minimize import Search, minimize
from autopar.planner.spmd.plan import search as search_flat
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.plans.pipeline import axis_of

LIMIT = 6.0
GIB = 2**30


@dataclass(frozen=True)
class Case:
    name: str
    model: str
    mesh: str
    batch: int
    seq: int
    memory: float = 80e9
    offload: str = "none"
    hardware: str = "h100"
    precision: str = "bf16"
    pipeline: dict = field(default_factory=dict)  # what is asked of it: schedule, micro_batches, stages_per_rank


GPT, MOE = "gpt:hidden=64,heads=4,vocab=64,seq=16", "moe:hidden=32,layers=2,heads=4,kv_heads=2,ffn=48,vocab=64,seq=16"
WIDE = "gpt:hidden=1024,layers=4,heads=16,vocab=4096,seq=512"
DEEP = "gpt:hidden=1024,layers=8,heads=16,vocab=4096,seq=128"
VOCABULARY = "gpt:hidden=256,layers=8,heads=8,vocab=8192,seq=128"
ONE_F_ONE_B = {"schedule": "1f1b", "micro_batches": 4}
LOOPED = {"schedule": "interleaved_1f1b", "micro_batches": 8, "stages_per_rank": 2}
CASES = [
    Case("small gpt", f"{GPT},layers=11", "a=2,b=2", 8, 16, precision="fp32"),
    Case("small moe", f"{MOE},experts=4,active=2", "a=2,b=2", 8, 16, 8e9, hardware="cpu-gloo", precision="fp32"),
    Case("small gpt, pipeline", f"{GPT},layers=4", "pp=2,dp=2", 8, 16, 8e9, hardware="cpu-gloo", precision="fp32"),
    Case("gpt2", "gpt2", "a=8", 64, 1024),
    Case("gpt2-xl", "gpt2-xl", "dp=8", 64, 1024),
    Case("llama3-8b", "llama3-8b", "dp=8,tp=8", 16, 8192),
    Case("llama3-8b, 40 GiB", "llama3-8b", "dp=8,tp=8", 16, 8192, 40 * GIB),
    Case("llama3-8b, 26 GiB", "llama3-8b", "dp=8,tp=8", 16, 8192, 26 * GIB),
    Case("llama3-8b, 23 GiB", "llama3-8b", "dp=8,tp=8", 16, 8192, 23 * GIB),
    Case("llama3-8b, 20 GiB", "llama3-8b", "dp=8,tp=8", 16, 8192, 20 * GIB),
    Case("mixtral-8x7b", "mixtral-8x7b", "dp=8,tp=8", 128, 4096),
    Case("llama3-70b", "llama3-70b", "dp=32,tp=8", 256, 8192),
    Case("llama3-8b, offload", "llama3-8b", "dp=2", 2, 4096, 80e9, "auto"),
    Case("gpt2-xl, offload, 14 GiB", "gpt2-xl", "dp=4", 8, 1024, 14 * GIB, "auto"),
    Case("gpt2-xl, offload, 7 GiB", "gpt2-xl", "dp=4", 8, 1024, 7 * GIB, "auto"),
    Case("gpt, slow links", WIDE, "dp=2,tp=8", 16, 512, hardware="rtx4090", precision="fp32"),
    Case("gpt, stages, 2.4 GiB", DEEP, "pp=2,dp=4", 16, 128, 2.4 * GIB, precision="fp32", pipeline=ONE_F_ONE_B),
    Case(
        "gpt, stages, 1.5 GiB",
        DEEP,
        "pp=2,dp=4",
        16,
        128,
        1.5 * GIB,
        hardware="rtx4090",
        precision="fp32",
        pipeline=ONE_F_ONE_B,
    ),  # fmt: skip
    Case("gpt, looped stages", DEEP, "pp=3", 16, 128, precision="fp32", pipeline=LOOPED),
    Case("llama3-8b, pipeline", "llama3-8b", "pp=4,dp=4,tp=4", 64, 8192),
    Case("llama3-8b, stages", "llama3-8b", "pp=4,dp=2,tp=8", 128, 4096),
    Case("llama3-8b, stages, 16 GiB", "llama3-8b", "pp=4,dp=2,tp=8", 128, 4096, 16 * GIB),
    Case(
        "gpt, stages, half the memory",
        VOCABULARY,
        "pp=4,dp=2",
        32,
        128,
        2057444354,
        hardware="a100",
        pipeline={"schedule": "1f1b"},
    ),
]


def without_starts(dual, starts, options=Search()):
    return minimize(dual, (), options)


@contextlib.contextmanager
def without(*changes: tuple[object, str, object]) -> Iterator[None]:
    """Replace attributes for a while, or add them."""
    with contextlib.ExitStack() as stack:
        for owner, name, value in changes:
            is_set_later = owner is Blocks  # by its __init__
            stack.enter_context(mock.patch.object(owner, name, value, create=is_set_later))
        yield


def whole_blocks_alone(self: Rematerialization):
    return [(FULL, self.at(FULL))]


def least_bounded(outcomes):
    return min(outcomes, key=lambda one: one.evaluation.seconds)


def unmoved(self: PlayedCuts, cut: StageCut, loops: Loops) -> StageCut:
    return cut


def no_plans_by_stage(search, found):
    return []


Limit, PS = memory_limit.WithinLimit, pipeline_search.PipelineSearch
OPTIONS: dict[str, Callable[[PlanOptions], PlanOptions]] = {  # mechanisms that an option turns off
    "equal blocks choose alike (symmetry)": lambda o: replace(o, folded=False),
    "integer program of what is left": lambda o: replace(o, search=replace(o.search, largest_program=0)),
    "integer program of what is promising": lambda o: replace(o, search=replace(o.search, largest_choice=0)),
    "last word of the integer program": lambda o: replace(o, search=replace(o.search, last_word=False)),
    "(on) starting from the experts' plans": lambda o: replace(o, baselines=True),
}
PATCHES: dict[str, tuple] = {
    "local search after rounding": ((LocalSearch, "improve", lambda self, choice, passes=8: choice),),
    "starting from choices found before": ((search, "minimize", without_starts), (memory_limit, "minimize",
                                                                                  without_starts)),
    "weights of hidden communication": ((search, "MOST_WEIGHTS", 1),),
    "running again as an option of an op": ((Blocks, "reruns", property(lambda self: frozenset(),
                                                                       lambda self, value: None)),),
    "playing the plans found": ((search, "fastest_played", least_bounded), (memory_limit, "fastest_played",
                                                                           least_bounded)),
    "next prices near those that proved most": ((Cuts, "highest", lambda self, bound, *_: HIGHEST(self, bound)),),
    "prices around the best one tried": ((Limit, "_bisect", lambda self, free, point: None),),
    "plans at the bound mixed over the blocks": ((memory_limit, "MOST_MIXED", 0),),
    "changes where memory peaks": ((memory_limit, "squeezed", lambda run, start: start),),
    "rows of experts over other axes": ((minimize_module, "with_owners", lambda dual, tied, choice: []),),
    "components exchanged while they fit": ((memory_limit, "mix", lambda problem, lean, *rest: lean),),
    "copies kept while they fit": ((memory_limit, "keep_copies", lambda problem, e, limit, pricer: e),),
    "parts of blocks recomputed (minimum cuts)": ((Rematerialization, "chain", whole_blocks_alone),),
    "parameters back on the device": ((Limit, "_filled", lambda self, fitted, prices: fitted),),
    "pipeline: plans at prices of memory": ((micro_batch_plans, "MEMORY_PRICES", ()),),
    "pipeline: what ranks compute again": ((PS, "_within_memory", lambda self, inner, pipeline, again, most:
                                            SETTLED(self, inner, pipeline, None, most)),),
    "pipeline: even stages and even ranks": ((pipeline_search, "LOOPED_CUTS", (False,)),),
    "pipeline: boundaries moved by what is played": ((PlayedCuts, "improved", unmoved),),
    "pipeline: stages with plans of their own": ((pipeline_plan, "plans_by_stage", no_plans_by_stage),),
    "pipeline: cut again until it fits": ((pipeline_search, "MOST_CUTS", 1),),
}  # fmt: skip
SETTLED, HIGHEST = PS._within_memory, Cuts.highest


@dataclass(frozen=True)
class Found:
    step_seconds: float
    gap: float
    cpu_seconds: float


class TooLong(Exception):
    pass


def _stop(*_) -> None:
    raise TooLong


def searched(case: Case, captured, options: PlanOptions, limit: float) -> Found | str:
    """Search a captured case, for so many CPU seconds at most."""
    signal.signal(signal.SIGVTALRM, _stop)
    start, mesh = time.process_time(), Mesh.parse(case.mesh)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit)
    try:
        if axis_of(mesh):
            plan = plan_pipeline(captured, mesh, options, case.model, **case.pipeline).plan
        else:
            plan = search_flat(captured, mesh, options, case.model).plan
    except TooLong:
        return "stopped"
    except Exception as error:
        return type(error).__name__
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
    return Found(plan.step_seconds, plan.gap, time.process_time() - start)


def run(case: Case, of_rows: str = "") -> None:
    """Print a case: the search with everything on, then each mechanism off whose row has the text `of_rows`."""
    model, inputs = models.build(case.model, batch=case.batch, seq=case.seq)
    captured = compiler.trace_to_plan(model, inputs, None, forms_of(model), case.precision, ())
    options = PlanOptions(
        load(case.hardware), case.memory, precision=case.precision, baselines=False, offload=case.offload
    )
    everything = searched(case, captured, options, 1e4)
    print(f"\n{case.name}, {case.mesh}, {case.batch} x {case.seq}: {everything.step_seconds * 1e3:.3f} ms, gap "
          f"{everything.gap:.2%}, {everything.cpu_seconds:.1f} CPU s", flush=True)  # fmt: skip
    print(f"  {'without':44} {'plan':>9} {'gap':>8} {'CPU':>7}")
    limit = max(10.0, LIMIT * everything.cpu_seconds)
    rows = [(name, captured, options, changes) for name, changes in PATCHES.items()
            if axis_of(Mesh.parse(case.mesh)) or not name.startswith("pipeline")]  # fmt: skip
    rows += [(name, captured, change(options), ()) for name, change in OPTIONS.items()]
    rows += [("deep models by eight blocks", replace(captured, compact=None), options, ())]
    for name, graph, changed, changes in (row for row in rows if of_rows in row[0]):
        with without(*changes):
            found = searched(case, graph, changed, limit)
        if isinstance(found, str):
            print(f"  {name:44} {found}", flush=True)
            continue
        print(f"  {name:44} {found.step_seconds / everything.step_seconds - 1:+9.3%} {found.gap:8.2%} "
              f"{found.cpu_seconds / everything.cpu_seconds:6.2f}x", flush=True)  # fmt: skip


def main() -> None:
    warnings.simplefilter("ignore")
    words, _, of_rows = " ".join(sys.argv[1:]).partition("--rows ")
    for case in CASES:
        if not words or any(word in case.name for word in words.split()):
            run(case, of_rows)


if __name__ == "__main__":
    main()
