"""Show what the planner finds by itself at the sizes of Llama-3-8B (4 layers, 8192 tokens a sequence, bf16, H100):
the plans that experts use, each where it is due. Nothing is run; the figures are those of the cost model.

    python benchmarks/findings.py

Prints a row a plan and whether it has the shape that is looked for; exits with 1 if one has not.
"""

from __future__ import annotations

import functools
import sys
import time
from collections import Counter
from collections.abc import Callable

import autopar
from autopar import models

MODEL, SEQ, LAYERS = "llama3-8b:layers=4", 8192, 4
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")


def made(mesh: str, batch: int, memory: str | None = None, strategy: str | None = None) -> autopar.Plan:
    model, inputs = models.build(MODEL, batch=batch, seq=SEQ)
    return autopar.plan(
        model,
        mesh,
        inputs,
        hardware="h100",
        precision="bf16",
        execution="eager",
        memory=memory,
        strategy=strategy,
        baselines=False,
    )


def weights(plan, *names: str) -> Counter:
    """Layouts of the blocks' matrices of these names."""
    return Counter(
        layout for key, layout in plan.layouts.items() if key.removesuffix(".weight").split(".")[-1] in names
    )


def count(plan, kind: str, phase: str, axes: tuple[str, ...]) -> int:
    return sum(c.count for c in plan.collectives if (c.kind, c.phase, c.axes) == (kind, phase, axes))


def gathered(plan) -> int:
    """Parameters stored sharded and gathered to compute (the embedding aside, which computes sharded)."""
    return sum(
        "S" in layout and "proj" in key or "S" in layout and "norm" in key for key, layout in plan.layouts.items()
    )


def data_parallel(plan) -> bool:
    return set(weights(plan, *ATTENTION, *MLP)) == {"R"} and count(plan, "all_reduce", "backward", ("d",)) >= 9 * LAYERS


def vocab_parallel_loss(plan) -> bool:
    """The head cut over the vocabulary; largest logit, sum of exponentials and the target's logit are reduced."""
    return plan.layouts["lm_head.weight"].startswith("d:S(0)") and count(plan, "all_reduce", "forward", ("d",)) == 3


def fully_sharded(plan) -> bool:
    """A gather a parameter in each phase, the embedding in the forward alone, and a reduce-scatter a gradient."""
    parameters = 9 * LAYERS + 3
    counts = [count(plan, *key, ("d",)) for key in (
        ("all_gather", "forward"), ("all_gather", "backward"), ("reduce_scatter", "backward"))]  # fmt: skip
    return counts == [parameters, parameters - 1, parameters]


def ulysses(plan) -> bool:
    """Sequences sharded, and four all-to-alls a block around attention in each phase; weights whole."""
    calls = count(plan, "all_to_all", "forward", ("d",)), count(plan, "all_to_all", "backward", ("d",))
    return min(calls) >= 4 * LAYERS and set(weights(plan, *ATTENTION)) == {"R"}


def tensor_and_sequence(axis: str) -> Callable:
    """MLPs cut by column then row; one gather and one reduce-scatter of the sequence each, forward and backward."""

    def holds(plan) -> bool:
        cut = weights(plan, "gate_proj", "up_proj"), weights(plan, "down_proj")
        kinds, phases = ("all_gather", "reduce_scatter"), ("forward", "backward")
        calls = [count(plan, kind, phase, (axis,)) for kind in kinds for phase in phases]
        return cut == ({f"{axis}:S(0)": 2 * LAYERS}, {f"{axis}:S(1)": LAYERS}) and min(calls) >= LAYERS

    return holds


def hybrid_sharded(plan) -> bool:
    """Matrices gathered over the fast axis alone, their gradients all-reduced over the slow one."""
    sharded = weights(plan, *MLP)
    return sharded == {"t:S(0)": 3 * LAYERS} and count(plan, "all_reduce", "backward", ("d",)) >= 3 * LAYERS


def some_sharded(least: int, most: int) -> Callable:
    return lambda plan: data_parallel_but(plan) and least <= gathered(plan) <= most


def data_parallel_but(plan) -> bool:
    """Every matrix is either whole or sharded along its first dim, as data parallelism stores it."""
    return set(weights(plan, *ATTENTION, *MLP)) <= {"R", "d:S(0)"}


CASES = [
    ("data parallel", ("d=8", 8), data_parallel),
    ("vocabulary-parallel loss", ("d=8", 8), vocab_parallel_loss),
    ("a few parameters sharded", ("d=8", 8, "26GB"), some_sharded(1, 4)),
    ("more, largest first", ("d=8", 8, "24GB"), some_sharded(4, 7)),
    ("all of the MLP", ("d=8", 8, "19GB"), some_sharded(10, 14)),
    ("most of the rest", ("d=8", 8, "17GB"), some_sharded(15, 36)),
    ("fsdp, one collective a parameter", ("d=8", 8, None, "fsdp"), fully_sharded),
    ("sequences and Ulysses", ("d=8", 4), ulysses),
    ("tensor and sequence", ("d=8", 1), tensor_and_sequence("d")),
    ("data x tensor and sequence", ("d=8,t=8", 8), tensor_and_sequence("t")),
    ("hybrid sharded (HSDP)", ("d=8,t=8", 128, "26GB"), hybrid_sharded),
]  # fmt: skip


def main() -> int:
    made_once = functools.cache(made)
    print(f"{MODEL}, {SEQ} tokens a sequence, bf16, H100")
    print(f"{'looked for':33} {'mesh':8} {'batch':>5} {'memory':>7} {'found':6} {'step ms':>8} {'comm ms':>8} "
          f"{'GB':>6} {'gathered':>8} {'gap':>6} {'seconds':>7}")  # fmt: skip
    missed = 0
    for name, case, holds in CASES:
        start = time.perf_counter()
        plan = made_once(*case)
        seconds = time.perf_counter() - start
        found = holds(plan)
        missed += not found
        mesh, batch, memory = (*case, None)[:3]
        print(f"{name:33} {mesh:8} {batch:5} {memory or '80GB':>7} {'yes' if found else 'NO':6} "
              f"{plan.step_seconds * 1e3:8.1f} {plan.communication_seconds * 1e3:8.1f} {plan.peak_bytes / 1e9:6.1f} "
              f"{gathered(plan):8} {plan.gap:6.2%} {seconds:7.1f}", flush=True)  # fmt: skip
    print(f"{len(CASES) - missed}/{len(CASES)} found")
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
