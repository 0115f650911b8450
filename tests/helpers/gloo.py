"""Run a function on several gloo processes and hear of the first error that any of them meets.

    gloo.run(4, check, "dp=2,tp=2")     # check(rank, "dp=2,tp=2") in every process, returns what each of them returns

Processes are forked from a server that has imported all of torch and transformers that a compile needs, so that
starting one costs little: what is imported after the fork is imported once for each of them, for seconds of CPU time.
"""

from __future__ import annotations

import gc
import logging
import multiprocessing
import os
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import wait

import torch
import torch.distributed as dist

PRELOAD = [
    "torch.distributed.tensor", "torch.distributed.checkpoint", "torch._dynamo", "torch._functorch.aot_autograd",
    "torch._inductor.config", "torch._inductor.fx_passes.dedupe_symint_uses", "torch.export._trace",
    "torch.export._unlift", "torch.fx.experimental.validator", "torch._subclasses.schema_check_mode",
    "torch._inductor.compiler_bisector", "torch._inductor.sizevars",
    "torch._export.passes.replace_autocast_with_hop_pass", "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2", "transformers.models.bert.modeling_bert",
    "transformers.models.auto.modeling_auto", "transformers.trainer",
    "ortools.graph.python.max_flow", "ortools.math_opt.python.mathopt", "autopar.api.asynchronous_pipeline",
    "autopar.runtime.pipeline_step", "autopar.storage.checkpoint", "tests.helpers.warm",
]  # fmt: skip


class RemoteError(AssertionError):
    """A process failed; the message is its traceback."""


def run(world: int, function: Callable, *args, seconds: float = 120) -> list:
    """Results of `function(rank, *args)` in `world` processes, in order of rank; function and results are pickled.

    Raises RemoteError with the traceback of the first failure, or TimeoutError; no process is left running."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOAD)
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(world):
            ours, theirs = context.Pipe(duplex=False)
            arguments = (rank, world, f"file://{folder}/store", theirs, function, args)
            process = context.Process(target=_main, args=arguments, daemon=True)
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return _results(pipes, processes, time.monotonic() + seconds)
        finally:
            for process in processes:
                process.kill()
                process.join()


def _results(pipes: list, processes: list, deadline: float) -> list:
    results, open_ = {}, dict(zip(pipes, range(len(pipes))))
    while open_:
        ready = wait(list(open_), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TimeoutError(f"ranks {sorted(open_.values())} are still running")
        for pipe in ready:
            rank = open_.pop(pipe)
            try:
                ok, value = pipe.recv()
            except EOFError:
                processes[rank].join(5)
                ok, value = False, f"it ended with exit code {processes[rank].exitcode}"
            if not ok:
                raise RemoteError(f"rank {rank} of {len(pipes)}: {value}")
            results[rank] = value
    return [results[rank] for rank in range(len(pipes))]


def _main(rank: int, world: int, store: str, pipe, function: Callable, args: tuple) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    torch.set_num_threads(1)
    gc.disable()  # it ends soon
    gc.freeze()  # looking through what was there before the fork would copy it into every process
    logging.getLogger("torch.distributed.tensor").setLevel(logging.ERROR)  # advice on how to gather faster
    try:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=world, timeout=timedelta(seconds=60))
        answer = True, function(rank, *args)
    except BaseException:
        answer = False, traceback.format_exc()
    pipe.send(answer)
    while True:  # the others may still talk to this process; `run` ends all of them together
        time.sleep(60)
