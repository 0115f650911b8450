"""Idle time and memory of pipeline schedules, three times over: by closed forms, played, and measured on gloo
processes.

    OMP_NUM_THREADS=1 python benchmarks/bubbles.py [--parts forms,idle,memory] [--schedules naive,zbv] [--idle-seconds
    4.2]

forms   autopar/schedule/play.py against tests/helpers/bubble_formulas.py, of all schedules, the seconds of F, I and W
        equal.
idle    8 processes run the schedules through the real links with stages that sleep, so that they do not share cores.
        The bubble is what is idle between the first action of any rank and the last one of any, from the times that the
        engine notes. Where the machine is busy with other work a process that wakes up waits for a core, some
        milliseconds a message, so that a rank has to be idle for seconds: F, I and W take as long as that needs, the
        same for all three.
memory  4 processes train a model; the storages that the ops of a stage save for its backward are followed from op to op
        (autopar/utils/allocation_tracker.py). In flight is the most bytes of them alive at once over those of one
        micro-batch. What a stage received is not counted: the next one comes while a micro-batch is computed.
"""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar._torch import storage_key
from autopar.models.output import Output
from autopar.runtime.stage_executor import Values
from autopar.runtime.stage_links import StageLinks
from autopar.runtime.walk import walk
from autopar.schedule import KINDS, Action, Played, make, play
from autopar.utils.allocation_tracker import Allocations
from tests.helpers import bubble_formulas, gloo

AT_MOST = ("v_half", "v_min")  # of which the papers give bounds, reached for some p and m
SLEEPING = ("naive", "gpipe", "1f1b", "interleaved_1f1b", "zb_h1", "interleaved_zero_bubble", "zbv")
RANKS, MICRO_BATCHES, TOLERANCE = 8, 16, 0.05
MODEL, BATCH, SEQ = "llama:hidden=128,layers=4,heads=4,kv_heads=4,ffn=512,vocab=256", 16, 64


# closed forms
# ------------------------------------------------------------------------------------------------------------


def forms(cases: list[tuple[int, int]]) -> int:
    """Prints the table; the number of disagreements."""
    wrong = 0
    print("F = I = W; in flight: micro-batches of the whole rank, the most on any rank")
    print(
        f"{'p':>2} {'m':>3} "
        f"{'schedule':24}{'bubble':>9}{'form':>9}{'in window':>11}{'form':>9}{'in flight':>11}{'form':>7}"
    )
    for p, m in cases:
        for name in KINDS:
            v = make(name, p, m).stages_per_rank
            played = play(make(name, p, m), *[1 / v] * 3)
            mine = played.bubble, played.bubble_in_window, max(played.peaks) / v
            form = (bubble_formulas.bubble(name, p, m), bubble_formulas.bubble(name, p, m, in_window=True),
                    max(bubble_formulas.in_flight(name, p, m, rank) for rank in range(p)) / v)  # fmt: skip
            exact = all(abs(x - y) < 1e-9 for x, y in zip(mine, form))
            less = name in AT_MOST and mine[1] <= form[1] and mine[2] <= form[2]  # the bounds are of a rank's window
            wrong += not (exact or less)
            print(f"{p:2} {m:3} "
                  f"{name:24}{mine[0]:9.2%}{form[0]:9.2%}{mine[1]:11.2%}{form[1]:9.2%}{mine[2]:11g}{form[2]:7g}  "
                  f"{'exact' if exact else 'within the bound' if less else 'WRONG'}")  # fmt: skip
    one, four = play(make("naive", 4, 1)), play(make("gpipe", 4, 4))
    print(
        f"4 stages and 4 micro-batches: {four.utilization:.0%} utilization against {one.utilization:.0%} with one batch"
    )
    print(f"{wrong} disagreements\n", flush=True)
    return wrong


# idle time of stages that sleep
# ------------------------------------------------------------------------------------------


class Sleeping:
    """A stage that sleeps so long for each of F, I and W and hands on a tensor of a few bytes."""

    def __init__(self, seconds: float):
        self.seconds = seconds

    def expects(self, message: Action) -> dict[str, torch.Tensor]:
        return {"x": torch.zeros(4)}

    def do(self, action: Action, arrived: Values) -> Values:
        time.sleep(self.seconds * (2 if action.kind == "B" else 1))
        return {} if action.kind == "W" else {"x": [torch.zeros(4)]}


def sleep_through(
    rank: int, names: list[str], micro_batches: int, idle_seconds: float
) -> dict[str, list[tuple[float, float]]]:
    """Return when this rank's actions began and ended, by schedule."""
    found, world = {}, dist.get_world_size()
    for name in names:
        schedule = make(name, world, micro_batches)
        for seconds in (0.0, seconds_for(name, idle_seconds)):  # the first time connects
            stages = {s: Sleeping(seconds / schedule.stages_per_rank) for s in schedule.stages_of(rank)}
            groups = dict.fromkeys("FB", dist.group.WORLD)
            links = StageLinks(stages, rank, schedule.rank_of_stage, groups, torch.device("cpu"), schedule)
            dist.barrier()
            times = [*walk(schedule.orders[rank], stages, links)]
        assert [action for action, _, _ in times] == list(schedule.orders[rank])
        found[name] = [(start, end) for _, start, end in times]
    return found


def seconds_for(name: str, idle_seconds: float) -> float:
    """Return the seconds of each of F, I and W of all stages of a rank, if the rank is to be idle so long."""
    return idle_seconds / bubble_formulas.idle_seconds(name, RANKS, MICRO_BATCHES)


