"""What one process of `autopar train` does."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from .. import models, schedule
from .._torch import tree_flatten
from ..api import entry
from ..calibrate import stale
from ..errors import AutoparError, CheckpointMismatch, ModelError
from ..frontend.call_signature import split_example
from ..hardware import profile
from ..ir.mesh import Mesh
from ..models.corpus import batches
from ..plans.plan import Plan
from ..plans.text import summary
from ..processes import agree, process_groups, watch
from ..storage import checkpoint
from ..utils.allocation_tracker import Allocations
from ..utils.format import ms, size
from . import common

WARM_UP = 2  # steps that are not timed
OF_A_RUN = ("model", "batch", "seq", "seed", "lr")  # settings that stay when a run goes on


def in_process(rank: int, devices: int, folder: str, settings: dict) -> None:
    """Run `train` in a spawned process; an AutoparError is written down for the parent."""
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    try:
        train(rank, devices, f"file://{folder}/rendezvous", settings)
    except AutoparError as error:
        watch.fail(error)
        Path(folder, f"error-{rank}.json").write_text(json.dumps([error.message, error.fix]))
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)  # the parent is interrupted too and says so
    except Exception as error:
        watch.fail(error)
        raise


def train(rank: int, devices: int, rendezvous: str, settings: dict) -> None:
    """Build the model, compile it, take the steps and print, on rank 0, how they went."""
    common.quiet()
    if settings["timeout"]:
        os.environ["AUTOPAR_TIMEOUT_S"] = str(settings["timeout"])
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=devices)
    try:
        mesh = Mesh.parse(settings["mesh"])
        _run(
            init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names),
            settings,
            say=print if rank == 0 else _silent,
        )
    finally:
        process_groups.end()


def _run(device_mesh, settings: dict, say) -> None:
    batch, seq, steps = settings["batch"], settings["seq"], settings["steps"]
    torch.manual_seed(settings["seed"])
    source, inputs = models.build(settings["model"], batch=batch, seq=seq, device="cpu", seed=settings["seed"])
    stream = _stream(source, inputs, settings)
    if warning := stale(profile.load(settings["hardware"]), dist.get_backend()):
        say(f"warning: {warning}")
    say("planning ...", flush=True)
    planning = {k: settings[k] for k in ("hardware", "precision", "strategy", "memory", "offload", "pin", "adapt")}
    staged = {"schedule": settings["schedule"] or "auto"} | {
        k: settings[k] for k in ("micro_batches", "stages_per_rank")
    }
    model = entry.compile(source, device_mesh, inputs, **planning, **staged)
    trained = [p for p in model.parameters() if p.requires_grad] or [
        torch.zeros(0, requires_grad=True)
    ]  # stages may be frozen
    optimizer = torch.optim.AdamW(trained, lr=settings["lr"])
    say(summary(replace(model.plan, model=settings["model"])), "", sep="\n")
    done = _resume(model, optimizer, stream, settings, say)
    seconds, peak = [], 0
    for step in range(done + 1, steps + 1):
        call = split_example(next(stream))
        follows = step == min(done + WARM_UP, steps)
        start = time.perf_counter()
        with _followed(model, optimizer, call) if follows else nullcontext(lambda: 0) as most:
            args, kwargs = call
            loss = _loss_of(model(*args, **kwargs))
            loss.backward()
            seconds.append(time.perf_counter() - start)
            optimizer.step()
        peak = max(peak, most())
        optimizer.zero_grad()
        whole = time.perf_counter() - start
        say(f"step {step:{len(str(steps))}d}  loss {loss.item():.4f}  {batch * seq / whole:,.0f} tokens/s", flush=True)
        _save(step, model, optimizer, stream, settings)
    if settings["save_adapter"]:
        model.save_adapter(settings["save_adapter"])
        say(f"adapter saved in {settings['save_adapter']}")
    if not seconds:
        return say(f"all {steps} steps were taken before")
    timed = seconds[WARM_UP:] or seconds
    figures = torch.tensor([statistics.median(timed), float(peak)], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    say("", _comparison(model.plan, *figures.tolist(), len(timed)), sep="\n")
    if settings["trace"]:
        _trace(model, settings, say)


def _trace(model, settings: dict, say) -> None:
    """Show how the last step ran beside what was predicted, as a table here and as a file. Rank 0 writes it, of its own
    pipeline."""
    measured, predicted = model.measured_schedule(), model.plan.pipeline.played()
    say("", schedule.beside(predicted, measured), sep="\n")
    if dist.get_rank() == 0:
        title = f"{settings['model']} on mesh {model.plan.mesh}, {measured.schedule.name}: predicted and measured"
        schedule.save(settings["trace"], {"predicted": predicted, "measured": measured}, title)
    say(f"written to {settings['trace']}")


def _resume(model, optimizer, stream, settings: dict, say) -> int:
    """Load the newest checkpoint if the settings ask for it, and return the number of steps that were taken before; 0
    without a checkpoint to go on from."""
    folder = settings["checkpoint"]
    if folder is None:
        return 0
    newest = agree.from_rank_zero(lambda: checkpoint.latest_checkpoint(folder))
    if newest is None:
        say(f"no checkpoint in {folder}: starting with step 1")
        return 0
    if not settings["resume"]:
        say(
            f"{folder} has checkpoints of an earlier run, the last of them {newest.name}; this is another run, and "
            f"they stay"
        )
        return 0
    loaded = checkpoint.load_checkpoint(newest, model, optimizer)
    _check_settings(loaded, settings)
    if "position" in loaded.data:
        stream.position = loaded.data["position"]
    say(f"resumed from {loaded.path}: step {loaded.step} of run {loaded.run}, saved {loaded.saved}")
    return loaded.step


def _check_settings(loaded: checkpoint.Checkpoint, settings: dict) -> None:
    """Raise CheckpointMismatch if the run that is resumed was another one than is asked for now."""
    saved = loaded.data["settings"]
    differ = [
        f"--{name} {saved.get(name)}, not {settings[name]}" for name in OF_A_RUN if saved.get(name) != settings[name]
    ]
    if differ:
        raise CheckpointMismatch(
            f"{loaded.path}, saved {loaded.saved} by run {loaded.run}, has {'; '.join(differ)}",
            fix="resume with the settings of that run, or start another run in another folder",
        )


def _save(step: int, model, optimizer, stream, settings: dict) -> None:
    """Save a checkpoint, if the settings want one after this step."""
    every = settings["every"]
    if settings["checkpoint"] and (step == settings["steps"] or every and step % every == 0):
        data = {"settings": {name: settings[name] for name in OF_A_RUN}}
        data |= {"position": stream.position} if hasattr(stream, "position") else {}
        checkpoint.save_checkpoint(
            settings["checkpoint"], model, optimizer, step=step, data=data, keep=settings["keep"]
        )


def _stream(source: nn.Module, inputs, settings: dict) -> Iterator:
    """Iterate over batches of the corpus for a model that reads tokens, else over its example inputs, without end."""
    if "input_ids" not in split_example(inputs)[1]:
        return iter(lambda: inputs, None)
    config = getattr(source, "config", None)
    vocab = getattr(config, "vocab", None) or getattr(config, "vocab_size", None) or 256
    return batches(settings["batch"], settings["seq"], vocab, settings["seed"])


def _loss_of(output: object) -> torch.Tensor:
    """Return the loss in a model's output: its field or key `loss`, the output itself, or the first scalar of several.
    Raises ModelError if there is none."""
    named = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    several = output if isinstance(output, (tuple, list)) else [output if named is None else named]
    found = next((x for x in several if isinstance(x, torch.Tensor) and x.dim() == 0), None)
    if found is None:
        raise ModelError(
            f"the model returns a {type(output).__name__} without a loss to train with",
            fix="return the loss, alone, as the field or key loss, or as the first of several outputs",
        )
    return found


def _comparison(plan: Plan, seconds: float, bytes_: float, steps: int) -> str:
    predicted = f"predicted {ms(plan.step_seconds)}, {size(plan.peak_bytes)} a device; measured {ms(seconds)}"
    timed = f"measured: median of forward and backward over {steps} step{'s' if steps > 1 else ''}, on the slowest rank"
    held = "bytes of all live tensors but the batch, of one step before these, on the rank with most"
    return f"{predicted}, {size(bytes_)}\n{timed}; {held}"


@contextmanager
def _followed(
    model: nn.Module, optimizer: torch.optim.Optimizer, call: tuple[tuple, dict]
) -> Iterator[Callable[[], int]]:
    """Yield a function that says how many bytes were alive at once inside, at the most. Every op inside takes
    longer."""
    with Allocations() as seen:
        seen.hold_state(model, optimizer)
        seen.leave_out(x for x in tree_flatten(call)[0] if isinstance(x, torch.Tensor))
        yield lambda: seen.peak_bytes


def _silent(*words, **options) -> None:
    pass
