"""Loss and gradients of every model, mesh and strategy against one device, all ranks simulated in this process.

usage: python benchmarks/simulated.py [--models gpt2,llama,...] [--meshes dp=8 ...] [--strategies auto,fsdp,...]
Prints a row a run and, last, how many match (relative error of loss and of every parameter's gradient <= 1e-5).
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import AutoparError
from autopar.models import build
from autopar.simulate.compare import verify_model
from tests.families import FAMILIES

OWN = {"mlp": "mlp-tiny", "gpt": "gpt2-tiny", "own-llama": "llama-tiny"}
MESHES = ["dp=8", "tp=8", "dp=2,tp=4", "dp=4,tp=4"]
STRATEGIES = ["auto", "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp"]


def model_of(name: str, batch: int):
    torch.manual_seed(0)
    if name in FAMILIES:
        model, inputs = FAMILIES[name](batch)
        return model.train(), inputs
    return build(OWN[name], batch=batch, seq=16, device="cpu")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join([*FAMILIES, *OWN]))
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--batch", type=int, default=16)
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    runs = matched = refused = 0
    print(f"{'model':10} {'mesh':11} {'strategy':12} {'loss':>8} {'gradients':>9}  {'seconds':>7}")
    for mesh in a.meshes:
        for name in a.models.split(","):
            for strategy in a.strategies.split(","):
                start = time.perf_counter()
                model, inputs = model_of(name, a.batch)
                try:
                    report = verify_model(model, inputs, mesh, strategy=strategy)
                except AutoparError as error:
                    refused += 1
                    print(f"{name:10} {mesh:11} {strategy:12} refused: {error.message}", flush=True)
                    continue
                worst = max(report.gradient_errors.values(), default=0.0)
                runs += 1
                matched += report.loss_error <= 1e-5 and worst <= 1e-5
                seconds = time.perf_counter() - start
                print(
                    f"{name:10} {mesh:11} {strategy:12} {report.loss_error:8.0e} {worst:9.0e}  {seconds:7.1f}",
                    flush=True,
                )
    print(f"{matched}/{runs} match, {refused} refused with a reason")
    return int(matched != runs)


if __name__ == "__main__":
    sys.exit(main())
