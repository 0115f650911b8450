"""`autopar trace`: the predicted step as a file that Perfetto and chrome://tracing open."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from . import common

EXAMPLE = "autopar trace --model gpt2 --mesh dp=2,tp=2 --batch 8 --seq 128 --out trace.json"


def add(subparsers) -> None:
    parser = common.command(subparsers, "trace", "write the predicted step as a Chrome trace", EXAMPLE, run)
    common.add_played(parser, out="where to write it; open it at ui.perfetto.dev")


def run(args: argparse.Namespace) -> int:
    planned, timeline = common.played(args)
    from ..units import ms
    from ..view.trace import trace_of

    Path(args.out).write_text(json.dumps(trace_of(planned, timeline)) + "\n")
    print(f"{args.out}: {len(timeline.events)} events, step {ms(timeline.seconds)}, "
          f"{ms(timeline.exposed_seconds)} of communication exposed")  # fmt: skip
    return 0
