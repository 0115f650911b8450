"""Time attention within a window: by the op's window, by a mask of all pairs, and without a window.

    python benchmarks/windows.py [--length 8192] [--heads 4] [--windows 512,2048]

One process counts the CPU seconds of its thread, forward and backward; of several rounds the least counts. Beside them
is the memory of the mask of all pairs.
"""

from __future__ import annotations

import argparse

import torch
from attention_seconds import WIDTH, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=8192)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--windows", default="128,512,2048")
    given = parser.parse_args()
    length = given.length
    print(f"attention, 1 x {given.heads} heads x {length} x {WIDTH}, fp32, forward and backward")
    print("window  causal  by its window s  by a mask s  no window s  mask MiB")
    q = torch.randn(1, given.heads, length, WIDTH)
    behind = torch.arange(length)[:, None] - torch.arange(length)
    for causal in (True, False):
        plain = seconds(q, None, causal)
        for window in map(int, given.windows.split(",")):
            mask = ((behind < window) & (behind >= 0 if causal else behind > -window))[None, None]
            times = seconds(q, None, causal, window=window), seconds(q, mask, False), plain
            print(
                f"{window:6}  {causal!s:6}  {times[0]:15.3f}  {times[1]:11.3f}  {times[2]:11.3f}  {mask.nbytes >> 20:8}"
            )


if __name__ == "__main__":
    main()
