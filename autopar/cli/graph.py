"""`autopar graph`: the compiler's passes with what each changes, or the graph as one of them leaves it."""

from __future__ import annotations

import argparse
import difflib

from ..errors import AutoparError
from . import common

EXAMPLE = "autopar graph --model mlp-tiny --mesh dp=2,tp=2 --after localize --rank 1"
GLOBAL = (
    "export",
    "explicit_casts",
    "grad_regions",
    "canonicalize",
    "differentiate",
    "clean",
)  # before there is a plan
ADAPT = ("lora", "quantize", "fake_quant")  # between canonicalize and differentiate, if the command line asks for them
LOCAL = ("localize", "recompute", "lower_ops", "bucket", "in_place", "overlap", "partition")
PIPELINE = ("micro_batch", "cut")  # on a mesh with pp, before the steps of each of a rank's stages
STAGES = (*GLOBAL[:4], *ADAPT, *GLOBAL[4:], "plan", *PIPELINE, *LOCAL)


def add(subparsers) -> None:
    """Declare `autopar graph` and its arguments."""
    parser = common.command(subparsers, "graph", "print the passes, or the graph after one of them", EXAMPLE, run)
    common.add_model(parser)
    common.add_planning(parser, hardware="cpu-gloo")
    common.add_adapting(parser)
    after = "print the graph after this step: " + ", ".join(STAGES) + " (plan: the joint graph with the plan's layouts)"
    parser.add_argument("--after", choices=STAGES, metavar="STEP", help=after)
    parser.add_argument("--rank", type=int, default=0, help="whose graph, from localize on (default 0)")
    parser.add_argument("--diff", action="store_true", help="with --after: what the step changed, a line a node")


class _Reached(Exception):
    """The step that was asked for has run, and nothing after it is needed."""


def run(args: argparse.Namespace) -> int:
    """Compile up to the step that is asked for, and print the passes, the graph or what the step changed."""
    if args.diff and not args.after:
        raise AutoparError("--diff shows what one step changes", fix="name it, such as --after localize")
    common.check(args)
    from ..adapt import order

    adapt = common.adaptations(args)
    if args.after in ADAPT and args.after not in {a.name for a in order.checked(adapt)}:
        raise AutoparError(f"the model is compiled without {args.after}", fix="add --lora, --qlora or --qat")
    from .. import models
    from ..api import entry as api
    from ..codegen import pass_manager
    from ..codegen.graph_text import graph_text
    from ..codegen.lower import lower
    from ..ir.mesh import Mesh
    from ..plans.pipeline import axis_of

    mesh = Mesh.parse(args.mesh)
    mesh.coordinate(args.rank)  # raises if there is no such rank
    has_pipeline = axis_of(mesh) is not None
    if args.after in PIPELINE and not has_pipeline:
        raise AutoparError(f"the step {args.after} is one of pipelines", fix="name an axis pp: --mesh pp=2,dp=2")
    common.quiet()
    lines: list[str] = []
    texts: dict[str, str] = {}  # of the steps up to the one that was asked for
    kept = {}

    def watch(stage: pass_manager.Stage) -> None:
        if " " in stage.name:  # the same steps for gradients that add up before they are reduced
            return
        lines.append(stage.line())
        again = stage.name in kept and has_pipeline  # of another stage of this rank
        kept[stage.name] = stage.result
        if args.after:
            graphs = pass_manager.graphs_of(stage.result).values()
            text = "\n".join(map(graph_text, graphs)) if args.diff else pass_manager.stage_text(stage.result)
            texts[stage.name] = f"{texts[stage.name]}\n{text}" if again else text
        if stage.name == args.after and not (has_pipeline and stage.name in LOCAL):
            raise _Reached

    try:
        with common.progress() as report, pass_manager.observe(watch):
            report("building the model")
            model, inputs = models.build(args.model, batch=args.batch, seq=args.seq)
            plan = api.plan(
                model, args.mesh, inputs, baselines=False, report=report, adapt=adapt, **common.planning(args)
            )
            captured = kept["differentiate"]
            texts["plan"] = graph_text(captured.graph_module, plan.sharding)
            if args.after == "overlap" and not plan.overlaps:
                raise AutoparError(
                    f"graphs for {plan.hardware} wait at once", fix="name a GPU, such as --hardware h100"
                )
            if args.after != "plan" and has_pipeline:
                _lower_stages(captured, plan, args.rank, lines, texts)
            elif args.after != "plan":
                lower(captured, plan, args.rank)
    except _Reached:
        pass
    if not args.after:
        print(f"{args.model} on mesh {args.mesh}, rank {args.rank}", *lines, sep="\n")
    elif args.diff:
        print(_difference(texts, args.after), end="")
    else:
        print(texts[args.after], end="")
    return 0


def _lower_stages(captured, plan, rank: int, lines: list[str], texts: dict[str, str]) -> None:
    """Run the steps of a pipeline, then those of each stage of a rank."""
    from ..codegen.graph_text import graph_text
    from ..codegen.lower_pipeline import lower_stage, stages_of
    from ..plans.pipeline import rank_inside

    micro, stages = stages_of(captured, plan)
    coordinate, pipeline = plan.mesh.coordinate(rank), plan.pipeline
    mine = pipeline.stages_of(coordinate[pipeline.axis])
    texts["cut"] = "\n".join(graph_text(stages[i].joint) for i in mine)  # what the next step begins with
    for i in mine:
        lines.append(f"stage {i} of {len(stages)}: {pipeline.costs[i].name}")
        lower_stage(stages[i], micro, plan, rank_inside(plan.sharding.mesh, coordinate))


def _difference(texts: dict[str, str], after: str) -> str:
    """Return a unified diff of the graph before and after a step."""
    names = list(texts)
    before = names[names.index(after) - 1] if names[0] != after else None
    old = texts[before].splitlines(keepends=True) if before else []
    return "".join(difflib.unified_diff(old, texts[after].splitlines(keepends=True), before or "nothing", after, n=1))
