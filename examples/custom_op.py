"""Train a model with an op of your own, sharded by a rule that says in one line which of its dims may be cut.

    torchrun --nproc_per_node 2 examples/custom_op.py

docs/extending.md says what a rule may look like. Without one the op runs whole on every device, and the plan says so.
"""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar


@torch.library.custom_op("examples::gate", mutates_args=())
def gate(x: Tensor, w: Tensor) -> Tensor:
    return torch.sigmoid(x @ w)


@gate.register_fake
def _(x, w):
    return x.new_empty(*x.shape[:-1], w.shape[1])


def save(ctx, inputs, output):
    ctx.save_for_backward(*inputs, output)


def backward(ctx, g):
    x, w, y = ctx.saved_tensors
    g = g * y * (1 - y)
    return g @ w.T, x.flatten(0, -2).T @ g.flatten(0, -2)


gate.register_autograd(backward, setup_context=save)

# Samples and columns may be cut. The contracted dim may not: a sigmoid of parts of a sum is not part of a sigmoid.
autopar.register_rule(gate, "... _, _ n -> ... n")


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Parameter(torch.randn(64, 256) / 8), nn.Linear(256, 64)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.down(gate(x, self.up)) - target).square().mean()


mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
is_first = dist.get_rank() == 0
if is_first:  # every way to cut this call, over 2, 3 and 2 x 2 devices, against the op itself
    checked = autopar.check_rule(gate, torch.randn(6, 5, 8).double(), torch.randn(8, 10).double())
    print(f"the rule holds in {checked} ways to cut the op")

torch.manual_seed(0)
batch = (torch.randn(32, 64), torch.rand(32, 64))
model = autopar.compile(Model(), mesh, batch, strategy="megatron")
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
for step in range(1, 41):
    loss = model(*batch)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    if is_first and (step == 1 or step % 10 == 0):
        print(f"step {step}: loss {loss.item():.4f}")
if is_first:
    up = model.get_parameter("up")
    print(f"up {tuple(up.shape)} is laid out as {model.layouts['up']}")
    print(f"warnings of the plan: {model.plan.warnings or 'none'}")
dist.destroy_process_group()
