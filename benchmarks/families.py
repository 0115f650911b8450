"""Architectures of transformers under every strategy, all ranks simulated in this process: loss and every gradient
against the unsharded model, which ops are replicated for want of a rule, and why a model is refused.

usage: python benchmarks/families.py [NAME ...] [--meshes dp=2,tp=2 ...] [--strategies auto,fsdp,...] [--write]
Prints a line a family; without names, all of them. What was found is kept in benchmarks/families.json, a family at a
time, so that a long sweep may be run in slices, and `--write` puts the table of all that is kept between the families
markers of docs/families.md (`--write --no-run` does nothing else). Exit code 1 for a wrong number.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import warnings
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from autopar import AutoparError, Mesh, compiler, rules
from autopar.frontend.export import Captured
from autopar.hardware.profile import load
from autopar.ir.graph import is_op
from autopar.planner.spmd.plan import make_plan
from autopar.planner.spmd.plan_options import PlanOptions
from autopar.simulate.compare import TOLERANCE, VerifyReport, verify_plan
from tests.families import FAMILIES
from tests.families.build import as_shipped

MESHES = ["dp=2,tp=2"]
SHIPPED = "shipped"  # the planner's own plan too, with dropout, LayerDrop and masking as the configurations have them
STRATEGIES = ["auto", SHIPPED, "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp"]
KNOWN = [*STRATEGIES, "all_gather_kv", "ring", "ulysses"]  # the order in the table
ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "families.json"
BEGIN, END = "<!-- families:begin -->", "<!-- families:end -->"
BATCH, SEQ = 4, 16


def check(name: str, meshes: list[str], strategies: list[str], batch: int = BATCH, seq: int = SEQ) -> dict:
    """One family's result: what the table says of it."""
    torch.manual_seed(0)
    model, inputs = FAMILIES[name](batch, seq)
    result = {"kind": FAMILIES[name].kind, "right": [], "wrong": [], "refused": {}, "replicated": []}
    try:
        captured = compiler.trace(model, inputs)
    except AutoparError as error:
        described = {"error": f"{type(error).__name__}: {error.message}", "source": short_source(error.source)}
        return {"kind": result["kind"]} | described
    result["replicated"] = sorted(
        {str(n.target) for n in captured.graph.nodes if is_op(n) and rules.rule_of(n) is None}
    )
    for mesh in meshes:
        for strategy in strategies:
            run = f"{mesh} {strategy}"
            try:
                if strategy == SHIPPED:
                    report = as_it_ships(name, mesh, batch, seq)
                else:
                    report = verified(captured, strategy, mesh, name, model, inputs)
            except AutoparError as error:
                result["refused"][run] = f"{type(error).__name__}: {error.message}"
                continue
            except Exception as error:  # a crash is a fault of autopar too, and other families are still to be run
                result["wrong"].append(f"{run}: {type(error).__name__}: {error}".splitlines()[0][:200])
                continue
            errors = report.errors
            worst = max(errors, key=errors.get)
            if report.match:
                result["right"].append(run)
            else:
                where = f", first at {report.diverging.node}" if report.diverging else ""
                result["wrong"].append(f"{run}: {worst} {errors[worst]:.0e}{where}")
    return result


def as_it_ships(name: str, mesh: str, batch: int, seq: int) -> VerifyReport:
    """One step with what its configuration draws: against the graph of one device, which draws the same, if it does."""
    torch.manual_seed(0)
    with as_shipped():
        model, inputs = FAMILIES[name](batch, seq)
    return verified(compiler.trace(model, inputs), "auto", mesh, name, model, inputs)


def verified(captured: Captured, strategy: str, mesh: str, name: str, model, inputs) -> VerifyReport:
    """One simulated step against one device; the table of expert strategies is made where the strategy is left out."""
    options = PlanOptions(load("cpu-gloo"), strategy=strategy, baselines=strategy == "auto")
    return verify_plan(captured, make_plan(captured, Mesh.parse(mesh), options, name), model, inputs)


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
    return f"{name}: {'; '.join(words)}"


