"""All that one GPU can show of autopar, most valuable first, in under nine minutes.

    OMP_NUM_THREADS=4 python benchmarks/gpu.py                      # writes benchmarks/results/gpu_<name>.txt
    python benchmarks/gpu.py --parts families,attention             # some of it
    python benchmarks/gpu.py --fake                                 # tiny sizes on the processor: does it run?

Each part (benchmarks/gpu_parts.py) is a process of its own with a limit of time; a part that fails says so, and the
next one runs. Every figure stands beside what it is compared with: eager torch, FSDP2, torch.compile, or the
prediction.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
SECONDS = {
    "families": 75, "attention": 50, "own_attention": 35, "slice": 105, "verified": 55, "ranks": 60, "packed": 20,
    "calibrated": 45, "waits": 25, "nccl": 40, "state": 20, "faults": 10,
}  # fmt: skip


def run(part: str, fake: bool) -> tuple[str, str, float]:
    """Return what a part printed, why it failed ("" if it did not) and the seconds that it took."""
    command = [sys.executable, str(HERE / "gpu_parts.py"), part, *(["--fake"] if fake else [])]
    start = time.perf_counter()
    environment = os.environ | {"AUTOPAR_CACHE": "off", "PYTHONWARNINGS": "ignore", "TOKENIZERS_PARALLELISM": "false"}
    limit = SECONDS[part] * (4 if fake else 1)
    pipes = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, env=environment, start_new_session=True, **pipes) as process:
        try:
            said, errors = process.communicate(timeout=limit)
            lines = [line for line in errors.splitlines() if line.strip()] or [f"exit code {process.returncode}"]
            reason = lines[-1] if process.returncode else ""
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # with the ranks that it started
            said, reason = process.communicate()[0], f"not done after {limit} s"
    return said, reason, time.perf_counter() - start


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--parts", default=",".join(SECONDS), help=f"of {', '.join(SECONDS)} (default all)")
    parser.add_argument("--fake", action="store_true", help="tiny sizes on the processor, nothing is kept")
    args = parser.parse_args()
    import torch

    if not (args.fake or torch.cuda.is_available()):
        print("there is no GPU: --fake tries the parts on the processor", file=sys.stderr)
        return 1
    device = "the processor, tiny sizes" if args.fake else torch.cuda.get_device_name()
    texts = [f"# python benchmarks/gpu.py{' --fake' * args.fake} on {device}, torch {torch.__version__}"]
    print(texts[0], flush=True)
    failed = 0
    for part in args.parts.split(","):
        said, reason, seconds = run(part, args.fake)
        failed += bool(reason)
        end = f"FAILED: {reason}" if reason else "done"
        texts.append(f"\n== {part} ({seconds:.0f} s): {end}\n{said.rstrip()}")
        print(texts[-1], flush=True)
        if not args.fake:  # after each part: what is known stays if the machine goes
            name = re.sub(r"\W+", "_", device.removeprefix("NVIDIA ")).strip("_").lower()
            (HERE / "results" / f"gpu_{name}.txt").write_text("\n".join(texts) + "\n")
    return min(failed, 1)


if __name__ == "__main__":
    sys.exit(main())
