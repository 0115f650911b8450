"""Hold what the planner's tests share: captured models, a toy machine, problems and plans of them."""

from __future__ import annotations

import functools
from collections import Counter

import numpy as np
import torch

from autopar import compiler
from autopar.cost.memory import Optimizer
from autopar.cost.redistribute import Redistributor
from autopar.cost.transfer_prices import TransferPrices
from autopar.frontend.export import Captured
from autopar.hardware.profile import Hardware, Tier
from autopar.ir.mesh import Mesh
from autopar.models import registry
from autopar.planner.objective.evaluate import Evaluation, evaluate
from autopar.planner.objective.pricer import Pricer
from autopar.planner.problem import symmetry as folding
from autopar.planner.problem.allowed import allowed_strategies
from autopar.planner.problem.multipliers import Prices
from autopar.planner.problem.problem import Problem, build
from autopar.planner.problem.recipes import Restriction
from autopar.planner.request import PlanRequest
from autopar.planner.solver.dual import Dual
from autopar.planner.solver.hyperedges import HyperedgePrices, hyperedges_of
from autopar.planner.solver.ilp import Program, Solution
from autopar.planner.solver.minimize import Search, minimize
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from autopar.plans.plan import Plan

TINY_GPT = "gpt:hidden=32,layers=1,heads=4,vocab=64,seq=16"
TINY_LLAMA = "llama:hidden=32,layers=1,heads=4,kv_heads=4,ffn=64,vocab=64,seq=16"
_PLANS: dict[str, Plan] = {}


def toy(
    flops: float = 1e9, memory: float = 1e9, link: float = 1e9, latency: float = 0.0, launch: float = 0.0,
    bucket: int = 1 << 40, device_bytes: float = 1e12, reduce_scatter: str = "native",
) -> Hardware:  # fmt: skip
    """A machine whose links are as fast as its memory and wait for nothing, so that even tiny models are worth
    sharding."""
    return Hardware(
        "toy", "", "", {"fp32": flops, "bf16": flops, "fp64": flops}, 1.0, memory, 1.0, int(device_bytes),
        max(launch, 1e-12), (Tier("link", None, latency, link, bucket),), reduce_scatter, overlap_slowdown=1.0,
    )  # fmt: skip


@functools.cache
def captured(model: str, batch: int = 8, seq: int = 16) -> Captured:
    """The joint graph of a registry model, without weights."""
    return compiler.trace(*registry.build(model, batch=batch, seq=seq, device="meta"))


def make(
    model: str | Captured, mesh: str, hardware: Hardware | None = None, *, batch: int = 8, seq: int = 16, **options
) -> Plan:
    """The plan of a model without the experts' plans beside it; what several tests ask of a registry model is planned
    once."""
    hardware = hardware or toy()
    if not isinstance(model, str):
        return make_anew(model, mesh, hardware, **options)
    asked = repr((model, mesh, hardware, batch, seq, sorted(options.items())))  # a machine has no hash
    if asked not in _PLANS:
        _PLANS[asked] = make_anew(captured(model, batch, seq), mesh, hardware, **options)
    return _PLANS[asked]


def make_anew(graph: Captured, mesh: str, hardware: Hardware, **options) -> Plan:
    return make_plan(graph, Mesh.parse(mesh), PlanOptions(hardware, **{"baselines": False} | options))


def searched(graph: Captured, mesh: str, **options) -> Planned:
    """Return what a request for a plan in bf16 on H100s finds, with the search that found it."""
    defaults = dict(memory=None, strategy=None, offload="none", baselines=True, micro_batches=None)
    request = PlanRequest.of(Mesh.parse(mesh), "model", hardware="h100", precision="bf16", optimizer="adamw", pin=None,
                             strict=False, fixed={}, **defaults | options)  # fmt: skip
    return request.find(graph)


class Instance:
    """One problem with its pricer and the strategies a restriction allows."""

    def __init__(self, model: str | Captured, mesh: str, hardware: Hardware | None = None, strategy: str | None = None,
                 folded: bool = True, optimizer: str = "adamw", batch: int = 8, seq: int = 16,
                 shared_by: int = 1, reduce_dtype: torch.dtype | None = None,
                 classes: dict[str, int] | None = None):  # fmt: skip
        """`shared_by`: micro-batches of a step, which share the copies of parameters that are kept if they are
        several. `classes`: of links by axis, all one class unless given."""
        self.mesh, self.hardware = Mesh.parse(mesh), hardware or toy()
        graph = captured(model, batch, seq) if isinstance(model, str) else model
        fold = folding.fold if folded else folding.unfolded
        self.problem: Problem = build(graph, self.mesh, self.hardware, Optimizer.of(optimizer), fold)
        links, bandwidth = self.hardware.links_for(self.mesh), self.hardware.reached_memory_bytes_per_second
        prices = TransferPrices(Redistributor(self.mesh, links, bandwidth),
                                class_of={a: (classes or {}).get(a, 0) for a in self.mesh.names})  # fmt: skip
        self.pricer = Pricer(self.problem, prices, self.hardware.links[-1].bucket_bytes, micro_batches=shared_by,
                             gathers_once=shared_by > 1, reduce_dtype=reduce_dtype)  # fmt: skip
        self.hyperedges = [
            HyperedgePrices(self.problem, self.pricer, hyperedge) for hyperedge in hyperedges_of(self.problem)
        ]
        self.restriction = Restriction.of(strategy, self.mesh)
        self.allowed: dict[int, np.ndarray] = allowed_strategies(self.problem, self.restriction)

    def minimize(
        self, prices: Prices = Prices(), keep: bool | None = None, masks=None, search: Search = Search()
    ) -> Solution:
        """The best choice by class that the search finds among the strategies of `masks`, or all that are allowed."""
        return minimize(Dual(self.problem, self.hyperedges, masks or self.allowed, prices, keep), search=search)

    def program(self, prices: Prices = Prices(), keep: bool | None = None) -> Program:
        return Program(self.problem, self.hyperedges, self.allowed, [prices], keep)

    def evaluate(self, choice: dict[int, int], prices: Prices = Prices(), keep: bool | None = None) -> Evaluation:
        """Cost of a choice by class on the unfolded graph."""
        every = {v.index: choice[v.cls] for v in self.problem.vertices}
        return evaluate(self.problem, every, self.pricer, prices, keep)

    def objective(self, choice: dict[int, int], prices: Prices = Prices(), keep: bool | None = None) -> float:
        """Return what the search minimizes, recomputed by the judge."""
        return self.evaluate(choice, prices, keep).priced(prices)


def counts(plan: Plan, phase: str | None = None, *axes: str) -> dict[str, int]:
    """Collectives of a plan by kind, of one phase and over exactly these axes if given."""
    found: Counter = Counter()
    for c in plan.collectives:
        if phase in (None, c.phase) and (not axes or c.axes == axes):
            found[c.kind] += c.count
    return dict(found)
