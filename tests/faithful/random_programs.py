"""Random programs: a random model, what is done with it between calls, a mesh, a strategy, pins and a schedule.

    program, job = drawn(17, world=4)        # job: the mesh and the arguments of autopar.compile
    simulated(17)                            # such a model in fp64 on up to 12 simulated devices, with adapters

Everything follows from the seed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from random import Random

import torch
from torch.overrides import TorchFunctionMode

import autopar
from autopar import Mesh, schedule
from autopar.adapt import order
from autopar.errors import AutoparError
from autopar.frontend.fake_parameters import forms_of
from autopar.planner.options import options_of
from autopar.planner.request import PlanRequest
from autopar.simulate.pipeline import simulate_pipeline
from autopar.simulate.step import simulate_step
from tests.helpers.staged import Case

from .compare import difference
from .program import Program, ids, randn
from .random_models import VOCAB, WIDTHS, RandomModel
from .runner import AT_COMPILE, BARE, DIFFERENT, EQUAL, FAULTS, Outcome, judge, play, seed_all

KINDS = ("simulated", "1", "2", "4")  # and on so many processes
SHARES = (12, 5, 2, 1)  # of the kinds: what costs more is drawn less often
STRATEGIES = (None, None, "ddp", "zero1", "zero2", "fsdp", "hsdp", "megatron", "megatron_sp")
MESHES = {
    1: ("dp=1,tp=1",),
    2: ("dp=2", "tp=2", "a=2", "pp=2"),
    4: ("dp=4", "tp=4", "dp=2,tp=2", "a=2,b=2", "tp=2,dp=2", "pp=2,dp=2", "pp=2,tp=2"),
}
SIMULATED = (
    "dp=2", "tp=3", "dp=2,tp=2", "a=2,b=3", "dp=3,tp=2", "dp=2,cp=2,tp=2", "dp=8", "dp=4,tp=3", "pp=2,dp=2", "pp=3",
    "pp=2,tp=2",
)  # fmt: skip
ADAPTATIONS = (
    lambda: [autopar.LoRA(r=2, target_modules="all-linear", init_lora_weights=False)],
    lambda: [autopar.LoRA(r=3, target_modules="all-linear", use_dora=True, init_lora_weights=False)],
    lambda: [autopar.FakeQuant("int8")],
    lambda: [autopar.FakeQuant("int4", activations="int8")],
    lambda: [autopar.LoRA(r=2, target_modules="all-linear", init_lora_weights=False), autopar.FakeQuant("int8")],
)


@dataclass(frozen=True)
class Drawn:
    """A random model's sizes. `actions`: what a script does, a list of (name, argument)."""

    seed: int
    batch: int
    length: int
    width: int
    takes_ids: bool
    input_gradient: bool
    actions: list = field(default_factory=list)


def sizes(rng: Random, seed: int) -> Drawn:
    actions = [(rng.choice(ACTIONS), rng.random()) for _ in range(rng.randint(2, 5))]
    return Drawn(seed, rng.choice((2, 3, 4, 6, 8)), rng.randint(1, 6), rng.choice(WIDTHS), rng.random() < 0.5,
                 rng.random() < 0.3, [("call", 0.0), *actions, ("call", 0.5)])  # fmt: skip


def drawn(seed: int, world: int) -> tuple[Program, str, dict]:
    """(a program, its mesh, the arguments of autopar.compile)."""
    rng = Random(seed)
    d = sizes(rng, seed)
    mesh = rng.choice(MESHES[world])
    options: dict = {"strategy": _strategy(rng, mesh)}
    if "pp" in mesh:
        options = {"strategy": None, "outputs": "everywhere", "micro_batches": rng.choice((None, 2)),
                   "schedule": rng.choice(("auto", "gpipe", "1f1b", "zb_h1", "zbv"))}  # fmt: skip
    elif options["strategy"] is None and rng.random() < 0.4:
        axis = rng.choice([name for name in Mesh.parse(mesh).names])
        options["pin"] = {rng.choice(("head.weight", "head.*", "*.weight")): rng.choice((f"{axis}:S(0)", "R"))}
    if "pp" not in mesh and rng.random() < 0.2:
        options["micro_batches"] = rng.choice((2, 3))
    bf16 = rng.random() < 0.2
    if bf16:
        options["precision"] = "bf16"

    def built(wide: bool = False):
        def batch(n: int, size: int = d.batch) -> dict:
            given = _batch(d, n, size).items()
            return {
                k: v.detach().double().requires_grad_(v.requires_grad) if wide and k == "x" else v for k, v in given
            }

        staged = "pp" in mesh or "micro_batches" in options
        model = RandomModel(Random(seed + 1), d.width, d.takes_ids, staged=staged, smooth=bf16)
        return model.double() if wide else model, batch, lambda run: _act(run, d, batch)

    def inside(context):
        model, *rest = built()
        model.forward = _inside(context, model.forward)
        return model, *rest

    def rounded(precision: str) -> list[Program]:
        if precision != "bf16":
            return [replace(program, build=lambda: built(wide=True))]
        contexts = (lambda: torch.autocast("cpu", torch.bfloat16)), Rounding
        return [replace(program, build=lambda context=context: inside(context)) for context in contexts]

    program = Program(f"random/{seed}", built, raises=None, tolerance=2e-4, source=f"seed {seed}", rounded=rounded)
    return program, mesh, options


