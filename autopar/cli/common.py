"""Declare and read what the commands share: models and how to plan them, checks before the long work, progress."""

from __future__ import annotations

import argparse
import errno
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from .. import models
from ..api.words import Tile
from ..errors import MeshError, PipelineError, StrategyError
from ..hardware import profile
from ..ir.mesh import Mesh
from ..planner.problem.recipes import RECIPES, Restriction
from ..plans.pipeline import check_staged, inside
from ..schedule.catalogue import KINDS, canonical
from ..utils.format import fit

if TYPE_CHECKING:
    from ..planner.objective.timeline import Timeline
    from ..planner.spmd.planned import Planned

Report = Callable[[str], None]


def command(subparsers, name: str, summary: str, example: str, run: Callable[[argparse.Namespace], int]):
    """Add a subparser whose --help ends with an example."""
    parser = subparsers.add_parser(
        name,
        help=summary,
        description=summary[0].upper() + summary[1:] + ".",
        epilog=f"example:\n  {example}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=run)
    return parser


def add_model(parser, batch: int | None = 8, seq: int | None = 64, searches: bool = False) -> None:
    """Add --model, --mesh, --devices, --batch and --seq; a size without a default is required. `searches`: whether a
    number of devices will do for a mesh."""
    model = "a name (gpt2, llama3-8b), NAME:key=value,..., hf:FOLDER with a config.json, org/name, or file.py:function"
    parser.add_argument("--model", required=True, metavar="M", help=model)
    mesh = "axes and sizes, outermost first: dp=8,tp=8; one may be -1, the rest of the devices"
    parser.add_argument("--mesh", required=not searches, help=mesh)
    devices = "how many devices there are, for -1 in --mesh" + ("; without --mesh the best one" if searches else "")
    parser.add_argument("--devices", type=count, metavar="N", help=devices)
    for name, default, what in (("--batch", batch, "global batch"), ("--seq", seq, "sequence length")):
        after = "" if default is None else f" (default {default})"
        parser.add_argument(name, type=count, default=default, required=default is None, metavar="N", help=what + after)


def _load(text: str) -> float | tuple[float, ...]:
    """Read the load of the busiest device, or the rows of each expert."""
    numbers = tuple(map(float, text.split(",")))
    return numbers[0] if len(numbers) == 1 else numbers


def _count_or_auto(text: str) -> int | str:
    return text if text == "auto" else int(text)


def add_planning(parser, hardware: str | None) -> None:
    """Add --hardware, --precision, --reduce-dtype, --state-dtype, --execution, --expert-load, --expert-capacity,
    --hot-experts, --strategy, --memory, --offload and --pin. `hardware`: the default, None for that of the
    devices here."""
    profiles = f"{', '.join(profile.names())}, or a TOML file (default {hardware or 'that of this machine'})"
    parser.add_argument("--hardware", default=hardware, help=profiles)
    precision = (
        "bf16, fp16: compute in these, parameters stay as they are; fp32: in the model's own types; auto: bf16 where "
    )
    precision += "the hardware computes faster in it (default)"
    parser.add_argument("--precision", default="auto", metavar="P", help=precision)
    reduce_dtype = "bf16 or fp16: add up gradients over devices in it (default: in their own type)"
    parser.add_argument("--reduce-dtype", metavar="T", help=reduce_dtype)
    state_dtype = "bf16: keep the optimizer's state in it (default: in the type of the parameters)"
    parser.add_argument("--state-dtype", metavar="T", help=state_dtype)
    execution = "eager: op by op; compiled: by torch.compile, pointwise ops fused and launches hidden (default: "
    execution += "compiled on GPUs, but where values may wait on the host, else eager)"
    parser.add_argument("--execution", choices=("eager", "compiled"), help=execution)
    load = "rows of experts that the busiest device is assumed to get, over the mean (default 1.0: balanced routing)"
    load = f"{load}; or the rows of each expert, X,Y,..."
    parser.add_argument("--expert-load", type=_load, default=1.0, metavar="X", help=load)
    capacity = "times the mean of rows of experts, the most that a device holds at a time; more go in further rounds"
    parser.add_argument("--expert-capacity", type=float, metavar="X", help=f"{capacity} (default: no limit)")
    hot = "experts of each layer that are copied to all devices in the place of their rows (default auto: as pays)"
    parser.add_argument("--hot-experts", type=_count_or_auto, default="auto", metavar="N", help=hot)
    known = f"{', '.join(RECIPES)}, or one that --model FILE.py:FUNCTION registers (default: whatever is fastest)"
    parser.add_argument("--strategy", help=known)
    parser.add_argument("--memory", help="memory limit of a device, such as 40GiB or 80GB (default: the hardware's)")
    pin = "layout of the parameters that GLOB matches, such as '*.c_fc.weight=tp:S(1)'; may be repeated"
    offload = (
        "where memory is short, on the host: values that the backward reads (activations), and parameters that train, "
        "with their optimizer's state (auto); or all of those parameters (optimizer) (default none)"
    )
    parser.add_argument("--offload", choices=("none", "auto", "activations", "optimizer"), default="none", help=offload)
    parser.add_argument("--pin", action="append", default=[], metavar="GLOB=LAYOUT", help=pin)


def add_search(parser, baselines: bool = False) -> None:
    """Add all arguments of a search for a plan; `baselines`: whether it may compare with the expert strategies."""
    add_model(parser, seq=None, searches=True)
    add_batching(parser)
    add_planning(parser, hardware="h100")
    add_adapting(parser)
    forbid = "a layout that the parameters that GLOB matches may not take, such as '*.wte.weight=R'; may be repeated"
    parser.add_argument("--forbid", action="append", default=[], metavar="GLOB=LAYOUT", help=forbid)
    parser.add_argument("--optimizer", default="adamw", help="whose state to make room for (default adamw)")
    parser.add_argument("--strict", action="store_true", help="refuse ops without a sharding rule")
    if baselines:
        compared = parser.add_mutually_exclusive_group()
        compared.add_argument("--no-baselines", action="store_true", help="leave the expert strategies out: faster")
        staged = "cost experts' pipelines on the same devices beside a plan without stages, too: slower"
        compared.add_argument("--pipelines", action="store_true", help=staged)


def add_batching(parser) -> None:
    """Add --micro-batches, --micro-batch, --tile, --loops and --recompute."""
    parts = (
        "parts of the batch, whose gradients are added up; auto: the fewest that fit without recomputation (default 1, "
        "with pp as many as are best)"
    )
    parser.add_argument("--micro-batches", type=count_or_auto, metavar="K", help=parts)
    samples = "the same by the samples that a data-parallel replica computes at once: K = batch / (N * replicas)"
    parser.add_argument("--micro-batch", type=count, metavar="N", help=samples)
    level = "what the backward computes again, in every block (default auto: as little as the memory demands)"
    tile = (
        "the last layer and its loss without logits, MLPs in pieces of rows, attention in pieces of its queries "
        "(default auto: where memory is short)"
    )
    parser.add_argument("--tile", choices=get_args(Tile), default="auto", help=tile)
    loops = "collectives that go round beside products: none, where that is faster, where it can be (default never)"
    parser.add_argument("--loops", choices=("never", "auto", "always"), default="never", help=loops)
    parser.add_argument("--recompute", choices=("auto", "none", "selective", "full"), default="auto", help=level)


def add_micro_batches(parser) -> None:
    """Add --micro-batches alone."""
    many = "parts of the batch, whose gradients are added up (default 1, with pp as many as are best)"
    parser.add_argument("--micro-batches", type=count, metavar="K", help=many)


def add_pipeline(parser) -> None:
    """Add --schedule and --stages-per-rank."""
    schedule = f"order of the stages of a mesh with pp: {', '.join(KINDS)} (default: the fastest of some)"
    parser.add_argument("--schedule", metavar="NAME", help=schedule)
    several = "of a schedule that may have several, such as interleaved_1f1b"
    parser.add_argument("--stages-per-rank", type=count, metavar="V", help=several)
    chunks = "of a causal model's rows, which follow one another through the stages (default: where that is faster)"
    parser.add_argument("--sequence-chunks", type=count, metavar="C", help=chunks)


def add_played(parser, baselines: bool = False, out: str = "where to write it") -> None:
    """Add the arguments of a search, --slowdown and --out, for a plan that is played through and written to a file."""
    add_search(parser, baselines)
    slowdown = (
        "how much longer compute takes beside a collective, 1 or more; from 2 on it waits (default: the hardware's)"
    )
    parser.add_argument("--slowdown", type=factor, metavar="X", help=slowdown)
    parser.add_argument("--out", required=True, metavar="FILE", help=out)


def played(args: argparse.Namespace) -> tuple[Planned, Timeline | None]:
    """Return the finished search that the arguments of `add_played` ask for, and the timeline of its plan; None for
    stages, whose schedule was played in the search."""
    check(args)
    with progress() as report:
        planned = search(args, report)
    if not planned.staged:
        return planned, planned.timeline if args.slowdown is None else planned.played(args.slowdown)
    if args.slowdown is not None:
        raise PipelineError(
            "--slowdown is for a step without a pipeline: stages are priced with the hardware's own",
            fix="leave it out, or change overlap_slowdown in a profile",
        )
    return planned, None


def search(args: argparse.Namespace, report: Report, **options) -> Planned:
    """Search as the arguments of `add_search` and `add_pipeline` ask, for the model on the meta device, whose capture
    is kept for the next time; `options` of `api.search` come on top."""
    quiet()
    from ..api import entry as api
    from ..planner.options import PIPELINES
    from ..planner.spmd.batch import AUTO, micro_batches_of
    from ..storage.compile_cache import CompileCache

    mesh, many = Mesh.parse(args.mesh) if args.mesh else None, args.micro_batches
    staged, compares = getattr(args, "pipelines", False), not getattr(args, "no_baselines", True)
    if args.micro_batch is not None:
        many = micro_batches_of(
            args.batch, mesh and inside(mesh), args.strategy, None if many == AUTO else many, args.micro_batch
        )
    report("building the model")
    model, inputs = models.build(args.model, batch=args.batch, seq=args.seq)
    asked = dict(
        optimizer=args.optimizer,
        strict=args.strict,
        forbid=forbidden(args),
        adapt=adaptations(args),
        micro_batches=many,
        recompute=args.recompute,
        tile=args.tile,
        loops=args.loops,
        schedule=getattr(args, "schedule", None) or "auto",
        stages_per_rank=getattr(args, "stages_per_rank", None),
        sequence_chunks=getattr(args, "sequence_chunks", None),
        baselines=PIPELINES if staged else compares,
    )
    asked |= {"report": report, "cache": CompileCache.of_environment()} | planning(args) | options
    return api.search(model, mesh or args.devices, inputs, **asked)


def add_adapting(parser) -> None:
    """Add --lora, --qlora, --qat and --fp8."""
    lora = (
        "adapters on linear layers, the rest frozen: r=16,lora_alpha=32,target_modules=q_proj, ... (see autopar.LoRA)"
    )
    parser.add_argument("--lora", nargs="?", const="", metavar="KEY=VALUE,...", help=lora)
    qlora = "the same on a base in 4 bits: r=16,quant_type=nf4,double_quant=true, ... (see autopar.QLoRA)"
    parser.add_argument("--qlora", nargs="?", const="", metavar="KEY=VALUE,...", help=qlora)
    qat = "fake-quantize linear layers: int8, or int4,group_size=32,activations=int8, ... (see autopar.FakeQuant)"
    parser.add_argument("--qat", metavar="DTYPE,...", help=qat)
    fp8 = "multiply in FP8 in linear layers: block, tensor, or auto for what is fastest, ... (see autopar.FP8)"
    parser.add_argument("--fp8", metavar="RECIPE,...", help=fp8)


def adaptations(args: argparse.Namespace) -> list:
    """Return the arguments of `add_adapting` as `adapt=` takes them."""
    if args.lora is args.qlora is args.qat is args.fp8 is None:
        return []
    from ..adapt import FP8, FakeQuant, LoRA, QLoRA
    from ..adapt.order import checked
    from ..adapt.parse import parse

    found: list = [parse(LoRA, args.lora, target_modules="all-linear")] if args.lora is not None else []
    found += [parse(QLoRA, args.qlora)] if args.qlora is not None else []
    found += [FakeQuant.parse(args.qat)] if args.qat is not None else []
    found += [FP8.parse(args.fp8)] if args.fp8 is not None else []
    checked(found)
    return found


def count(text: str) -> int:
    """Read a number that is 1 or more."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def count_or_auto(text: str) -> int | str:
    """Read a number that is 1 or more, or "auto"."""
    return text if text == "auto" else count(text)


def factor(text: str) -> float:
    """Read a finite factor that is 1 or more."""
    value = float(text)
    if not 1.0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def pins(args: argparse.Namespace) -> dict[str, str]:
    """Return the layout that each glob of --pin asks for. Raises StrategyError if one is no GLOB=LAYOUT."""
    return dict(_layout_of(text, "a pin") for text in args.pin)


def forbidden(args: argparse.Namespace) -> dict[str, list[str]]:
    """Return the layouts that each glob of --forbid rules out. Raises StrategyError if one is no GLOB=LAYOUT."""
    found: dict[str, list[str]] = {}
    for glob, layout in (_layout_of(text, "what is forbidden") for text in args.forbid):
        found.setdefault(glob, []).append(layout)
    return found


def _layout_of(text: str, what: str) -> tuple[str, str]:
    glob, equals, layout = text.partition("=")
    if not (glob and equals and layout):
        raise StrategyError(f"cannot read {text!r} as {what}", fix="write GLOB=LAYOUT, such as '*.c_fc.weight=tp:S(1)'")
    return glob, layout


def planning(args: argparse.Namespace) -> dict:
    """Return the arguments of `add_planning` as those of `autopar.plan`."""
    return dict(
        name=args.model,
        hardware=args.hardware,
        precision=args.precision,
        reduce_dtype=args.reduce_dtype,
        state_dtype=args.state_dtype,
        execution=args.execution,
        expert_load=args.expert_load,
        expert_capacity=args.expert_capacity,
        hot_experts=args.hot_experts,
        strategy=args.strategy,
        memory=args.memory,
        offload=args.offload,
        pin=pins(args),
    )


def check(args: argparse.Namespace) -> None:
    """Raise the errors of a model's name, mesh, profile, strategy, pin or folder to write to before a model is built.
    Afterwards args.mesh has all sizes."""
    if ".py:" in args.model:
        from ..models.user_file import load

        load(args.model)  # which may register the strategy, schedule or optimizer that is asked for
    models.check(args.model)
    if args.mesh is None and args.devices is None:
        raise MeshError("there is no --mesh", fix="add --mesh dp=8,tp=8, or --devices 64 for the best mesh of as many")
    if args.mesh is not None:
        mesh = Mesh.parse(args.mesh, args.devices)
        if args.devices not in (None, mesh.devices):
            raise MeshError(
                f"--mesh {mesh} has {mesh.devices} devices, --devices says {args.devices}",
                fix="give one of the two, or -1 for a size",
            )
        args.mesh = str(mesh)
        Restriction.of(args.strategy, inside(mesh))
        check_staged(
            mesh,
            getattr(args, "schedule", None),
            getattr(args, "stages_per_rank", None),
            getattr(args, "sequence_chunks", None),
        )
    if (schedule := getattr(args, "schedule", None)) not in (None, "auto"):
        canonical(schedule)
    if args.hardware is not None:
        profile.load(args.hardware)
    pins(args)
    if hasattr(args, "forbid"):
        forbidden(args)
        adaptations(args)
    for file in filter(None, (getattr(args, name, None) for name in ("json", "emit", "out", "trace"))):
        if not (folder := Path(file).parent).is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))


def quiet() -> None:
    """Hide torch's warning that autopar's own ops differentiate through a fallback, which they mean to."""
    warnings.filterwarnings("ignore", message="(?s).*an autograd kernel was not registered")


def show(text: object) -> None:
    """Print text that ends with a line, its lines broken where the terminal ends."""
    print(fit(str(text)), end="")


@contextmanager
def progress() -> Iterator[Report]:
    """Yield a function that shows what is being done on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update
