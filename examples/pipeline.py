"""Train a model in two pipeline stages, and see how the step ran beside how it was planned.

    torchrun --nproc_per_node 2 examples/pipeline.py

An axis named pp makes stages. A call takes the whole batch, cuts it into micro-batches and runs their forwards and
backwards by the schedule; `loss.backward()` hands the gradients out, and each rank has the parameters of its own stage.
Without `schedule=` and `micro_batches=` the planner chooses both.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar import models
from autopar.models.corpus import batches

SEQ, BATCH, STEPS = 64, 16, 20

mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("pp",))  # (2, 4) and ("pp", "dp") for stages that are sharded
stream = batches(BATCH, SEQ)
source, _ = models.build("gpt:hidden=64,layers=2,heads=4,vocab=256,seq=64", batch=BATCH, seq=SEQ, device="cpu")
model = autopar.compile(source, mesh, next(stream), schedule="1f1b", micro_batches=4)

optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)  # of this rank's stage
rank = dist.get_rank()
for step in range(1, STEPS + 1):
    loss = model(**next(stream)).loss  # known on every rank
    loss.backward()
    norm = model.clip_grad_norm_(1.0)  # of all stages
    optimizer.step()
    optimizer.zero_grad()
    if rank == 0 and (step == 1 or step % 5 == 0):
        print(f"step {step}: loss {loss.item():.4f}, norm of the gradients {norm.item():.2f}")

measured = model.measured_schedule()  # of the last call; all ranks ask
if rank == 0:
    print(model.plan)
    print(autopar.schedule.overlay(model.plan.pipeline.played(), measured))
    Path("output").mkdir(exist_ok=True)
    autopar.schedule.save("output/pipeline.svg", {"planned": model.plan.pipeline.played(), "measured": measured})
dist.destroy_process_group()
