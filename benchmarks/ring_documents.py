"""Count what a ring sends among documents of real lengths: a Llama of transformers trains on packed rows on gloo
processes, and all bytes of keys, values and their gradients are added up.

    OMP_NUM_THREADS=1 python benchmarks/ring_documents.py [--length 8192] [--ranks 2,4] [--batches 4]

A plain ring sends what it sends of a row that is one document, which is measured as well. Lengths of documents are
drawn from a log-normal law, as of texts of the web, and cut where the row ends. `loopback` is what the interface has
sent of a step, with all gradients and headers, so nothing else may use it meanwhile. CPU seconds are those of all
processes, of a step.
"""

from __future__ import annotations

import argparse
import logging
import math
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.ops import ring_documents
from benchmarks.bytes import sent_on_loopback
from tests.helpers import gloo

HIDDEN, LAYERS, HEADS, KV_HEADS, VOCAB, SIGMA = 256, 2, 4, 2, 512, 1.2
MEDIANS = (None, 256, 1024, 4096)  # of the lengths of documents; None: one document


@dataclass
class Sent:
    """Holds what a process sent for a batch: `bytes_` of keys, values and their gradients, `loopback_bytes` by all."""

    bytes_: int
    loopback_bytes: int
    seconds: float


def lengths_of(length: int, median: int | None, seed: int) -> list[int]:
    """Return the lengths of the documents of a row."""
    generator = torch.Generator().manual_seed(seed)
    found: list[int] = []
    while (left := length - sum(found)) > 0:
        drawn = torch.randn((), generator=generator).item() * SIGMA
        found.append(left if median is None else min(left, max(1, round(median * math.exp(drawn)))))
    return found


def batch_of(lengths: Sequence[int]) -> dict[str, torch.Tensor]:
    """Return a row as transformers' collator packs documents of these lengths."""
    ids = torch.randint(VOCAB, (1, sum(lengths)), generator=torch.Generator().manual_seed(0))
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    return dict(input_ids=ids, labels=ids.masked_fill(positions == 0, -100), position_ids=positions)


def steps(rank: int, n: int, batches: list[dict]) -> list[Sent]:
    """Train on each batch, after the first one to warm up."""
    from transformers import LlamaConfig, LlamaForCausalLM

    logging.disable(logging.WARNING)
    warnings.filterwarnings("ignore")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=2 * HIDDEN, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, max_position_embeddings=2**17, use_cache=False,
    )  # fmt: skip
    mesh = init_device_mesh("cpu", (n,), mesh_dim_names=("cp",))
    pin = {"input_ids": "cp:S(1)"}
    model = autopar.compile(LlamaForCausalLM(config), mesh, batches[0], strategy="ring", pin=pin)
    sent, start = [0], ring_documents.start_all_to_all

    def counting(result, x, *ways):
        sent[0] += x.numel() * x.element_size()
        return start(result, x, *ways)

    ring_documents.start_all_to_all = counting
    found = []
    for inputs in batches[:1] + batches:
        sent[0] = 0
        dist.barrier()
        before, began = sent_on_loopback(), time.process_time()
        model(**inputs).loss.backward()
        model.zero_grad()
        seconds = time.process_time() - began
        dist.barrier()
        found.append(Sent(sent[0], sent_on_loopback() - before, seconds))
    return found[1:]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--ranks", default="2,4")
    parser.add_argument("--batches", type=int, default=6)
    a = parser.parse_args()
    print(f"Llama of transformers: {LAYERS} layers, hidden {HIDDEN}, {HEADS} heads, {KV_HEADS} of keys; a row "
          f"of {a.length} tokens, fp32; means of {a.batches} rows")  # fmt: skip
    print("ranks  median length  documents  MB of a ring  of one document  loopback MB  CPU s")
    mixes = {m: [lengths_of(a.length, m, 100 * i + (m or 0)) for i in range(a.batches if m else 1)] for m in MEDIANS}
    batches = [batch_of(lengths) for mix in mixes.values() for lengths in mix]
    for n in map(int, a.ranks.split(",")):
        rows = list(zip(*gloo.run(n, steps, n, batches, seconds=900)))  # of each batch what ranks sent
        plain = sum(one.bytes_ for one in rows[0])
        for median, mix in mixes.items():
            of_mix, rows, many = rows[: len(mix)], rows[len(mix) :], len(mix)
            sent = sum(one.bytes_ for row in of_mix for one in row) / many
            loopback = sum(row[0].loopback_bytes for row in of_mix) / many
            cpu = sum(one.seconds for row in of_mix for one in row) / many
            documents = sum(map(len, mix)) / many
            print(
                f"{n:5}  {median or a.length:13}  {documents:9.1f}  {sent / 1e6:12.2f}  {sent / plain:15.0%}  "
                f"{loopback / 1e6:11.2f}  {cpu:5.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
