"""Run one process of `autopar train`."""

from __future__ import annotations

import json
import math
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from .. import models, schedule
from .._torch import own_progress_lock, tree_flatten, tree_map
from ..api import entry
from ..calibrate import stale
from ..cost.compute import DTYPE_NAMES
from ..errors import (
    AutoparError,
    CheckpointMismatch,
    CollectiveTimeout,
    InputError,
    ModelError,
    RankFailure,
    StrategyError,
)
from ..frontend.call_signature import split_example
from ..hardware import profile
from ..ir.mesh import Mesh
from ..models import corpus, text_data
from ..models.corpus import batches
from ..models.hub import files_of
from ..plans.plan import Plan
from ..plans.text import summary
from ..processes import agree, process_groups, watch
from ..storage import checkpoint
from ..storage.checkpoint_folder import check_shared
from ..utils.allocation_tracker import Allocations
from ..utils.format import fit, ms, size
from . import common
from .remaining import Remaining
from .rendezvous import join
from .shown_steps import shown_steps
from .stop_signals import SIGNALS, StopSignals, end_with_parent

COPIED_EVERY = 10  # steps, of what each rank holds into another one's memory
WARM_UP = 2  # steps that are not timed
OF_A_PLAN = (
    "hardware", "precision", "reduce_dtype", "state_dtype", "execution", "expert_load", "expert_capacity",
    "hot_experts", "strategy", "memory", "offload", "pin", "adapt", "micro_batches", "stages_per_rank",
    "sequence_chunks",
)  # fmt: skip
OF_A_RUN = ("model", "batch", "seq", "seed", "lr", "data")  # settings that stay when a run goes on


