"""Bad and odd input by the thousand through the public surface: every case gives a right result or a typed error with a
remedy.

    report = run(2000, seed=0)

A case is drawn from FAMILIES; it returns what it found ("right", "read") or raises. Models cost tens of milliseconds
each.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import random
import signal
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.cli.main import main
from autopar.errors import AutoparError, VerifyError
from autopar.hardware import profile as hardware
from autopar.ir.mesh import Mesh
from autopar.simulate.compare import verify_model

from . import odd_models

LONGEST_SECONDS = 60
MESHES = [
    "dp=1",
    "dp=2",
    "tp=2",
    "dp=2,tp=2",
    "dp=3",
    "tp=3",
    "dp=5",
    "tp=5",
    "dp=7",
    "dp=2,tp=3",
    "a=2",
    "cp=2",
    "dp=1,tp=2",
]
TEXTS = [
    "", " ", "R", "dp", "dp=", "=2", "dp=2,,tp=2", "dp=-1", "dp=0", "dp=2,dp=2", "dp=1.5", "dp=99999999999999999999",
    "日本=2", "dp=٢", "dp:S(0)", "tp:S(-1)", "tp:S(0) tp:S(1)", "tp:S(0/0)", "tp:P", "tp:S(9)", "x" * 5000, "\x00",
    "../..", "nan", "inf", "-inf", "1e400", "40GiB", "-1GiB", "0", "GiB", "1..5GB", "4 0GiB", "1e9", "0x10", "*", "[",
    "*.weight", "ddp", "DDP", "fsdp ", "megatron", "hsdp", "None", "True", "%s", "{}", "\n", "gpt", "mlp:hidden=0",
    "mlp:hidden=-4", "mlp:hidden=x", "mlp:hidden=", "mlp:,", "hf:", "hf:/", "a.py:f", "/dev/null", ":",
]  # fmt: skip
THINGS = [
    None, True, 0, -1, 3, 1.5, float("nan"), float("inf"), "", b"x", [], {}, (), object(), int, torch.ones(2),
    {"dp": 2}, {"dp": "2"}, {1: 2}, {"dp": 0}, {"dp": True}, {"dp": 2.0}, torch.nn.Linear(2, 2), lambda: 0,
    Path("nowhere.toml"), {"*": 3},
]  # fmt: skip
NUMBERS = (
    "nan",
    "inf",
    "-inf",
    "-1",
    "0",
    "1e400",
    "true",
    '""',
    "[]",
    "{}",
    '"x"',
    "1e-300",
    "9" * 40,
    "",
    "1979-05-27",
)
ARGUMENTS = ("mesh", "hardware", "memory", "optimizer", "precision", "strategy", "pin", "example_inputs")


class Hang(BaseException):
    """A case that took longer than any may."""


@dataclass
class Report:
    """`outcomes`: cases by family and what they gave; `wrong`: bare exceptions, wrong numbers, errors without a remedy,
    hangs."""

    outcomes: Counter = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: str = ""
    slowest_seconds: float = 0.0


def run(count: int, seed: int, families: list[str] | None = None) -> Report:
    rng, report = random.Random(seed), Report()
    names = families or list(FAMILIES)
    signal.signal(signal.SIGALRM, _hang)
    logging.getLogger("torch").setLevel(logging.CRITICAL)
    with _alone() as mesh, contextlib.redirect_stdout(None), tempfile.TemporaryDirectory() as folder:
        for case in range(count):
            family = names[case % len(names)]
            described, call = FAMILIES[family](rng, Path(folder), mesh)
            start = time.monotonic()
            signal.alarm(LONGEST_SECONDS)
            try:
                outcome = call()
            except AutoparError as error:
                outcome = type(error).__name__
                if isinstance(error, VerifyError) or not error.fix:
                    outcome = f"wrong: {outcome} {'without fix' if not error.fix else ''}: {error.message[:200]}"
            except (Exception, Hang) as error:
                outcome = f"wrong: bare {type(error).__name__}: {str(error)[:200]}"
            finally:
                signal.alarm(0)
            seconds = time.monotonic() - start
            if seconds > report.slowest_seconds:
                report.slowest, report.slowest_seconds = f"{family}: {described}"[:100], seconds
            if outcome.startswith("wrong"):
                report.wrong.append(f"case {case} of seed {seed}, {family}, {described[:200]}: {outcome}")
            report.outcomes[outcome.partition(":")[0]] += 1
    return report


def _hang(*_):
    raise Hang


@contextlib.contextmanager
def _alone():
    """A mesh of this process, in a group of its own unless there is one."""
    if dist.is_initialized():
        yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        return
    with tempfile.TemporaryDirectory() as folder:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        finally:
            dist.destroy_process_group()


# families: (rng, folder, mesh) -> (description, call)

Case = tuple[str, Callable[[], str]]


def simulated_model(rng: random.Random, folder: Path, mesh) -> Case:
    """Any model on any mesh, simulated and compared with eager torch."""
    names = [
        name for name in odd_models.MODELS if name not in ("nan", "half")
    ]  # never a match: no number, no exact one
    name, text, batch = rng.choice(names), rng.choice(MESHES), rng.choice((1, 2, 3, 4, 5, 7, 8))
    strategy = rng.choice((None, None, "ddp", "fsdp", "zero1", "megatron", "megatron_sp"))

    def call() -> str:
        model, inputs = odd_models.build(name, batch)
        report = verify_model(model, inputs, text, hardware="cpu-gloo", strategy=strategy)
        return "right" if report.match else f"wrong: numbers {report.loss_error} {report.gradient_errors}"

    return f"{name}, batch {batch}, {text}, {strategy}", call


def compiled_model(rng: random.Random, folder: Path, mesh) -> Case:
    """Any model compiled in a world of one, called as compiled or otherwise."""
    names = [name for name in odd_models.MODELS if name not in ("noise", "dropout")]  # eager torch draws other numbers
    name, batch, change = rng.choice(names), rng.choice((1, 3, 4)), rng.choice(list(odd_models.CHANGES))

    def call() -> str:
        model, inputs = odd_models.build(name, batch)
        reference = copy.deepcopy(model)
        parallel = autopar.compile(model, mesh, inputs)
        called = odd_models.CHANGES[change](inputs)
        return odd_models.compare(parallel, reference, called)

    return f"{name}, batch {batch}, {change}", call


def planned(rng: random.Random, folder: Path, mesh) -> Case:
    """`autopar.plan` with odd values of its arguments."""
    arguments = dict(mesh="dp=2,tp=2", hardware="cpu-gloo", baselines=False)
    for name in rng.sample(ARGUMENTS, rng.choice((1, 1, 2))):
        value = rng.choice(TEXTS + THINGS + MESHES)
        if name == "pin" and rng.random() < 0.7:
            value = {rng.choice([*TEXTS, "*", "up.weight"]): rng.choice(TEXTS)}
        arguments[name] = value

    def call() -> str:
        model, inputs = odd_models.build("plain", 4)
        plan = autopar.plan(model, **({"example_inputs": inputs} | arguments))
        str(plan)
        return "read"

    return repr({k: v for k, v in arguments.items() if k != "baselines"}), call


def mesh_text(rng: random.Random, folder: Path, mesh) -> Case:
    value = rng.choice(TEXTS + THINGS + MESHES)
    if rng.random() < 0.5:
        value = "".join(rng.choice("dptp=,0123 -.\n") for _ in range(rng.randint(1, 12)))

    def call() -> str:
        again = Mesh.of(value)
        assert Mesh.of(str(again)) == again
        return "read"

    return repr(value), call


def hardware_file(rng: random.Random, folder: Path, mesh) -> Case:
    """A profile with damage; what is still read must plan."""
    lines = (hardware.PROFILES / f"{rng.choice(hardware.names())}.toml").read_text().splitlines()
    for _ in range(rng.choice((1, 1, 2, 3))):
        at = rng.randrange(len(lines))
        key = lines[at].partition("=")[0]
        line, valued = lines[at], f"{key}= {rng.choice(NUMBERS)}"
        lines[at] = rng.choice(
            (valued, valued, valued, "", line + line, line[: len(line) // 2], "[" + line, rng.choice(TEXTS))
        )
    file = folder / "profile.toml"

    def call() -> str:
        file.write_text("\n".join(lines), errors="replace")
        profile = hardware.load(file)
        model, inputs = odd_models.build("plain", 4)
        plan = autopar.plan(model, "dp=2,tp=2", inputs, hardware=profile, baselines=False)
        assert plan.step_seconds >= 0 and plan.gap == plan.gap, plan
        str(plan), plan.to_json()
        return "read"

    return f"damaged at {at}: {lines[at]!r}", call


def command_line(rng: random.Random, folder: Path, mesh) -> Case:
    """Odd words on the command line: exit code 2 and one line on stderr, or a plan."""
    options = {
        "--model": "mlp:hidden=4,layers=1",
        "--mesh": "dp=2",
        "--batch": "4",
        "--seq": "2",
        "--hardware": "cpu-gloo",
    }
    more = ("--memory", "--strategy", "--pin", "--optimizer", "--precision", "--json")
    for name in rng.sample([*options, *more], rng.choice((1, 1, 2))):
        options[name] = rng.choice([*TEXTS, *MESHES, "1", "7"])
    if "--json" in options:
        options["--json"] = str(folder / "no such folder" / "plan.json")
    words = ["plan", *(word for pair in options.items() for word in pair), "--no-baselines"]
    if rng.random() < 0.2:
        words.remove(rng.choice(words))

    def call() -> str:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            code = main(words)
        lines = err.getvalue().splitlines()
        if code == 0 and out.getvalue().startswith("plan of"):
            return "read"
        return "one line" if code == 2 and len(lines) == 1 else f"wrong: exit code {code}, {lines}"

    return " ".join(words), call


FAMILIES = {
    f.__name__: f for f in (simulated_model, planned, compiled_model, mesh_text, hardware_file, command_line)
}  # fmt: skip
