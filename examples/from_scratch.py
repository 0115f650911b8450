"""Train a small language model from scratch on Shakespeare's sonnets, which come with autopar; a token is a byte.

    torchrun --nproc_per_node 2 examples/from_scratch.py
    torchrun --nproc_per_node 4 examples/from_scratch.py dp=2,tp=2 120

The model, the loss, the optimizer and the loop are those of a script for one device; `compile` is the line that is
added. The second command goes on from the last checkpoint of the first one, on another mesh, up to step 120.
"""

import sys

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.models.corpus import batches

SEQ, BATCH, HIDDEN, HEADS, FOLDER = 64, 16, 64, 4, "output/checkpoints"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(HIDDEN), nn.LayerNorm(HIDDEN)
        self.qkv, self.out = nn.Linear(HIDDEN, 3 * HIDDEN), nn.Linear(HIDDEN, HIDDEN)
        self.mlp = nn.Sequential(nn.Linear(HIDDEN, 4 * HIDDEN), nn.GELU(), nn.Linear(4 * HIDDEN, HIDDEN))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (HEADS, -1)).transpose(1, 2)  # (B, heads, S, D)
            for part in self.qkv(self.norm_1(x)).chunk(3, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, HIDDEN), nn.Embedding(SEQ, HIDDEN)
        self.blocks = nn.Sequential(Block(), Block())
        self.head = nn.Sequential(nn.LayerNorm(HIDDEN), nn.Linear(HIDDEN, 256))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions(torch.arange(ids.shape[1]))
        return self.head(self.blocks(x))  # (B, S, 256)


def loss_of(logits: Tensor, ids: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


axes = autopar.Mesh.parse(sys.argv[1] if len(sys.argv) > 1 else "dp=2")
steps = int(sys.argv[2]) if len(sys.argv) > 2 else 60
mesh = init_device_mesh("cpu", axes.sizes, mesh_dim_names=axes.names)
is_first = dist.get_rank() == 0

torch.manual_seed(0)
stream = batches(BATCH, SEQ)  # every rank draws the same batches, and passes them whole
model = autopar.compile(LanguageModel(), mesh, next(stream)["input_ids"])
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
if is_first:
    print(model.plan)

newest, done = autopar.latest_checkpoint(FOLDER), 0
if newest is not None:
    done = autopar.load_checkpoint(newest, model, optimizer).step

for step in range(done + 1, steps + 1):
    stream.position = step  # batch number `step`
    ids = next(stream)["input_ids"]
    loss = loss_of(model(ids), ids)
    loss.backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    if is_first and (step == 1 or step % 10 == 0):
        print(f"step {step}: loss {loss.item():.4f}")
    if step % 20 == 0:
        autopar.save_checkpoint(FOLDER, model, optimizer, step=step)
dist.destroy_process_group()
