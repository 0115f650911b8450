"""Measure how even a pipeline's stages are: seconds of the slowest by those of the mean one, forward and backward.

    OMP_NUM_THREADS=1 python benchmarks/stage_balance.py [WORD ...]      models whose name has one of the words

One micro-batch on one device a stage, bf16 on H100s and fp32 on CPUs, memory never short, 1F1B with 4 micro-batches a
stage.

chosen   what autopar's cut gives, its stages costed as the plan costs them, without what they send
segments   the smallest ratio of any cut at the places where autopar cuts (planner/pipeline/segments.py)
any op   the smallest ratio of any cut at any forward op. A backward op goes with the segment that it belongs to when
         every op is a segment, and what a cut would make to be computed twice is left out: a bound of what the model
         allows
worse    how much longer the slowest stage is, with what it sends, than that of the best cut at any op, sends included
         too
sends    share of sending in the slowest stage's seconds

A ratio above the target is the model's where no cut at any op reaches it (one op, such as a vocabulary's matrix
product, takes as long as a stage), the sends' where only cuts reach it whose slowest stage takes as long with what it
sends, and else the cut's.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import numpy as np
import torch

from autopar import compiler, models
from autopar.cost.collectives import CollectiveCost
from autopar.errors import StageError
from autopar.hardware.profile import load
from autopar.ir.mesh import Mesh
from autopar.ir.stage_placement import StagePlacement
from autopar.planner.pipeline.cut import cut_stages
from autopar.planner.pipeline.evaluate import timing_of
from autopar.planner.pipeline.segments import chain
from autopar.planner.pipeline.stage_costs import Parts, crossing_bytes
from autopar.planner.spmd.plan import search
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.planner.spmd.planned import Planned
from autopar.plans.pipeline import inside

STAGES = (2, 4, 8)
TARGET, SAME = 1.10, 0.02
PROFILES = (("h100", "bf16"), ("cpu-gloo", "fp32"))


def t5():
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(d_model=512, d_kv=64, d_ff=2048, num_layers=6, num_heads=8, dropout_rate=0.0, use_cache=False,
                      decoder_start_token_id=0)  # fmt: skip
    ids = torch.empty((8, 512), dtype=torch.int64)
    return T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :128]}


def bart():
    from transformers import BartConfig, BartForConditionalGeneration

    config = BartConfig(d_model=768, encoder_layers=6, decoder_layers=6, encoder_ffn_dim=3072, decoder_ffn_dim=3072,
                        encoder_attention_heads=12, decoder_attention_heads=12, dropout=0.0, attention_dropout=0.0,
                        activation_dropout=0.0, use_cache=False)  # fmt: skip
    ids = torch.empty((8, 512), dtype=torch.int64)
    return BartForConditionalGeneration(config), {"input_ids": ids, "labels": ids[:, :128]}


def whisper():
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(d_model=384, encoder_layers=4, decoder_layers=4, encoder_attention_heads=6,
                           decoder_attention_heads=6, encoder_ffn_dim=1536, decoder_ffn_dim=1536, dropout=0.0,
                           use_cache=False)  # fmt: skip
    return WhisperForConditionalGeneration(config), {
        "input_features": torch.empty(4, 80, 3000),
        "labels": torch.empty((4, 128), dtype=torch.int64),
    }


MODELS = {
    "unet": "unet:width=64,levels=4,groups=16,image=128", "t5-small": t5, "bart-base": bart, "whisper-tiny": whisper,
    "gpt2": "gpt2", "gpt2, vocabulary 200,000": "gpt2:vocab=200000", "resnet-50": "resnet-50", "vit-b": "vit-b",
    "llama, 16 layers": "llama:hidden=1024,layers=16,heads=16,kv_heads=16,ffn=2816,vocab=32000,seq=512",
}  # fmt: skip


def planned(model, precision: str, hardware: str, stages: int) -> Planned:
    with torch.device("meta"):
        module, inputs = model() if callable(model) else models.build(model, batch=8, seq=512)
    if callable(model):
        module.train()
    captured = compiler.trace(module, inputs, precision=precision)
    mesh = Mesh.parse(f"pp={stages}")
    options = PlanOptions(
        load(hardware), precision=precision, baselines=False, within=mesh, refuses=False, recompute="none"
    )
    return search(captured, inside(mesh), options)


def least(seconds: Sequence[float], stages: int, ahead: Sequence[float] = (), back: Sequence[float] = ()) -> float:
    """The smallest possible maximum over so many stretches of the numbers, by dynamic programming over their ends. A
    cut after number i makes the stretch before it take `ahead[i]` more, and the one after it `back[i]`."""
    count, before = len(seconds), np.concatenate([[0.0], np.cumsum(seconds)])
    more = [
        np.concatenate([[0.0], way[: count - 1], [0.0]]) if len(way) else np.zeros(count + 1) for way in (ahead, back)
    ]
    cost = before[None, :] - before[:, None] + more[0][None, :] + more[1][:, None]  # of a stretch from row to column
    cost[np.tril_indices(count + 1)] = np.inf
    best = cost[0]
    for _ in range(stages - 1):
        best = np.maximum(best[:, None], cost).min(0)
    return float(best[count])


def costs_of(found: Planned, cuts: Sequence[str], send, repeated: bool) -> tuple[list[float], list[float], list[float]]:
    """Return for each part the seconds of computing, of sending on, and of sending back what the next one returns."""
    problem, e = found.whole
    parts = Parts(problem, e, found.pricer, cuts, repeated, found.live_bytes).found
    return ([p.forward_seconds + p.backward_seconds for p in parts], [sum(map(send, p.sent)) for p in parts],
            [sum(map(send, p.returned)) for p in parts])  # fmt: skip


def row(found: Planned, hardware: str, stages: int) -> tuple[float, float, float, float, float, int]:
    """(chosen, segments, any op, worse, sends, number of segments)."""
    collectives = CollectiveCost(load(hardware), Mesh.parse(f"pp={stages}"))

    def send(bytes_: float) -> float:
        return collectives.seconds("send", ("pp",), bytes_)

    problem, e = found.whole
    segments = chain(problem, e, found.pricer, stages, send, found.live_bytes)
    cut = cut_stages(segments.segments, stages, 4 * stages, 1e18, timing_of("1f1b", stages, 1), segments.shared)
    chosen, ahead, back = costs_of(found, segments.cuts(cut.cuts), send, True)
    whole = [s + a + b for s, a, b in zip(chosen, [*ahead[:-1], 0.0], [0.0, *back[:-1]])]
    ops, crossing = crossing_bytes(problem, e, found.pricer, StagePlacement(problem.graph, ()).free)
    each, *_ = costs_of(found, [op.name for op in ops[1:]], send, False)
    sent = [send(bytes_) for bytes_ in crossing[1:]]
    of_segments = [segment.levels[0].seconds for segment in segments.segments]
    slowest = int(np.argmax(whole))
    return (max(chosen) * stages / sum(chosen), least(of_segments, stages) * stages / sum(of_segments),
            least(each, stages) * stages / sum(each), max(whole) / least(each, stages, sent, sent) - 1,
            1 - chosen[slowest] / whole[slowest], len(segments.segments))  # fmt: skip


def main(words: Sequence[str]) -> None:
    warnings.filterwarnings("ignore")
    began = time.time()
    print(
        f"{'model':26}{'profile':10}{'stages':>7}{'segments':>8}{'chosen':>9}{'segments':>9}"
        f"{'any op':>9}{'worse':>8}{'sends':>8}"
    )
    misses = count = 0
    for name, model in MODELS.items():
        if words and not any(word in name for word in words):
            continue
        for hardware, precision in PROFILES:
            found = planned(model, precision, hardware, 2)
            for stages in STAGES:
                try:
                    chosen, segments, any_op, worse, sends, number = row(found, hardware, stages)
                except StageError as error:
                    print(f"{name:26}{hardware:10}{stages:>7}  {error.message}")
                    continue
                count, missed = count + 1, chosen > TARGET
                misses += missed
                note = "  the model's" if any_op > TARGET else "  the sends'" if worse <= SAME else "  the cut's"
                print(f"{name:26}{hardware:10}{stages:>7}{number:>8}{chosen:>9.3f}{segments:>9.3f}"
                      f"{any_op:>9.3f}{worse:>8.1%}"
                      f"{sends:>8.1%}{note if missed else ''}", flush=True)  # fmt: skip
    print(f"\n{count - misses} of {count} cuts within {TARGET}; {time.time() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
