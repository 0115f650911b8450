"""Models x meshes x schedules x strategies of pipelines, all ranks simulated: the worst relative error of outputs,
every gradient and buffers against one device, in fp64, with stages that begin anywhere.

    OMP_NUM_THREADS=1 python benchmarks/pipeline_matrix.py [--models gpt2,t5] [--meshes pp=2 pp=2,tp=2] [--write]

`--write` makes benchmarks/results/pipeline_matrix.txt. Exit code 1 for a wrong number.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from autopar.passes.pipeline.micro_batch import micro_batch
from autopar.schedule import KINDS
from autopar.simulate.pipeline import Lowered, simulate_lowered
from tests.helpers import staged

TABLE = Path(__file__).parent / "results" / "pipeline_matrix.txt"
MODELS = ("gpt2", "llama", "t5", "bert", "vit", "mixtral", "resnet")
WHOLE = ("resnet",)  # of which a step is one micro-batch
MESHES = {
    "pp=2": ("auto",), "pp=4": ("auto",), "pp=2,dp=2": ("auto", "ddp", "zero1", "zero2", "fsdp"),
    "pp=2,tp=2": ("auto", "megatron", "megatron_sp"),
    "pp=2,dp=2,tp=2": ("fsdp", "zero1", "megatron_sp", "megatron_sp+zero1"), "pp=4,tp=2": ("megatron_sp",),
}  # fmt: skip
HEAD = f"{'model':8} {'mesh':15} {'strategy':17} " + " ".join(f"{name[:8]:>8}" for name in KINDS)


def row(case: staged.Case, name: str, mesh: str, strategy: str) -> list[str]:
    """Return for each schedule the worst error, or "refused" by an AutoparError. Schedules with as many stages share
    their programs."""
    dp = Mesh.parse(mesh).size("dp") if "dp" in mesh else 1
    micro = micro_batch(case.captured, 1 if name in WHOLE else case.samples // dp)
    lowered, found = {}, []
    for schedule, kind in KINDS.items():
        stages = Mesh.parse(mesh).size("pp") * (kind.chunks or 2)
        try:
            cuts = staged.random_cuts(micro.captured, stages, len(mesh + strategy) + stages)
            plan = staged.plan_of(micro, mesh, schedule, cuts, strategy)
            if stages not in lowered:
                lowered[stages] = Lowered.of(case.captured, plan, check=False)
            found.append(f"{max(case.errors(simulate_lowered(lowered[stages], plan, case.values)).values()):.0e}")
        except AutoparError as error:
            print(f"{name} {mesh} {strategy} {schedule}: {type(error).__name__}: {error.message}", file=sys.stderr)
            found.append("refused")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--meshes", nargs="+", default=list(MESHES))
    parser.add_argument("--write", action="store_true")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    lines, wrong, cells, start = [HEAD], 0, 0, time.process_time()
    print(HEAD)
    for name in options.models.split(","):
        case = staged.family(name)
        for mesh in options.meshes:
            for strategy in MESHES[mesh]:
                errors = row(case, name, mesh, strategy)
                cells += len(errors)
                wrong += sum(error != "refused" and not float(error) <= staged.EXACT for error in errors)
                lines.append(f"{name:8} {mesh:15} {strategy:17} " + " ".join(f"{error:>8}" for error in errors))
                print(lines[-1], flush=True)
    lines.append(
        f"{cells} cells, {wrong} wrong (more than {staged.EXACT:.0e}), {time.process_time() - start:.0f} CPU seconds"
    )
    print(lines[-1])
    if options.write:
        TABLE.write_text("\n".join(lines) + "\n")
    return min(wrong, 1)


if __name__ == "__main__":
    sys.exit(main())