def in_process(rank: int, devices: int, folder: str, settings: dict, environment: dict[str, str]) -> None:
    """Run `train` in a process of its own; an AutoparError is written down for the one that wanted it, whose
    environment this is."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # which a terminal sends to all: the parent says what happens
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    os.environ.clear()
    os.environ.update(environment)
    own_progress_lock()
    end_with_parent()
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // devices))
    try:
        sys.exit(train(rank, devices, f"file://{folder}/rendezvous", settings))
    except AutoparError as error:
        Path(folder, f"error-{rank}.json").write_text(json.dumps([error.message, error.fix]))
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(2)  # at once: to take down what a failed collective has left waits for ranks that wait for this one


def train(rank: int, devices: int, rendezvous: str, settings: dict) -> int:
    """Build the model, compile it, take the steps and print, on rank 0, how they went. Return the exit code: that of a
    signal that ended the run early, else 0."""
    common.quiet()
    if settings["timeout"]:
        os.environ["AUTOPAR_TIMEOUT_S"] = str(settings["timeout"])
    is_gpu = settings["device"] == "cuda"
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", rank))) if is_gpu else None
    if device is not None:
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if is_gpu else "gloo"  # parameters may be offloaded to the processor
    join(backend, rendezvous, rank, devices, device)
    try:
        mesh = Mesh.parse(settings["mesh"])
        device_mesh = init_device_mesh(settings["device"], mesh.sizes, mesh_dim_names=mesh.names)
        with StopSignals(waits=False) as stop:
            return _run(device_mesh, settings, stop, say=print if rank == 0 else _silent)
    except Exception as error:
        watch.fail(error)  # before the groups end, which others wait in
        if isinstance(error, (RankFailure, CollectiveTimeout)):
            time.sleep(settings.get("settle_seconds", 0.0))  # which a signal ends
        raise
    finally:
        process_groups.end()


def _run(device_mesh, settings: dict, stop: StopSignals, say) -> int:
    batch, seq, steps = settings["batch"], settings["seq"], settings["steps"]
    torch.manual_seed(settings["seed"])
    folder = files_of(settings["model"])
    weights = folder if folder is not None and any(folder.glob("*.safetensors")) else None
    if folder is not None:
        say(f"weights of {folder}" if weights else f"{folder} has no *.safetensors: weights are random")
    source, inputs = models.build(settings["model"], device="meta" if weights else "cpu", **sizes(settings))
    inputs = tree_map(partial(_on, torch.device(settings["device"])), inputs)
    stream = _stream(source, inputs, folder, settings, say)
    hardware = profile.load(settings["hardware"])
    if warning := stale(hardware, "nccl" if settings["device"] == "cuda" else "gloo"):
        say(f"warning: {warning}")
    if settings["checkpoint"]:
        check_shared(Path(settings["checkpoint"]).expanduser())  # before anything takes long
    template = settings.get("template")
    say(f"taking the plan that was made for mesh {settings['mesh']}" if template else "planning ...", flush=True)
    dtype = DTYPE_NAMES.get(next((p.dtype for p in source.parameters()), torch.float32), "fp32")
    model: Any = entry.compile(source, device_mesh, inputs, weights=weights, plan=template, **asked(settings))
    trained = [p for p in model.parameters() if p.requires_grad] or [
        torch.zeros(0, requires_grad=True)
    ]  # stages may be frozen
    optimizer = torch.optim.AdamW(trained, lr=settings["lr"])
    say(fit(summary(replace(model.plan, model=settings["model"])) + "\n"))
    scaler = torch.amp.GradScaler(device_mesh.device_type, enabled=model.plan.precision == "fp16")
    done = _resume(model, optimizer, scaler, stream, settings, say)
    kind = dtype if model.plan.precision == "fp32" else model.plan.precision  # in which products are computed
    peak_flops = device_mesh.size() * hardware.flops_per_second.get(kind, math.inf)
    seconds, peak = [], 0
    stop.waits = True
    left = Path(settings["left"]) if settings.get("left") else None
    remaining = Remaining(left, model, optimizer, scaler, settings["copy_every"] or COPIED_EVERY)
    remaining.is_whole(done, _data(stream, settings))
    with remaining.left_behind(), shown_steps(steps, done, batch * seq, settings["flops"] / peak_flops, say) as show:
        for step in range(done + 1, steps + 1):
            call = split_example(tree_map(partial(_on, torch.device(settings["device"])), next(stream)))
            follows = step == min(done + WARM_UP, steps)
            start = _now()
            with _followed(model, optimizer, call) if follows else nullcontext(lambda: 0) as most:
                args, kwargs = call
                loss = _loss_of(model(*args, **kwargs))
                scaler.scale(loss).backward()
                seconds.append(_now() - start)
                # every rank has its gradients before any changes its parameters: all that remain are at one step
                told = agree.extremes([stop.received], "whether to stop")[1][0]
                remaining.changes()
                scaler.step(optimizer)
                scaler.update()
                remaining.is_whole(step, _data(stream, settings))
            peak = max(peak, most())
            optimizer.zero_grad()
            show(step, loss.item(), _now() - start)
            stopped = told if step < steps else 0
            _save(step, model, optimizer, scaler, stream, settings, bool(stopped))
            if stopped:
                break
    if seconds and stopped:
        stop.received = stopped
        folder = settings["checkpoint"]
        say(
            f"stopped after step {step}: "
            + (f"saved in {folder}" if folder else "nothing is saved without --checkpoint")
        )
        return stop.code
    if settings["save_adapter"]:
        model.save_adapter(settings["save_adapter"])
        say(f"adapter saved in {settings['save_adapter']}")
    if settings["save"]:
        if settings["lora"] is not None:
            model.merge_adapter()
        model.save_pretrained(settings["save"])
        say(f"model saved in {settings['save']}")
    if not seconds:
        say(f"all {steps} steps were taken before")
        return 0
    timed = seconds[WARM_UP:] or seconds
    figures = torch.tensor([statistics.median(timed), float(peak)], dtype=torch.float64)
    dist.all_reduce(figures, dist.ReduceOp.MAX)
    say(fit("\n" + _comparison(model.plan, *figures.tolist(), len(timed))))
    if model.plan.routing is not None:
        with suppress(StrategyError):  # graphs that went through torch.compile count no rows
            say(fit(f"\n{model.expert_balance()}"))
    if settings["trace"]:
        _trace(model, settings, say)
    return 0


def sizes(settings: dict) -> dict:
    """Return what the settings say to models.build."""
    return {name: settings[name] for name in ("batch", "seq", "seed")}


def asked(settings: dict) -> dict:
    """Return what the settings ask of a plan."""
    staged = {"schedule": settings["schedule"] or "auto"}
    return staged | {name: settings[name] for name in OF_A_PLAN}


def _trace(model, settings: dict, say) -> None:
    """Show how the last step ran beside what was predicted, as a table here and as a file. Rank 0 writes it, of its own
    pipeline."""
    measured, predicted = model.measured_schedule(), model.plan.pipeline.played()
    say("", schedule.overlay(predicted, measured), sep="\n")
    if dist.get_rank() == 0:
        title = f"{settings['model']} on mesh {model.plan.mesh}, {measured.schedule.name}: predicted and measured"
        schedule.save(settings["trace"], {"predicted": predicted, "measured": measured}, title)
    say(f"written to {settings['trace']}")


def _resume(model, optimizer, scaler, stream, settings: dict, say) -> int:
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
    loaded = checkpoint.load_checkpoint(folder, model, optimizer, scaler=scaler)
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


def _save(step: int, model, optimizer, scaler, stream, settings: dict, now: bool) -> None:
    """Save a checkpoint, if there is a folder for it and the settings want one after this step, or it is to be now."""
    every = settings["every"]
    if settings["checkpoint"] and (now or step == settings["steps"] or every and step % every == 0):
        checkpoint.save_checkpoint(
            settings["checkpoint"],
            model,
            optimizer,
            step=step,
            data=_data(stream, settings),
            scaler=scaler,
            keep=settings["keep"],
            wait=not settings["async_save"] or now or step == settings["steps"],
        )


def _data(stream, settings: dict) -> dict:
    """Return what a checkpoint has to say of the data, and of the settings that the run keeps."""
    position = {"position": stream.position} if hasattr(stream, "position") else {}
    return {"settings": {name: settings[name] for name in OF_A_RUN}} | position


def _stream(source: nn.Module, inputs, folder: Path | None, settings: dict, say) -> Iterator:
    """Iterate without end over batches of the user's data or the corpus for a model that learns the next token, else
    over its example inputs. Raises InputError for data that the model cannot take."""
    named, data = split_example(inputs)[1], settings["data"]
    ids, labels = named.get("input_ids"), named.get("labels")
    if ids is None or labels is None or ids.shape != labels.shape:
        if data is not None:
            raise InputError(
                f"{settings['model']} does not take input_ids and labels of one shape, which --data makes",
                fix="use a model that learns the next token, or a script of your own",
            )
        return iter(lambda: inputs, None)
    config: Any = getattr(source, "config", None)
    config = config.get_text_config() if hasattr(config, "get_text_config") else config
    vocab = getattr(config, "vocab", None) or getattr(config, "vocab_size", None) or 256
    sizes = settings["batch"], settings["seq"]
    if data is None and (folder is None or not text_data.has_tokenizer(folder)):
        return batches(*sizes, vocab, settings["seed"])
    packed = text_data.Packed(text_data.tokens_of(data or corpus.FILE, folder, vocab), *sizes, settings["seed"])
    say(f"{data or 'the corpus'}: {len(packed.tokens):,} tokens, {packed.sequences:,} sequences an epoch")
    return packed


def _on(device: torch.device, value: object) -> object:
    """Return a tensor on a device, one without values as zeros; anything else as it is."""
    if not isinstance(value, torch.Tensor):
        return value
    if value.is_meta:
        return torch.zeros_like(value, device=device)
    pinned = value.pin_memory() if device.type == "cuda" and value.device.type == "cpu" else value
    return pinned.to(device, non_blocking=pinned is not value)  # the host goes on while a batch is on its way


def _now() -> float:
    """Return the time in seconds when the device has done all that was asked of it."""
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    return time.perf_counter()


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
    """Yield a function that says how many bytes were alive at once inside, at the most: on GPUs as the allocator counts
    them, else every op inside takes longer."""
    if torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
        yield torch.cuda.max_memory_allocated
        return
    with Allocations() as seen:
        seen.hold_state(model, optimizer)
        seen.leave_out(x for x in tree_flatten(call)[0] if isinstance(x, torch.Tensor))
        yield lambda: seen.peak_bytes


def _silent(*words, **options) -> None:
    pass
