"""Count the kernels that Inductor makes of one op between two linear layers, forward and backward.

    OMP_NUM_THREADS=1 AUTOPAR_CACHE=off python benchmarks/fused.py

Each row is a model of two linear layers without biases and the op between them, planned for one device, lowered and
written by Inductor for a CPU. Products are not among the kernels. A backward has one for the gradient of what the op
reads, and a second where gradients of its parameters, or sums over rows, go another way through it.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent))

ROWS, HIDDEN, HEADS = 64, 32, 4
MOST = (1, 2)  # kernels forward and backward


class SwiGLU(nn.Module):
    """Gates half of the columns by the other half."""

    def forward(self, x):
        gate, value = x.chunk(2, -1)
        return F.silu(gate) * value


class BiasGELU(nn.Module):
    """Adds a bias and applies GELU."""

    def __init__(self):
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(HIDDEN))

    def forward(self, x):
        return F.gelu(x + self.bias, approximate="tanh")


class Rotary(nn.Module):
    """Rotates pairs of columns of each head by angles that grow with the row."""

    def forward(self, x):
        heads = x.view(ROWS, HEADS, HIDDEN // HEADS)
        half = HIDDEN // HEADS // 2
        angles = torch.arange(ROWS)[:, None] * 10000 ** (-torch.arange(half) / half)
        cos, sin = (torch.cat([f(angles)] * 2, -1)[:, None] for f in (torch.cos, torch.sin))
        first, second = heads.chunk(2, -1)
        return (heads * cos + torch.cat([-second, first], -1) * sin).reshape(ROWS, HIDDEN)


class Residual(nn.Module):
    """Adds what dropout leaves of a value to the value."""

    def forward(self, x):
        return x + F.dropout(x, 0.1)


OPS = {
    "RMSNorm": lambda: nn.RMSNorm(HIDDEN), "LayerNorm": lambda: nn.LayerNorm(HIDDEN), "rotary": Rotary,
    "SwiGLU": SwiGLU, "bias + GELU": BiasGELU, "dropout": lambda: nn.Dropout(0.1),
    "dropout + residual": Residual,
}  # fmt: skip


def kernels_of(name: str) -> list[int]:
    """Return the kernels forward and backward that are no products."""
    from autopar.api import entry as api
    from autopar.compiler import lower
    from tests.helpers.inductor import program_of

    width = 2 * HIDDEN if name == "SwiGLU" else HIDDEN
    model = nn.Sequential(nn.Linear(HIDDEN, width, bias=False), OPS[name](), nn.Linear(HIDDEN, HIDDEN, bias=False))
    inputs = {"input": torch.randn(ROWS, HIDDEN)}
    planned = api.search(model, "dp=1", inputs, hardware="h100", precision="fp32", baselines=False)
    parts = lower(planned.captured, planned.plan, 0).parts
    calls = ([line.strip() for line in program_of(part)] for part in (parts.forward, parts.backward))
    return [sum(line.startswith("cpp_fused") and "async_compile" not in line for line in lines) for lines in calls]


def main() -> int:
    from autopar.cli.common import quiet

    quiet()
    print(f"{'':20} kernels forward  backward")
    most = [0, 0]
    for name in OPS:
        found = kernels_of(name)
        most = [max(pair) for pair in zip(most, found)]
        print(f"{name:20} {found[0]:15}  {found[1]:8}", flush=True)
    return int(any(count > limit for count, limit in zip(most, MOST)))


if __name__ == "__main__":
    sys.exit(main())