def _inside(context: Callable, forward: Callable) -> Callable:
    def run(*args, **kwargs):
        with context():
            return forward(*args, **kwargs)

    return run


class Rounding(TorchFunctionMode):
    """Inside, the values of all ops, and their gradients, are rounded to bf16."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        if not isinstance(result, torch.Tensor) or result.dtype != torch.float32 or not result.requires_grad:
            return result
        return _Rounded.apply(result)


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.bfloat16().float()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.bfloat16().float()


def _strategy(rng: Random, mesh: str) -> str | None:
    return rng.choice([s for s in STRATEGIES if s is None or ("pp" not in mesh and (s != "hsdp" or "," in mesh))])


def _batch(d: Drawn, n: int, size: int) -> dict:
    batch = {"x": randn(n, size, d.length, d.width, requires_grad=d.input_gradient)}
    return batch | ({"ids": ids(n, VOCAB, size, d.length)} if d.takes_ids else {})


ACTIONS = (
    "call",
    "call",
    "other_size",
    "eval",
    "train",
    "no_grad",
    "step",
    "freeze",
    "thaw",
    "factor",
    "twice",
    "write",
)


def _act(run, d: Drawn, batch: Callable) -> None:
    """The script: every action but a setting is a recorded call."""
    for n, (action, number) in enumerate(d.actions, 1):
        if action in ("call", "other_size"):
            run.call(**batch(n, d.batch if action == "call" else 1 + int(number * 9)))
        elif action in ("eval", "train"):
            run.model.train(action == "train")
        elif action == "no_grad":
            with torch.no_grad():
                run(n)
        elif action == "step":
            with torch.no_grad():
                for p in run.model.parameters():
                    if p.grad is not None:
                        p.add_(p.grad, alpha=-0.05)
            run.record()
        elif action in ("freeze", "thaw"):
            for name, p in run.model.named_parameters():  # by name: under a pipeline each rank has others
                if action == "thaw" or len(name) % 3 == 0:
                    p.requires_grad_(action == "thaw")
        elif action == "factor":
            run.model.factor = round(0.5 + number, 2)
        elif action == "twice":
            outputs = [run.model(**batch(n + k)) for k in (0, 50)]
            losses = [loss for y in outputs if (loss := run.loss(y)) is not None]
            if losses:
                sum(losses).backward()
            run.record()
        elif action == "write":
            with torch.no_grad():
                for p in run.model.parameters():
                    if p is getattr(run.model.head, "weight", None):  # under a pipeline each rank has others
                        p.mul_(0.5 + number)


def kind_of(seed: int) -> str:
    """One of KINDS."""
    return Random(seed).choices(KINDS, SHARES)[0]


def judge_random(job: tuple[str, int, float]) -> Outcome:
    """(kind, seed, seconds) on this rank: "simulated", or a number of processes."""
    kind, seed, seconds = job
    if kind == "simulated":
        return simulated(seed)
    program, mesh, options = drawn(seed, int(kind))
    outcome = judge(program, mesh, seconds, **options)
    return Outcome(outcome.kind, f"{outcome.detail}\n  on {mesh} with {options}", outcome.error, outcome.seconds)


def simulated(seed: int) -> Outcome:
    """One step of a random model on simulated ranks against one device in fp64, and that against the eager model."""
    rng = Random(seed)
    d, mesh = sizes(rng, seed), rng.choice(SIMULATED)
    make = rng.choice(ADAPTATIONS) if rng.random() < 0.35 else list
    options = {"strategy": _strategy(rng, mesh)}
    if "pp" in mesh:
        options |= {"schedule": rng.choice(("auto", *schedule.KINDS)), "micro_batches": rng.choice((None, 2, d.batch))}
    elif options["strategy"] is None and rng.random() < 0.4:
        options["pin"] = {"head.weight": f"{rng.choice(Mesh.parse(mesh).names)}:S({rng.randint(0, 1)})"}
    if "pp" not in mesh and rng.random() < 0.3:
        options["micro_batches"] = rng.choice((2, 3))
    where = f"\n  on {mesh} with {options}, {make()}"
    try:
        reason = _simulated(seed, d, mesh, make, options, rng.random() < 0.3)
    except AutoparError as error:
        kind = BARE if type(error).__name__ in FAULTS else AT_COMPILE
        return Outcome(kind, f"{error}{where}", type(error).__name__)
    return Outcome(EQUAL) if reason is None else Outcome(DIFFERENT, reason + where)


def _simulated(seed: int, d: Drawn, mesh: str, make, options: dict, random: bool) -> str | None:
    adapt = order.checked(make())

    def model():
        seed_all(seed)
        staged = "pp" in mesh or "micro_batches" in options
        return RandomModel(Random(seed + 1), d.width, d.takes_ids, random=random, staged=staged, adapted=bool(adapt))

    batch = {name: value.detach() for name, value in _batch(d, 0, d.batch).items()}
    adapted = model()
    order.attach(adapted, adapt, "cpu", seed)
    case = Case.of(adapted, batch, forms=forms_of(adapted), adapt=adapt)
    plan = _planned(case, Mesh.parse(mesh), **options).plan
    step = (simulate_step if plan.pipeline.is_one_program else simulate_pipeline)(case.captured, plan, case.values)
    outputs = step.outputs if isinstance(step.outputs, dict) else {str(i): o for i, o in enumerate(step.outputs)}
    found = _wrong(case, outputs, step, 1e-7)
    return found or (None if adapt or random else _against_eager(model, batch, case))


def _planned(case: Case, mesh: Mesh, strategy, pin=None, **staged):
    """The plan of a case; `staged`: its schedule and number of micro-batches."""
    asked = options_of(mesh, "cpu-gloo", None, "adamw", "fp32", strategy, pin, False, {}, False)
    return PlanRequest(mesh, asked, "random", **staged).find(case.captured)


def _wrong(case: Case, outputs, step, tolerance: float) -> str | None:
    wanted = [{f"output {i}": o for i, o in enumerate(case.wanted.outputs)}
              | {f"gradient of {n}": g for n, g in case.wanted.gradients.items()}
              | {f"buffer {n}": b for n, b in case.wanted.buffers.items()}]  # fmt: skip
    mine = [{f"output {i}": o for i, o in outputs.items()} | {f"gradient of {n}": g for n, g in step.gradients.items()}
            | {f"buffer {n}": b for n, b in step.buffers.items()}]  # fmt: skip
    return difference(wanted, mine, tolerance)


def _against_eager(model, batch: dict, case: Case) -> str | None:
    """The captured step against the model's own in fp64: gradients of the loss, or of the sum of all outputs."""
    wide = {name: value.double() if value.is_floating_point() else value for name, value in batch.items()}

    def script(run):
        run.loss = lambda out: _total(out)
        run.call(**wide)

    played = play(Program("eager", lambda: (model().double(), lambda n: wide, script)), lambda m, example: m)
    record = played.run.records[-1]
    wanted = [{k: v for k, v in record.items() if k.startswith("gradient of") and "input" not in k and v is not None
               and "layout" not in k}]  # fmt: skip
    mine = [{f"gradient of {n}": g for n, g in case.wanted.gradients.items() if f"gradient of {n}" in wanted[0]}]
    found = difference(wanted, mine, 1e-7)
    return found and f"captured: {found}"


def _total(out):
    from .script import snapshot

    if isinstance(out, dict) and "loss" in out:
        return out["loss"]
    tensors = [t for _, t in snapshot.leaves(out) if isinstance(t, torch.Tensor) and t.requires_grad]
    return sum(t.sum() for t in tensors) if tensors else None
