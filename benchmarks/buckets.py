"""Compare buckets that are filled up to their size with those that end where blocks of the model end.

    OMP_NUM_THREADS=1 AUTOPAR_CACHE=off python benchmarks/buckets.py

By block, a bucket takes the parameters or gradients of the next block if all of them fit, and ends there if not; a
block that is larger than a bucket is packed by size. The emitted graphs of a rank are played: products of matrices and
attention take their FLOPs at 60 % of the device's peak, collectives what the cost model says, one after the other, and
a wait stands still until its collective is done. `exposed`: those seconds.
"""

from __future__ import annotations

import itertools
import math
import re
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import patch

from torch import fx

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar._torch import c10d
from autopar.cost.collectives import CollectiveCost
from autopar.cost.compute import flops_of
from autopar.cost.measured import SENT
from autopar.hardware.profile import Hardware, load
from autopar.ir.graph import operand
from autopar.ir.mesh import Mesh
from autopar.passes.distribute import bucket
from autopar.passes.distribute.heavy_ops import is_heavy
from autopar.utils.format import table
from benchmarks.overlap import LARGE, LLAMA, Case

EFFICIENCY = 0.6
WIDE = LLAMA.replace("hidden=1024", "hidden=2048").replace("ffn=2816", "ffn=5632")
CASES = [*LARGE[:2], *LARGE[5:7], LARGE[8], Case(WIDE, "dp=8", "fsdp", 16, 1024), replace(LARGE[0], batch=64)]
by_size = bucket._grouped


def block_of(start: fx.Node) -> str:
    """The block of the model that a collective's tensor is of, a module of its own outside of blocks."""
    module = start.meta.get("module") or ""
    found = re.match(r".*?\.\d+(?=\.|$)", module)
    return found[0] if found else module


def by_block(starts: list, most_bytes: float, alone: set[fx.Node]) -> dict[tuple, list[list]]:
    """Group as autopar does, and each group again by block."""
    unlimited = by_size(starts, math.inf, alone)
    return {key: _ending_with_blocks(members, most_bytes) for key, (members,) in unlimited.items()}


def _ending_with_blocks(members: list, most_bytes: float) -> list[list]:
    found: list[list] = [[]]
    filled = 0.0
    for _, of_block in itertools.groupby(members, lambda start: block_of(start.node)):
        block = [(start, start.node.meta["tensor_bytes"]) for start in of_block]
        ends = filled + sum(size for _, size in block) > most_bytes
        for i, (start, size) in enumerate(block):
            if found[-1] and (filled + size > most_bytes or ends and i == 0):
                found.append([])
                filled = 0.0
            found[-1].append(start)
            filled += size
    return found


def played(program, hardware: Hardware, mesh: Mesh) -> tuple[float, float, int]:
    """Milliseconds of a step, those that collectives expose, and the number of these."""
    cost, speed = CollectiveCost(hardware, mesh), EFFICIENCY * hardware.flops_per_second["bf16"]
    seconds = exposed = 0.0
    count = 0
    for part in (program.parts.forward, program.parts.backward):
        now = free = 0.0
        done: dict[fx.Node, float] = {}
        for node in part.graph.nodes:
            if (moved := node.meta.get("collective")) is not None:
                sent = SENT[moved.kind](math.prod(map(mesh.size, moved.axes)))
                free = max(free, now) + cost.seconds(moved.kind, moved.axes, moved.wire_bytes / sent)
                done[node], count = free, count + 1
            elif node.target is c10d.wait_tensor.default:
                exposed += max(0.0, done.get(operand(node), 0.0) - now)
                now = max(now, done.get(operand(node), 0.0))
            elif is_heavy(node):
                now += flops_of(node) / speed
        exposed += max(0.0, free - now)
        seconds += max(now, free)
    return seconds * 1e3, exposed * 1e3, count


def row(case: Case) -> list[str]:
    found = [f"{case} x {case.batch}"]
    for rule in (by_size, by_block):
        with patch.object(bucket, "_grouped", rule):
            _, program = case.lowered()
        ms, exposed, count = played(program, load(case.hardware), Mesh.parse(case.mesh))
        found += [f"{ms:.2f}", f"{exposed:.2f}", str(count)]
    return [*found, f"{float(found[4]) / float(found[1]):.3f}"]


def main() -> None:
    heads = [f"{rule}: {what}" for rule in ("size", "block") for what in ("ms", "exposed", "count")]
    print("\n".join(table(["", *heads, "block / size"], [row(case) for case in CASES])))


if __name__ == "__main__":
    main()
