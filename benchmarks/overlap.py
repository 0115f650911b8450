"""Compare the bytes that travel beside compute in a plan, in the graphs of a rank, and in what Inductor makes of them.

    OMP_NUM_THREADS=1 AUTOPAR_CACHE=off python benchmarks/overlap.py [WORD ...]    the rows whose text has a word

MB that a device sends of gathered parameters and reduced gradients in one step, all of them and those that have a
product, an attention or a convolution between their start and their wait (autopar/simulate/census.py). A ratio is over
the bytes that the plan hides; more than 1 where buckets are a longer way ahead than the plan assumes. All are bf16 with
AdamW. Inductor writes its programs for a CPU; its scheduler asks for no device.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass, replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

LOW = 0.98  # of the bytes that a plan hides, what a graph is to hide at least


@dataclass(frozen=True)
class Case:
    """A model on a mesh, with buckets of so many bytes; None: those of the profile."""

    model: str
    mesh: str
    strategy: str | None
    batch: int
    seq: int
    bucket_bytes: float | None = None
    hardware: str = "h100"

    def __str__(self) -> str:
        return f"{self.model.partition(',')[0]} {self.mesh} {self.strategy or 'free'} {self.hardware}"

    def lowered(self, device: str = "meta"):
        """Return the search, and the graphs of its first rank."""
        from autopar.api import entry as api
        from autopar.compiler import lower
        from autopar.models import build

        model, inputs = build(self.model, batch=self.batch, seq=self.seq, device=device)
        planned = api.search(
            model,
            self.mesh,
            inputs,
            hardware=self.hardware,
            strategy=self.strategy,
            precision="bf16",
            execution="eager",
            baselines=False,
        )
        bucket_bytes = self.bucket_bytes or planned.plan.bucket_bytes
        return planned, lower(planned.captured, replace(planned.plan, bucket_bytes=bucket_bytes), 0, False)


GPT = "gpt:hidden=1024,layers=12,heads=16,vocab=50257,seq=1024"
LLAMA = "llama:hidden=1024,layers=12,heads=16,kv_heads=8,ffn=2816,vocab=32000,seq=1024"
MOE = "moe:hidden=512,layers=6,heads=8,vocab=32000"
LARGE = [
    Case(GPT, "dp=4", "fsdp", 16, 1024), Case(GPT, "dp=4", "zero1", 16, 1024), Case(GPT, "dp=4", "zero2", 16, 1024),
    Case(GPT, "dp=4", None, 16, 1024), Case(GPT, "dp=2,tp=2", None, 16, 1024), Case(LLAMA, "dp=4", "fsdp", 16, 1024),
    Case(LLAMA, "dp=2,tp=2", "hsdp", 16, 1024), Case(LLAMA, "dp=4,tp=2", "megatron_sp+fsdp", 16, 1024),
    Case(LLAMA, "dp=4,tp=2", "fsdp", 16, 1024), Case(LLAMA, "dp=4,tp=2", None, 16, 1024),
    Case(MOE, "dp=4", "fsdp", 16, 512), Case(MOE, "dp=4,tp=2", None, 16, 512), Case("vit-b", "dp=4", "fsdp", 32, 1),
    Case("vit-b", "dp=2,tp=2", None, 32, 1), Case(GPT, "dp=16", "fsdp", 64, 1024, hardware="a100"),
    Case(LLAMA, "dp=16", "zero1", 64, 1024, hardware="a100"), Case(LLAMA, "dp=16", None, 64, 1024),
    Case(LLAMA, "dp=16", "ddp", 64, 1024),
]  # fmt: skip
SMALL_GPT = "gpt:hidden=64,layers=2,heads=4,vocab=128,seq=32"
SMALL_LLAMA = "llama:hidden=64,layers=2,heads=4,kv_heads=2,ffn=160,vocab=128"
SMALL_MOE = "moe:hidden=64,layers=2,heads=4,vocab=128"
SMALL_VIT = "vit:hidden=64,layers=2,heads=4,patch=16"
TINY = [
    Case(model, mesh, strategy, 8, 32, 3e4)
    for model, mesh, strategy in (
        (SMALL_LLAMA, "dp=4", "fsdp"), (SMALL_GPT, "dp=4", "fsdp"), (SMALL_LLAMA, "dp=2,tp=2", "hsdp"),
        (SMALL_LLAMA, "dp=4,tp=2", "megatron_sp+fsdp"), (SMALL_LLAMA, "dp=4", "zero1"), (SMALL_GPT, "dp=4", "zero2"),
        (SMALL_MOE, "dp=4", "fsdp"), (SMALL_VIT, "dp=4", "fsdp"), (SMALL_VIT, "dp=2,tp=2", None),
        (SMALL_LLAMA, "dp=4", "ddp"),
    )
]  # fmt: skip


def measured(case: Case) -> tuple[str, list[float]]:
    """The figures of a case as text, and its ratios; small ones go through Inductor too."""
    from autopar.simulate import census

    goes_on = case in TINY
    planned, program = case.lowered("cpu" if goes_on else "meta")
    plan, found = census.of_plan(planned), [census.of_graphs(program)]
    if goes_on:
        from tests.helpers.inductor import compiled_census

        found.append(compiled_census(program))
    ratios = [one.overlapped / plan.overlapped for one in found]
    moved = "  ".join(f"{one.moved / 1e6:8.2f}" for one in (plan, *found))
    hidden = "  ".join(f"{one.overlapped / 1e6:8.2f}" for one in (plan, *found))
    blank = "" if goes_on else " " * 10
    return f"{moved}{blank}   {hidden}{blank}   {'  '.join(f'{ratio:6.3f}' for ratio in ratios)}", ratios


def main() -> int:
    from autopar.cli.common import quiet

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("words", nargs="*")
    words = parser.parse_args().words
    quiet()
    names = f"{'plan':>8}  {'graph':>8}  {'Inductor':>8}"
    print(f"{'':50} {'MB sent':28}   {'beside compute':28}   over the plan's")
    print(f"{'':50} {names}   {names}   {'graph':>6}  Inductor")
    every = []
    for case in (case for case in [*LARGE, *TINY] if not words or any(word in str(case) for word in words)):
        text, ratios = measured(case)
        every += ratios
        print(f"{case!s:50} {text}", flush=True)
    print(f"{sum(ratio >= LOW for ratio in every)} of {len(every)} ratios at least {LOW}")
    return int(min(every) < LOW)


if __name__ == "__main__":
    sys.exit(main())
