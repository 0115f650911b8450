"""Time a causal attention among documents that are packed into a row: by their numbers, and by a mask of all pairs.

    python benchmarks/packed_documents.py [--length 4096] [--heads 4] [--documents 1,4,16]

Documents are as long as each other. One process counts the CPU seconds of its thread, forward and backward; of several
rounds the least counts. Beside them are those of a row that is one document, without a mask.
"""

from __future__ import annotations

import argparse

import torch
from attention_seconds import WIDTH, seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--length", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--documents", default="1,4,16")
    given = parser.parse_args()
    length = given.length
    print(f"causal attention, 1 x {given.heads} heads x {length} x {WIDTH}, fp32, forward and backward")
    print("documents  by numbers s  by a mask s  one document, no mask s")
    q = torch.randn(1, given.heads, length, WIDTH)
    plain = seconds(q, None, True)
    for count in map(int, given.documents.split(",")):
        ids = (torch.arange(length) * count // length)[None]
        mask = (ids[:, :, None] == ids[:, None]).tril()[:, None]
        print(f"{count:9}  {seconds(q, None, True, ids, ids):12.3f}  {seconds(q, mask, False):11.3f}  {plain:23.3f}")


if __name__ == "__main__":
    main()
