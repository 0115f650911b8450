"""`autopar trace`: the predicted step as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from ..utils.format import ms
from . import common

EXAMPLE = "autopar trace --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --out trace.json"


def add(subparsers) -> None:
    """Declare `autopar trace` and its arguments."""
    parser = common.command(subparsers, "trace", "write the predicted step as a Chrome trace", EXAMPLE, run)
    common.add_played(parser, out="where to write it; open it at ui.perfetto.dev")
    common.add_pipeline(parser)


def run(args: argparse.Namespace) -> int:
    """Plan the model and write the predicted step as a trace to --out."""
    planned, timeline = common.played(args)
    trace, said = _pipeline(planned) if timeline is None else _flat(planned, timeline)
    Path(args.out).write_text(json.dumps(trace) + "\n")
    print(f"{args.out}: {said}")
    return 0


def _flat(planned, timeline) -> tuple[dict, str]:
    from ..view.trace import trace_of

    exposed = f"{ms(timeline.exposed_seconds)} of communication exposed"
    return trace_of(planned, timeline), f"{len(timeline.events)} events, step {ms(timeline.seconds)}, {exposed}"


def _pipeline(planned) -> tuple[dict, str]:
    from ..view.pipeline_trace import pipeline_trace_of

    evaluated = planned.stages.evaluated
    actions = sum(map(len, evaluated.played.schedule.orders))
    said = f"{actions} actions of {evaluated.pipeline.ranks} ranks, step {ms(evaluated.step_seconds)}"
    return pipeline_trace_of(planned), f"{said}, bubble {evaluated.played.bubble:.1%}"
