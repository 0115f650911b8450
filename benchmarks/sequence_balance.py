"""Time a causal attention on every rank of a sequence that is cut into plain blocks and in zigzag: largest over mean.

    python benchmarks/sequence_balance.py [--length 4096] [--heads 4] [--ranks 2,4,8]

One process runs the calls of each rank in turn, forward and backward, as `strategy="all_gather_kv"` makes them, and
counts the CPU seconds of its thread; of several rounds the least counts.
"""

from __future__ import annotations

import argparse
import time

import torch

from autopar.ir.layout import Layout, local_ranges
from autopar.ir.mesh import Mesh
from autopar.ops import autopar

WIDTH, ROUNDS = 64, 5


def seconds(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, ranges: list[tuple[int, int]]) -> float:
    """Return the CPU seconds of a rank that has these ranges of the queries."""
    start = time.thread_time()
    for first, stop in ranges:
        rows = q[:, :, first:stop].contiguous()
        out, lse = autopar.attention(rows, k, v, None, True, None, first)
        autopar.attention_bw(out, rows, k, v, out, lse, None, True, None, first)
    return time.thread_time() - start


def main() -> None:
    """Print a row for each number of ranks and layout."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--ranks", default="2,4,8")
    options = parser.parse_args()
    q, k, v = torch.randn(3, 1, options.heads, options.length, WIDTH)
    print(f"causal attention, 1 x {options.heads} heads x {options.length} x {WIDTH}, fp32, forward and backward")
    print(f"{'ranks':>5}  {'layout':8}  {'largest CPU s':>13}  {'mean CPU s':>10}  {'largest / mean':>14}")
    for size in map(int, options.ranks.split(",")):
        mesh = Mesh(("cp",), (size,))
        for text in ("cp:S(0)", "cp:Z(0)"):
            layout = Layout.parse(text, 1)
            ranges = [local_ranges((options.length,), layout, mesh, mesh.coordinate(rank))[0] for rank in range(size)]
            rounds = [[seconds(q, k, v, of_rank) for of_rank in ranges] for _ in range(ROUNDS)]
            found = [min(of_rank) for of_rank in zip(*rounds)]
            mean = sum(found) / size
            print(f"{size:>5}  {text:8}  {max(found):13.3f}  {mean:10.3f}  {max(found) / mean:14.2f}", flush=True)


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(1)
    main()
