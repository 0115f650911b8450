"""Train with weights and inputs rounded to int8, then export a model of integers that runs with torch alone.

torchrun --nproc_per_node 2 examples/quantization_aware.py
"""

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import models
from autopar.models.corpus import batches

MODEL, SEQ, BATCH, STEPS = "gpt:hidden=64,layers=1,heads=4,vocab=256,seq=64", 64, 8, 40

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
stream = batches(BATCH, SEQ)
source, _ = models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu")
rounded = autopar.FakeQuant("int8", activations="int8", activation_granularity="per_tensor", averaging_constant=0.1)
model = autopar.compile(source, mesh, next(stream), adapt=[rounded])

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
is_first = dist.get_rank() == 0
for step in range(1, STEPS + 1):
    loss = model(**next(stream)).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first and (step == 1 or step % 10 == 0):
        print(f"step {step}: loss {loss.item():.4f}")

model.eval()  # the ranges of the inputs stay from here on
plain = autopar.convert(model, "output/int8-model")  # on one device, with integers for weights; a folder too

unseen = next(batches(BATCH, SEQ, seed=1))
with torch.no_grad():
    trained, converted = model(**unseen), plain(**unseen)
    difference = (trained.logits - converted.logits).abs().max() / trained.logits.abs().max()  # gathers: all ranks
    if is_first:
        print(f"loss {trained.loss.item():.4f}, of the exported model {converted.loss.item():.4f}")
        print(f"logits differ by {difference.item():.1e} of the largest one")
        fresh, _ = models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu")  # from here on as another program would
        read = autopar.load_quantized(fresh, "output/int8-model")
        print(f"read from the folder: equal {torch.equal(read(**unseen).logits, converted.logits)}")
        print(read.get_submodule("h.0.mlp"))
dist.destroy_process_group()
