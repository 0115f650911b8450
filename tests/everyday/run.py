"""Run scripts in one process and on several, and compare; many on one start of the processes.

python -m tests.everyday.run --mesh dp=2,tp=2 --strategy megatron gan vae      # all without names
"""

from __future__ import annotations

import argparse
import logging
import tempfile
import time
import traceback
from collections.abc import Iterable

import torch.distributed as dist

import autopar
from autopar.errors import AutoparError
from autopar.ir.mesh import Mesh
from tests.faithful.compare import difference
from tests.faithful.processes import run_all
from tests.faithful.runner import AT_CALL, BARE, DIFFERENT, EQUAL, HANG, SECONDS, Outcome, TooLate, device_mesh, limited

from .catalogue import SCRIPTS
from .script import play


def judge(job: tuple[str, str, dict]) -> Outcome:
    """Return how a script on this rank compares with the same in one process. `job`: (name, mesh, options)."""
    name, mesh, options = job
    script, start = SCRIPTS[name], time.monotonic()
    inputs = "local" if script.local else "global"

    def compile_(model, batch, **more):
        return autopar.compile(model, device_mesh(mesh), batch, inputs=inputs, **options | more)

    try:
        with limited(SECONDS):
            eager = play(script, lambda model, batch, **more: model)
            axis = device_mesh(mesh)["dp"]
            mine = play(script, compile_, axis.get_local_rank(), axis.size())
    except TooLate:
        return Outcome(HANG, f"not done after {SECONDS} s")
    except Exception as error:
        kind = AT_CALL if isinstance(error, AutoparError) else BARE
        where = traceback.extract_tb(error.__traceback__)[-1]
        return Outcome(kind, f"{error} ({where.filename.rpartition('/')[2]}:{where.lineno})", type(error).__name__)
    found = difference(eager.records, mine.records, script.tolerance)
    if found is None and len(eager.records) != len(mine.records):
        found = f"{len(mine.records)} records instead of {len(eager.records)}"
    return Outcome(DIFFERENT if found else EQUAL, found or "", seconds=time.monotonic() - start)


def outcomes(mesh: str, names: Iterable[str], **options):
    """Return (name, outcome) of scripts on all ranks of a mesh. `options`: arguments of autopar.compile."""
    jobs = [(name, mesh, options) for name in names]
    for (name, *_), outcome in run_all(Mesh.parse(mesh).devices, judge, jobs):
        yield name, outcome


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("names", nargs="*")
    parser.add_argument("--mesh", default="dp=2")
    parser.add_argument("--strategy")
    parser.add_argument("--here", action="store_true", help="in this process alone, with tracebacks")
    given = parser.parse_args()
    names = [n for n in SCRIPTS if not given.names or any(word in n for word in given.names)]
    if given.here:
        logging.basicConfig(level=logging.INFO)
        with tempfile.TemporaryDirectory() as folder:
            dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
            for name in names:
                print(name, judge((name, "dp=1", {})), flush=True)
        return
    for name, outcome in outcomes(given.mesh, names, strategy=given.strategy):
        print(f"{name:32} {outcome.seconds:5.1f} s  {outcome.kind} {outcome.error} {outcome.detail}", flush=True)


if __name__ == "__main__":
    main()
