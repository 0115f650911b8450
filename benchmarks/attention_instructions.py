"""Instructions of a weight in the machine code of attention's own kernels: what autopar/cost/attention.py charges.

    python benchmarks/attention_instructions.py > benchmarks/results/attention_instructions.txt

Triton compiles the kernels for GPUs that need not be there, its disassembler lists them, and the instructions of the
loop over whole tiles are counted, by lane and weight: of a kernel that does nothing besides, and what dropping weights
and capping scores adds to it. Products of integers (IMAD) are begun at half of the rate, so each counts twice.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from autopar.ops import attention_fused
from autopar.utils.format import table
from tests.ops.test_attention_fused import compiled

PLAIN = {"CAUSAL": True, "DROPS": False, "ALIGNED": True, "CAPS": False, "MASKED": False}
TILES = {"forward": attention_fused.FORWARD, "queries": attention_fused.QUERIES, "keys": attention_fused.KEYS}
LABEL = re.compile(r"^(\.L_x_\d+):")
JUMP = re.compile(r"BRA.*`\((\.L_x_\d+)\)")
OPCODE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z0-9_]+)")


def slots(name: str, width: int, capability: int, **flags: bool) -> float:
    """Return the instructions of a weight in the loop of a kernel over whole tiles."""
    made, tile = compiled(name, width, capability, **PLAIN | flags), TILES[name][width]
    share = tile.warps * 32 / (tile.rows * tile.columns)
    powers = 2 if flags.get("CAPS") else 1  # of a weight, which say how many times a loop has its tile
    found = [
        _weighed(lines) * share / round(sum("MUFU.EX2" in line for line in lines) * share / powers)
        for lines in _loops(_listing(made.asm["cubin"]))
    ]
    return min(found)


def _listing(cubin: bytes) -> list[str]:
    import triton

    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [triton.knobs.nvidia.nvdisasm.path, "-c", file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()


def _loops(lines: list[str]) -> list[list[str]]:
    """Return the lines of innermost loops that multiply: those between a label and a jump back to it."""
    labels = {match[1]: i for i, line in enumerate(lines) if (match := LABEL.match(line.strip()))}
    ends = [(labels[m[1]], i) for i, line in enumerate(lines) if (m := JUMP.search(line)) and labels[m[1]] < i]
    inner = [(a, b) for a, b in ends if not any(a <= c and d < b for c, d in ends if (c, d) != (a, b))]
    return [lines[a : b + 1] for a, b in inner if any("MMA" in line for line in lines[a:b])]


def _weighed(lines: list[str]) -> int:
    found = [match[1] for line in lines if (match := OPCODE.search(line))]
    return len(found) + sum(opcode == "IMAD" for opcode in found)


def main() -> None:
    rows = []
    for capability in (80, 90):
        for width in (64, 128):
            for name in TILES:
                plain, drops, caps = (
                    slots(name, width, capability, **flags) for flags in ({}, {"DROPS": True}, {"CAPS": True})
                )
                cells = f"{plain:.1f}", f"+{drops - plain:.1f}", f"+{caps - plain:.1f}"
                rows.append([f"{capability / 10:.1f}", str(width), name, *cells])
    print("\n".join(table(["capability", "width", "kernel", "plain", "dropped", "capped"], rows, left=3)))


if __name__ == "__main__":
    main()
