"""`autopar graph`: the compiler's passes with what each changes, or the graph as one of them leaves it."""

from __future__ import annotations

import argparse
import difflib

from .. import models
from ..errors import AutoparError
from ..ir.mesh import Mesh
from ..plans.pipeline import axis_of, rank_inside
from . import common

EXAMPLE = "autopar graph --model mlp-tiny --mesh dp=2,tp=2 --after localize --rank 1"


def add(subparsers) -> None:
    """Declare `autopar graph` and its arguments."""
    parser = common.command(subparsers, "graph", "print the passes, or the graph after one of them", EXAMPLE, run)
    common.add_model(parser)
    common.add_planning(parser, hardware="cpu-gloo")
    common.add_adapting(parser)
    common.add_micro_batches(parser)
    after = "print the graph after this pass, or after plan: the joint graph with the plan's layouts"
    parser.add_argument("--after", metavar="PASS", help=after)
    parser.add_argument("--rank", type=int, default=0, help="whose graph, from localize on (default 0)")
    parser.add_argument("--diff", action="store_true", help="with --after: what the pass changed, a line a node")


class _Reached(Exception):
    """The pass that was asked for has run, and nothing after it is needed."""


def run(args: argparse.Namespace) -> int:
    """Compile up to the pass that is asked for, and print the passes, the graph or what the pass changed."""
    if args.diff and not args.after:
        raise AutoparError("--diff shows what one pass changes", fix="name it, such as --after localize")
    common.check(args)
    from .. import compiler
    from ..api import entry as api
    from ..codegen import pass_manager
    from ..codegen.graph_text import graph_text

    names = [step.name for step in compiler.PASSES]
    if args.after not in (None, "plan", *names):
        raise AutoparError(f"no pass is called {args.after!r}", fix=f"one of {', '.join(names)}, or plan")
    mesh = Mesh.parse(args.mesh)
    mesh.coordinate(args.rank)  # raises if there is no such rank
    adapt, staged = common.adaptations(args), axis_of(mesh) is not None or (args.micro_batches or 1) > 1
    of_stages = names[names.index(compiler.STAGES[-1].name) + 1 :]  # they run for each of a rank's stages
    common.quiet()
    lines: list[str] = []
    texts: dict[str, str] = {}  # of the passes up to the one that was asked for

    def watch(result: pass_manager.PassResult) -> None:
        if " " in result.name:  # the same passes for gradients that add up before they are reduced
            return
        lines.append(result.line())
        if args.after:
            graphs = pass_manager.graphs_of(result.subject).values()
            text = "\n".join(map(graph_text, graphs)) if args.diff else pass_manager.text_of(result.subject)
            continues = staged and result.name in of_stages and result.name in texts
            texts[result.name] = f"{texts[result.name]}\n{text}" if continues else text
        if result.name == args.after and not (staged and result.name in of_stages):
            raise _Reached

    try:
        with common.progress() as report, pass_manager.observe(watch):
            report("building the model")
            model, inputs = models.build(args.model, batch=args.batch, seq=args.seq)
            planned = api.search(
                model,
                args.mesh,
                inputs,
                baselines=False,
                report=report,
                adapt=adapt,
                micro_batches=args.micro_batches,
                **common.planning(args),
            )
            captured, plan = planned.captured, planned.plan
            texts["plan"] = graph_text(captured.graph_module, plan.sharding)
            if args.after != "plan" and staged:
                _lower_stages(captured, plan, args, lines, texts)
            elif args.after != "plan":
                compiler.lower(captured, plan, args.rank)
    except _Reached:
        pass
    if not args.after:
        print(f"{args.model} on mesh {args.mesh}, rank {args.rank}", *lines, sep="\n")
    elif args.after not in texts:
        needs = next(step.needs for step in compiler.PASSES if step.name == args.after)
        raise AutoparError(f"the pass {args.after} has nothing to do here", fix=f"it needs {needs}")
    elif args.diff:
        print(_difference(texts, args.after), end="")
    else:
        print(texts[args.after], end="")
    return 0


def _lower_stages(captured, plan, args: argparse.Namespace, lines: list[str], texts: dict[str, str]) -> None:
    """Run the passes of micro-batches and stages, then those of each stage of a rank."""
    from ..codegen.graph_text import graph_text
    from ..codegen.rank_program import SIDE_BY_SIDE, SPLIT_BACKWARD, pairs_of
    from ..compiler import STAGES, lower_stage, stages_of

    micro, stages = stages_of(captured, plan)
    coordinate, pipeline = plan.mesh.coordinate(args.rank), plan.pipeline
    mine = pipeline.stages_of(pipeline.pp_rank_of(coordinate))
    texts[STAGES[-1].name] = "\n".join(graph_text(stages[i].joint) for i in mine)  # what the next pass begins with
    programs = {}
    for i in mine:
        held = pipeline.costs[i].name if pipeline.costs else "the whole model"
        lines.append(f"stage {i} of {len(stages)}: {held}")
        programs[i] = program = lower_stage(stages[i], micro, plan, rank_inside(plan.sharding.mesh, coordinate))
        if args.after == SPLIT_BACKWARD.name and program.backward is not None:
            program.split  # noqa: B018  parts of the backward are made when a schedule asks for them
    if args.after == SIDE_BY_SIDE.name:
        order = pipeline.orders.together(pipeline.pp_rank_of(coordinate))
        for i, pairs in pairs_of(programs, order, micro.is_smaller).items():
            for pair in pairs[:1]:
                programs[i].graph(pair, programs)


def _difference(texts: dict[str, str], after: str) -> str:
    """Return a unified diff of the graph before and after a pass."""
    names = list(texts)
    before = names[names.index(after) - 1] if names[0] != after else None
    old = texts[before].splitlines(keepends=True) if before else []
    return "".join(difflib.unified_diff(old, texts[after].splitlines(keepends=True), before or "nothing", after, n=1))
