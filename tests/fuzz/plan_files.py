"""Plan files with random damage, and what must be true of each: a typed error, or a plan that gives right numbers.

report = run(plan, captured, values, 10_000, path, seed=0)
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

import torch

from autopar import Plan
from autopar.errors import PlanFormatError, PlanIncompatible, PlanTampered
from autopar.frontend.export import Captured
from autopar.ir.mesh import Mesh
from autopar.plans.file import content_hash
from autopar.simulate.step import simulate_step

ODD = [None, True, -1, 0, 3.5, 1e308, 10**17, "", "R", "tp:S(9)", "zz:S(0)", "dp=2", [], {}, [[]], [1, 2], {"a": 1},
       ["dp"] * 3, "../../etc/passwd", "__import__('os').system('false')", "\x00", "\ud800", "dp:P tp:P",
       "dp=99999999999"]  # fmt: skip
TOKENS = [b"NaN", b"-Infinity", b"1e999", b"9" * 5000, b"[" * 100, b"[" * 100_000, b'"version": 1, "version": 1,',
          b"null", b"\xff", b'{"__class__": "os"}', b'"\\ud800"', b"0x10", b"-0", b"//", b"\x00"]  # fmt: skip
FORBIDDEN = ("exec", "compile", "import", "os.system", "os.exec", "os.posix_spawn", "os.fork", "subprocess.Popen",
             "pickle.find_class", "ctypes.dlopen", "socket.connect")  # fmt: skip


@dataclass
class Report:
    """`outcomes`: files by error type, "fits" for plans that fit; `simulated` of those were run; `wrong`: what must not
    be."""

    outcomes: Counter = field(default_factory=Counter)
    simulated: int = 0
    wrong: list[str] = field(default_factory=list)
    slowest_seconds: float = 0.0
    slowest: str = ""

    @property
    def refused(self) -> int:
        return sum(self.outcomes.values()) - self.outcomes["fits"]


class Audit:
    """Events that Python reports while the context is open. (A hook cannot be taken away: one serves for all.)"""

    seen: list[str] | None = None
    installed = False

    def __enter__(self) -> list[str]:
        if not Audit.installed:
            sys.addaudithook(
                lambda event, args: Audit.seen is not None and event in FORBIDDEN and Audit.seen.append(event)
            )
            Audit.installed = True
        Audit.seen = []
        return Audit.seen

    def __exit__(self, *error) -> None:
        Audit.seen = None


def run(
    plan: Plan, captured: Captured, values: dict, count: int, path: Path, seed: int, simulate: int = 1 << 30
) -> Report:
    """Loads `count` damaged files of a plan; the first `simulate` that fit and decide otherwise are run on `values`."""
    rng, report = random.Random(seed), Report()
    plan.save(path)
    content = path.read_bytes()
    wanted = whole_step(captured, values)
    for case in range(count):
        start = time.perf_counter()
        kind = rng.choice((damaged_bytes, damaged_bytes, other_fields, other_fields, other_decisions, other_decisions))
        path.write_bytes(kind(content, rng))
        with Audit() as events:
            try:
                loaded, outcome = Plan.load(path), "fits"
            except (PlanFormatError, PlanTampered) as error:
                outcome = type(error).__name__
            except BaseException as error:
                outcome = f"{type(error).__name__} in load"
        if events:
            report.wrong.append(f"case {case} of seed {seed}: {kind.__name__} made {sorted(set(events))}")
        if outcome == "fits":
            try:
                str(loaded), loaded.hash, loaded.check_fits(captured.graph, plan.mesh)
                if loaded.sharding != plan.sharding and report.simulated < simulate:
                    report.simulated += 1
                    step = simulate_step(captured, loaded, values)
                    if difference := _difference(step, wanted):
                        report.wrong.append(f"case {case} of seed {seed}: {kind.__name__} gives {difference}")
            except PlanIncompatible as error:
                outcome = type(error).__name__
            except BaseException as error:
                outcome = f"{type(error).__name__} with a loaded plan"
        if " " in outcome:
            report.wrong.append(f"case {case} of seed {seed}: {kind.__name__} gives {outcome}")
        report.outcomes[outcome] += 1
        if (seconds := time.perf_counter() - start) > report.slowest_seconds:
            report.slowest_seconds, report.slowest = seconds, f"case {case} of seed {seed}: {kind.__name__}"
    return report


def whole_step(captured: Captured, values: dict) -> dict[str, torch.Tensor]:
    """Outputs and gradients of the unsharded joint graph."""
    placeholders = [n for n in captured.graph.nodes if n.op == "placeholder"]
    results = captured.graph_module(*[values[n.name] for n in placeholders])
    roles = next(iter(reversed(captured.graph.nodes))).meta["roles"]
    return {f"{role.kind} {role.name}": value for role, value in zip(roles, results)}


def _difference(step, wanted: dict[str, torch.Tensor]) -> str:
    got = {f"output {i}": value for i, value in enumerate(step.outputs)}
    got |= {f"gradient {name}": value for name, value in step.gradients.items()}
    for name, value in got.items():
        scale = max(float(wanted[name].abs().max()), 1e-3)
        if not torch.allclose(value, wanted[name], rtol=0, atol=1e-4 * scale):
            return f"another {name}"
    return ""


# Damage: of bytes, of fields under a right hash, of decisions under a right hash.


def damaged_bytes(content: bytes, rng: random.Random) -> bytes:
    at = rng.randrange(len(content))
    length = rng.choice((1, 1, 3, 40))
    return rng.choice((
        lambda: content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :],
        lambda: content[:at],
        lambda: content[:at] + content[at + length :],
        lambda: content[:at] + rng.choice(TOKENS) + content[at + length :],
        lambda: content[:at] + rng.randbytes(length) + content[at:],
        lambda: content[:at] + content[at // 2 : at // 2 + length] + content[at:],
    ))()  # fmt: skip


def other_fields(content: bytes, rng: random.Random) -> bytes:
    """Some fields removed, added or of another kind."""
    data = json.loads(content)
    for _ in range(rng.choice((1, 1, 2))):
        depth = rng.randint(1, 5)
        found = [p for p in places(data) if len(p) <= depth]
        *path, last = rng.choice(found)
        target = data
        for key in path:
            target = target[key]
        action = rng.random()
        if action < 0.2:
            del target[last]
        elif action < 0.3 and isinstance(target, dict):
            target[str(rng.choice(ODD))] = target[last]
        elif action < 0.4 and isinstance(target, list):
            target.append(copy.deepcopy(target[last]))
        else:
            target[last] = copy.deepcopy(rng.choice(ODD))
    return _hashed(data)


def other_decisions(content: bytes, rng: random.Random) -> bytes:
    """Decisions that look like real ones."""
    data = json.loads(content)
    sharding, mesh = data["sharding"], Mesh.parse(data["mesh"])
    for _ in range(rng.choice((1, 1, 2, 4))):
        name = rng.choice(sorted(sharding["nodes"]))
        node, other = sharding["nodes"][name], sharding["nodes"][rng.choice(sorted(sharding["nodes"]))]
        layouts = range(len(sharding["layouts"]))
        action = rng.choice(
            ("input", "output", "choice", "node", "whole", "leaf", "result", "text", "kept", "option", "bare")
        )
        if action in ("input", "output") and (numbers := node[action == "output"]):
            numbers[rng.randrange(len(numbers))] = rng.choice(layouts)
        elif action == "choice" and node[2]:
            node[2][rng.randrange(len(node[2]))] = rng.choice(("", "b", "m", "n", "k", "+0", "m/2", "m/0", "/", "+"))
        elif action == "node":
            sharding["nodes"][name] = other
        elif action == "whole":
            del sharding["nodes"][name]
        elif action == "leaf":
            leaves = sharding["leaves"]
            leaves[rng.choice(sorted(leaves))] = leaves[rng.choice(sorted(leaves))]
        elif action == "result":
            sharding["outputs"][rng.randrange(len(sharding["outputs"]))] = rng.choice(layouts)
        elif action == "text":
            axis, dim = rng.choice(mesh.names), rng.randrange(3)
            sharding["layouts"][rng.choice(layouts)][1] = rng.choice(
                (f"{axis}:S({dim})", f"{axis}:P", "R", f"{axis}:S(0/2)")
            )
        elif action == "kept":
            sharding["kept"].append([name, rng.randrange(2), rng.choice(layouts)])
        elif action == "option":
            data["reduce_scatter"], data["bucket_bytes"] = (
                rng.choice(("native", "all_to_all")),
                rng.choice((0.0, 100.0, 1e9)),
            )
        elif action == "bare":
            sharding["again"].append(rng.choice((*sharding["nodes"], "blocks.0", "nothing", "")))
    return _hashed(data)


def places(value, path=()):
    """Paths to everything inside nested dicts and lists."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        yield (*path, key)
        yield from places(inner, (*path, key))


def _hashed(data: dict) -> bytes:
    if "hash" in data:
        data["hash"] = content_hash(data)
    return json.dumps(data).encode()
