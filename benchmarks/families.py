"""Architectures of transformers under every strategy, all ranks simulated in this process: loss and every gradient against the
unsharded model, which ops are replicated for want of a rule, and why a model is refused.

usage: python benchmarks/families.py [NAME ...] [--meshes dp=2,tp=2 ...] [--strategies auto,fsdp,...] [--write]
Prints a row a family. Results are kept in benchmarks/families.json, one family at a time, so a long sweep may be run in slices;
`--write` puts the table of all kept results between the families markers of README.md. Exit code 1 for a wrong number.
"""

from __future__ import annotations

import argparse
import logging
import sys
import time
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import AutoparError, Mesh, api, rules
from autopar.graph import is_op
from autopar.hardware import load
from autopar.planner.make import PlanOptions, make_plan
from autopar.simulated import TOLERANCE, verify_plan
from tests.families import FAMILIES

MESHES = ["dp=2,tp=2"]
STRATEGIES = ["auto", "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp"]
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "families.json"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
BATCH, SEQ = 4, 16


def check(name: str, meshes: list[str], strategies: list[str], batch: int = BATCH, seq: int = SEQ) -> dict:
    """One family's result: what the table says of it."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name](batch, seq)
    result = {"kind": FAMILIES[name].kind, "right": [], "wrong": [], "refused": {}, "replicated": []}
    start = time.process_time()
    try:
        captured = api.trace(model, inputs)
    except AutoparError as error:
        return result | {"error": f"{type(error).__name__}: {error.message}", "source": short_source(error.source)}
    result["trace_seconds"] = round(time.process_time() - start, 1)
    result["replicated"] = sorted({str(n.target) for n in captured.graph.nodes if is_op(n) and rules.rule_of(n) is None})
    for mesh in meshes:
        for strategy in strategies:
            run = f"{mesh} {strategy}"
            try:
                options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=False)
                report = verify_plan(captured, make_plan(captured, Mesh.parse(mesh), options, name), model, inputs)
            except AutoparError as error:
                result["refused"][run] = f"{type(error).__name__}: {error.message}"
                continue
            errors = {"loss": report.loss_error, **report.gradient_errors, **report.buffer_errors}
            worst = max(errors, key=errors.get)
            if all(error <= TOLERANCE for error in errors.values()):
                result["right"].append(run)
            else:
                where = f", first at {report.diverging.node}" if report.diverging else ""
                result["wrong"].append(f"{run}: {worst} {errors[worst]:.0e}{where}")
    result["check_seconds"] = round(time.process_time() - start, 1)
    return result


def short_source(source: str | None) -> str:
    """`modeling_led.py:193` of `/path/modeling_led.py:193: if is_global_attn:`."""
    return ":".join(Path(source).name.split(":")[:2]) if source else ""


def line(name: str, result: dict) -> str:
    """One family for the terminal."""
    if "error" in result:
        return f"{name}: {result['error']} ({result['source']})"
    words = [f"{len(result['right'])} right"]
    words += [f"WRONG {w}" for w in result["wrong"]] + [f"{run} refused: {e}" for run, e in result["refused"].items()]
    words += [f"replicated: {', '.join(result['replicated'])}"] if result["replicated"] else []
    return f"{name}: {'; '.join(words)}  [{result['trace_seconds']} s traced, {result['check_seconds']} s in all]"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--write", action="store_true")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    wrong = 0
    for name in a.names or FAMILIES:
        result = check(name, a.meshes, a.strategies.split(","))
        wrong += len(result["wrong"])
        print(line(name, result), flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
