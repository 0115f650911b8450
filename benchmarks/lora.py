"""LoRA on simulated ranks against one process that runs PEFT's own, from the same adapters: the largest relative error of the loss
and of every gradient.

    OMP_NUM_THREADS=1 python benchmarks/lora.py [CASE ...]

Exit code 1 for an error above 1e-5.
"""

from __future__ import annotations

import logging
import sys
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from tests.adapt.against_peft import CASES, case_of

RUNS = (("dp=2,tp=2", "auto"), ("dp=2,tp=2", "megatron_sp"), ("tp=3", "auto"), ("tp=3", "megatron"), ("dp=4", "fsdp"))
TOLERANCE = 1e-5


def main() -> int:
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    print(f"{'':12}" + "".join(f"{f'{mesh} {strategy}':>22}" for mesh, strategy in RUNS))
    worst = 0.0
    for case in sys.argv[1:] or CASES:
        found = case_of(case)
        errors = [max(found.errors(mesh, strategy).values()) for mesh, strategy in RUNS]
        print(f"{case:12}" + "".join(f"{error:22.1e}" for error in errors), flush=True)
        worst = max(worst, *errors)
    return worst > TOLERANCE


if __name__ == "__main__":
    sys.exit(main())