def idle(names: list[str], idle_seconds: float) -> int:
    """Prints the table; the number of schedules that are not within 5 % of their closed form."""
    ranks = gloo.run(RANKS, sleep_through, names, MICRO_BATCHES, idle_seconds, seconds=500)
    print(
        f"{RANKS} gloo processes, {MICRO_BATCHES} micro-batches; first the milliseconds of each of F, I and W on a rank"
    )
    print(f"{'schedule':24}{'F, I, W':>8}{'seconds':>9}{'closed':>9}{'bubble':>9}{'closed':>9}{'apart':>8}")
    wrong = 0
    for name in names:
        schedule = make(name, RANKS, MICRO_BATCHES)
        times = [r[name] for r in ranks]
        played = Played(
            schedule, tuple(tuple(s for s, _ in t) for t in times), tuple(tuple(e for _, e in t) for t in times)
        )
        form = bubble_formulas.bubble(name, RANKS, MICRO_BATCHES)
        seconds = 3 * seconds_for(name, idle_seconds) * MICRO_BATCHES / (1 - form)
        apart = abs(played.bubble - form) / form
        wrong += apart > TOLERANCE
        print(f"{name:24}{seconds_for(name, idle_seconds) * 1e3:8.1f}{played.seconds:9.3f}{seconds:9.3f}"
              f"{played.bubble:9.2%}{form:9.2%}{apart:8.2%}{'' if apart <= TOLERANCE else '  WRONG'}")  # fmt: skip
    print(f"{wrong} further apart than {TOLERANCE:.0%}\n", flush=True)
    return wrong


class LossAlone(nn.Module):
    """A model that returns its loss and nothing else, so that no output is kept."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, **inputs):
        return Output(self.model(**inputs).loss, None)


# memory
# ------------------------------------------------------------------------------------------------------------------


def followed(rank: int, names: list[str], micro_batches: int) -> dict[str, tuple[float, float]]:
    mesh, found = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("pp",)), {}
    for name in names:
        model, inputs = models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu", seed=0)
        model = autopar.compile(
            LossAlone(model), mesh, inputs, hardware="cpu-gloo", schedule=name, micro_batches=micro_batches
        )
        found[name] = follow(model, inputs, micro_batches)
    return found


def follow(model: nn.Module, inputs: dict, micro_batches: int) -> tuple[float, float]:
    """In bytes that one micro-batch saves on this rank: the most saved at once, and the most alive beyond parameters
    and gradients."""
    (stage,) = model._captures.table[0].step.stages.values()
    model(**inputs).loss.backward()  # the first call allocates
    model.zero_grad()
    state = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers())]
    forward, kept = stage.forward, {storage_key(t) for t in state}
    with Allocations() as seen:
        seen.hold("parameters", state)
        seen.leave_out(inputs.values())

        def run(i: int, arrived: Values) -> Values:
            received = {storage_key(t) for (t,) in arrived.values()}
            result = forward(i, arrived)
            seen.hold("saved", [t for t in stage.saved[i][0] if storage_key(t) not in kept | received])
            return result

        stage.forward = run
        loss = model(**inputs).loss
        loss.backward()
        seen.hold("gradients", [p.grad for p in model.parameters() if p.grad is not None])
        del loss
    one = sum(s.bytes_ for s, sign in seen.changes if sign > 0 and s.kind == "saved") / micro_batches
    saved = rest = most_saved = most_rest = 0
    for storage, sign in seen.changes:
        saved += sign * storage.bytes_ * (storage.kind == "saved")
        rest += sign * storage.bytes_ * (storage.kind not in ("parameters", "gradients"))
        most_saved, most_rest = max(most_saved, saved), max(most_rest, rest)
    return most_saved / one, most_rest / one


def memory(ranks: int = 4, micro_batches: int = 8) -> int:
    names = ["gpipe", "1f1b"]
    measured = gloo.run(ranks, followed, names, micro_batches, seconds=300)
    print(f"{MODEL}, batch {BATCH} x {SEQ}, pp={ranks}, {micro_batches} micro-batches")
    print("in flight by stage, in bytes that a micro-batch saves")
    print(f"{'schedule':12}{'':28}" + "".join(f"{f'stage {s}':>9}" for s in range(ranks)))
    wrong = 0
    for name in names:
        form = [bubble_formulas.in_flight(name, ranks, micro_batches, s) for s in range(ranks)]
        saved = [m[name][0] for m in measured]
        wrong += sum(abs(x - y) > 0.005 * y for x, y in zip(saved, form))
        rows = {
            "closed form": form,
            "saved, measured": saved,
            "all but state and gradients": [m[name][1] for m in measured],
        }
        for label, row in rows.items():
            print(f"{name if row is form else '':12}{label:28}" + "".join(f"{x:9.2f}" for x in row))
    print(f"{wrong} stages with another number in flight\n", flush=True)
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", default="forms,idle,memory")
    parser.add_argument("--schedules", default=",".join(SLEEPING), help="that sleep")
    parser.add_argument("--idle-seconds", type=float, default=4.2)
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    cases = [(4, 16), (8, 32), (2, 8), (3, 12), (8, 16), (16, 64)]
    names = options.schedules.split(",")
    parts = {"forms": lambda: forms(cases), "idle": lambda: idle(names, options.idle_seconds), "memory": memory}
    return min(1, sum(parts[part]() for part in options.parts.split(",")))


if __name__ == "__main__":
    sys.exit(main())
