"""A tiny Llama trained on the shipped corpus in fp32 and with fake quantization: final losses, and how far off the
converted model is.

    OMP_NUM_THREADS=1 python benchmarks/qat.py [--steps 200] [--devices 2]

All runs start from the same weights and see the same batches, on gloo processes of one data-parallel axis; the second
one starts from weights 0.01 % larger, which says how much of a difference is chance. A loss is the mean over
20 batches that training did not see, in eval mode; a quantized run's is that of the fake-quantized model, then that of
the plain module that autopar.convert makes of it. Differences are of logits, relative to the largest one.
"""

from __future__ import annotations

import argparse
import math
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar.models.corpus import batches
from tests.helpers import gloo

BATCH, SEQ, SEEN = 8, 64, 20
LEARNING_RATE, WARMUP = 3e-3, 20  # then half a cosine down to 0
FP32, NUDGED = "none (fp32)", "none (fp32), from nudged weights"
STATIC = "int8,activations=int8,activation_granularity=per_tensor"
TEXTS = (
    FP32, NUDGED, "int8", "int8,activations=int8", STATIC, f"{STATIC},averaging_constant=0.1",
    "int4,group_size=32", "int4,group_size=32,range_learning=true",
)  # fmt: skip


def llama() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    heads = dict(num_attention_heads=4, num_key_value_heads=4)
    sizes = dict(
        vocab_size=256, hidden_size=64, intermediate_size=160, num_hidden_layers=2, max_position_embeddings=SEQ
    )
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, use_cache=False))


@torch.no_grad()
def evaluated(model: torch.nn.Module) -> tuple[float, torch.Tensor]:
    """(mean loss, logits of the last batch)."""
    stream, total = batches(BATCH, SEQ, seed=1), 0.0
    for _ in range(SEEN):
        output = model(**next(stream))
        total += output.loss.item()
    logits = output.logits
    return total / SEEN, logits.full_tensor() if hasattr(logits, "full_tensor") else logits


def train(rank: int, text: str, steps: int, devices: int, folder: str) -> tuple[float, ...]:
    """(loss, loss of the converted model, difference of its logits, bytes of its file, seconds of training)."""
    stream = batches(BATCH, SEQ)
    mesh = init_device_mesh("cpu", (devices,), mesh_dim_names=("dp",))
    adapt = [] if text in (FP32, NUDGED) else [autopar.FakeQuant.parse(text)]
    model = llama()
    if text == NUDGED:
        for parameter in model.parameters():
            parameter.data.mul_(1.0001)
    model = autopar.compile(model, mesh, next(batches(BATCH, SEQ)), adapt=adapt, strategy="ddp")
    optimizer, start = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE), time.perf_counter()
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = (
            LEARNING_RATE * min(1, (step + 1) / WARMUP) * (1 + math.cos(math.pi * step / steps)) / 2
        )
        model(**next(stream)).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - start
    loss, logits = evaluated(model.eval())
    if not adapt:
        return loss, loss, 0.0, float(sum(4 * p.numel() for p in model.parameters())), seconds
    plain = autopar.convert(model, folder)
    converted, others = evaluated(plain)
    difference = ((others - logits).abs().max() / logits.abs().max()).item()
    return loss, converted, difference, float((Path(folder) / "model.safetensors").stat().st_size), seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", type=int, default=2)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    print(
        f"Llama of 2 layers, 64 wide, {options.steps} steps of {BATCH} x {SEQ} tokens on {options.devices} gloo "
        f"processes"
    )
    print(f"{'quantization':<90} {'loss':>7} {'to fp32':>8} {'converted':>10} {'off by':>8} {'KiB':>6} {'seconds':>8}")
    first = None
    for text in TEXTS:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (text, options.steps, options.devices, folder)
            loss, converted, difference, size, seconds = gloo.run(options.devices, train, *arguments, seconds=1800)[0]
        first = first or loss
        print(f"{text:<90} {loss:7.4f} {loss / first - 1:+8.2%} {converted:10.4f} {difference:8.1e} "
              f"{size / 1024:6.0f} {seconds:8.1f}", flush=True)  # fmt: skip


if __name__ == "__main__":
    main()