# the table
# --------------------------------------------------------------------------------------------------------------


def keep(name: str, result: dict) -> None:
    """Adds one family's result to those that are kept: runs of other meshes and strategies stay."""
    kept = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
    before = kept.get(name, {})
    if "error" not in result and "error" not in before:
        new = {run for run in result["right"]} | set(result["refused"]) | {w.split(": ")[0] for w in result["wrong"]}
        result["right"] = sorted(set(result["right"]) | {r for r in before.get("right", []) if r not in new})
        result["wrong"] = sorted(
            [*result["wrong"], *(w for w in before.get("wrong", []) if w.split(": ")[0] not in new)]
        )
        result["refused"] |= {run: e for run, e in before.get("refused", {}).items() if run not in new}
    kept[name] = result
    RESULTS.write_text(json.dumps(dict(sorted(kept.items())), indent=1) + "\n")


def table(kept: dict[str, dict]) -> str:
    """Markdown: every kept family by kind and name, and how many are right."""
    right = sum(bool(r.get("right")) and not r.get("wrong") for r in kept.values())
    refused = sum(bool(r.get("right")) and bool(r.get("refused")) for r in kept.values())
    rows = [
        f"{right} of {len(kept)} architectures of transformers give the loss and every gradient of one device "
        f"(relative error up to {TOLERANCE['fp32']:.0e}, batch {BATCH}; no dropout but in the runs `shipped`) in every "
        f"run that was made of them, but {refused} that are refused a run (LayerDrop): `benchmarks/families.py`.",
        "",
        "| kind | family | right | else |",
        "|---|---|---|---|",
    ]
    for name, result in sorted(kept.items(), key=lambda item: (item[1]["kind"], item[0])):
        rows.append(f"| {result['kind']} | {name} | {runs(result.get('right', []))} | {remarks(result)} |")
    return "\n".join(rows)


def runs(right: list[str]) -> str:
    """`dp=2,tp=2: auto fsdp` of "dp=2,tp=2 auto" and "dp=2,tp=2 fsdp"."""
    by_mesh: dict[str, list[str]] = {}
    for run in right:
        mesh, strategy = run.split(" ")
        by_mesh.setdefault(mesh, []).append(strategy)
    return "; ".join(f"{mesh}: {' '.join(sorted(found, key=KNOWN.index))}" for mesh, found in sorted(by_mesh.items()))


def remarks(result: dict) -> str:
    if "error" in result:
        where = f" at {result['source']}" if result["source"] else ""
        return f"{result['error'].split(':')[0]}{where}"
    words = [f"**wrong** {w}" for w in result["wrong"]]
    words += [f"refused {run}: {error}" for run, error in sorted(result["refused"].items())]
    words += [f"replicated: {', '.join(result['replicated'])}"] if result["replicated"] else []
    return "; ".join(words)


def write_readme(kept: dict[str, dict]) -> None:
    path = ROOT / "docs" / "families.md"
    before, _, rest = path.read_text().partition(BEGIN)
    _, found, after = rest.partition(END)
    if not found:
        sys.exit(f"docs/families.md has no {BEGIN} ... {END}")
    path.write_text(f"{before}{BEGIN}\n{table(kept)}\n{END}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {len(FAMILIES)}: {', '.join(FAMILIES)}")
    parser.add_argument("--meshes", nargs="*", default=MESHES)
    parser.add_argument("--strategies", default=",".join(STRATEGIES))
    parser.add_argument("--write", action="store_true", help="the table of all kept results into docs/families.md")
    parser.add_argument("--no-run", action="store_true", help="check nothing")
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    wrong = 0
    for name in [] if a.no_run else a.names or FAMILIES:
        result = check(name, a.meshes, a.strategies.split(","))
        wrong += len(result.get("wrong", []))
        print(line(name, result), flush=True)
        keep(name, result)
    if a.write:
        write_readme(json.loads(RESULTS.read_text()))
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
