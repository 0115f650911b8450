"""Memory of loading weights: a 2 GB model from a safetensors folder into the shards of 4 gloo processes.

    OMP_NUM_THREADS=1 python benchmarks/loading.py [--gigabytes 2]

For each layout and dtype of the file: bytes of a rank's shards, bytes of the largest tensor, and how far the resident
memory of the process grew at most (VmHWM of the kernel, which counts everything) from before `autopar.compile(model on
the meta device, plan=..., weights=FOLDER)` until after it, tracing and lowering included; figures are those of the rank
with most. Then every shard is compared with the same slice as the safetensors package reads it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar.ir.layout import local_part
from autopar.ir.mesh import Mesh
from autopar.storage.tensor_file import Form, TensorFileWriter, in_order
from tests.helpers import gloo

RANKS, LAYERS, BATCH, SEQ = 4, 4, 4, 16
CASES = [  # mesh, strategy, dtype of the file
    ("tp=4", "megatron", torch.float32), ("tp=4", "megatron", torch.bfloat16), ("dp=4", "fsdp", torch.float32),
    ("dp=2,tp=2", "megatron", torch.float32),
]  # fmt: skip


def model_of(gigabytes: float) -> str:
    """A Llama of about so many bytes in fp32: 12.5 hidden^2 parameters a layer and 2 embeddings of 16384 rows."""
    hidden = 64
    while 4 * (LAYERS * 16 * hidden**2 + 2 * 16384 * hidden) < gigabytes * 1e9:
        hidden += 64
    return f"llama:hidden={hidden},layers={LAYERS},heads=16,kv_heads=16,ffn={4 * hidden},vocab=16384"


def on_meta(text: str) -> tuple[nn.Module, dict]:
    """The model on the meta device, buffers and inputs with values."""
    inputs = models.build("llama:hidden=64,layers=1,heads=16,vocab=16384", batch=BATCH, seq=SEQ, device="cpu")[1]
    return models.build(text, batch=BATCH, seq=SEQ)[0], inputs


def write_folder(folder: Path, model: nn.Module, dtype: torch.dtype) -> None:
    """Random weights in two shards, made tensor by tensor."""
    forms = {name: Form(tuple(p.shape), dtype) for name, p in model.named_parameters()}
    names, index = in_order(forms), {}
    generator = torch.Generator().manual_seed(0)
    for i, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{i:05d}-of-00002.safetensors"
        writer = TensorFileWriter(folder / file, {name: forms[name] for name in part})
        for name in part:
            writer.append(torch.rand(forms[name].shape, generator=generator).to(dtype))
            index[name] = file
        writer.close()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": index}))


def peak_bytes(reset: bool = False) -> int:
    """The most that was ever resident of this process, since the last reset (Linux)."""
    if reset:
        Path("/proc/self/clear_refs").write_text("5")
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM"):
            return 1024 * int(line.split()[1])
    raise RuntimeError("this machine has no VmHWM in /proc/self/status")


def load(rank: int, text: str, mesh_text: str, plan, folder: str) -> tuple[int, int, int]:
    """(bytes of this rank's shards, peak growth, shards that are wrong)."""
    from safetensors import safe_open

    warnings.filterwarnings("ignore")
    mesh = Mesh.parse(mesh_text)
    model, inputs = on_meta(text)
    device_mesh = init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names)
    before = peak_bytes(reset=True)
    model = autopar.compile(model, device_mesh, inputs, plan=plan, weights=folder)
    growth = peak_bytes() - before
    wrong, index = 0, json.loads((Path(folder) / "model.safetensors.index.json").read_text())["weight_map"]
    for name, parameter in model.named_parameters():
        with safe_open(f"{folder}/{index[name]}", "pt") as file:
            whole = file.get_tensor(name).float()
        wrong += not torch.equal(
            parameter.to_local(), local_part(whole, model.layouts[name], mesh, mesh.coordinate(rank))
        )
    return sum(p.to_local().nbytes for p in model.parameters()), growth, wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    text = model_of(a.gigabytes)
    model, inputs = on_meta(text)
    total, largest = (f(4 * p.numel() for p in model.parameters()) for f in (sum, max))
    print(
        f"{text}, fp32: {total / 1e6:,.0f} MB in {len(list(model.parameters()))} tensors; {RANKS} gloo processes; MB a "
        f"rank"
    )
    print(
        f"{'mesh':10} {'strategy':9} {'file':9} {'shards':>8} {'largest':>8} {'allowed':>8} {'growth':>8} {'':6} wrong "
        f"shards"
    )
    failed = 0
    for dtype in dict.fromkeys(dtype for *_, dtype in CASES):
        with tempfile.TemporaryDirectory(prefix="autopar-") as folder:
            write_folder(Path(folder), model, dtype)
            for mesh, strategy, _ in (case for case in CASES if case[2] == dtype):
                plan = autopar.plan(model, mesh, inputs, hardware="cpu-gloo", strategy=strategy, baselines=False)
                ranks = gloo.run(RANKS, load, text, mesh, plan, folder, seconds=900)
                shards, growth, wrong = ranks[max(range(RANKS), key=lambda i: ranks[i][1] - ranks[i][0])]
                allowed, wrong = shards + largest, sum(w for *_, w in ranks)
                failed += growth > allowed or wrong > 0
                figures = " ".join(f"{n / 1e6:8,.0f}" for n in (shards, largest, allowed, growth))
                verdict = "ok" if growth <= allowed else "over"
                print(f"{mesh:10} {strategy:9} {str(dtype)[6:]:9} {figures} {verdict:6} {wrong}", flush=True)
    return int(failed > 0)


if __name__ == "__main__":
    sys.exit(main())
