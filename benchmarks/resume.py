"""Test what a checkpoint survives: kills of the run, another mesh, kills of the save, damaged files.

    OMP_NUM_THREADS=1 python benchmarks/resume.py [run] [meshes] [saves] [damage]

run     `autopar train` is killed (SIGKILL, all processes) at a random moment and resumed: its last checkpoint has to be
        that of a run that was never interrupted, byte for byte.
meshes  six layouts on 4 processes: from each one's checkpoint every one goes on; the restored state has to be equal,
        the losses that follow are compared with those of the run that saved it.
saves   one of two processes is killed at each of 50 points of a save (before a call that changes the disk, of writes
        also inside): the newest complete checkpoint has to load, with the weights of its step.
damage  1,000 times a checkpoint is damaged (bits, lengths, swapped, replaced and missing files): CheckpointCorrupt on
        both ranks, the model untouched.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parent.parent))

import autopar
from autopar import models
from autopar.errors import CheckpointCorrupt
from autopar.ir.mesh import Mesh
from autopar.models.corpus import batches
from autopar.storage.gather import gather_everywhere
from autopar.storage.manifest import Manifest
from autopar.storage.model_folder import local
from tests.helpers import gloo
from tests.storage import damage

MODEL = "gpt:hidden=32,layers=2,heads=4,vocab=256,seq=16"
BATCH, SEQ, STEPS = 8, 16, 3
LAYOUTS = [  # mesh, strategy
    ("dp=4", "ddp"), ("tp=4", "megatron"), ("dp=2,tp=2", "megatron"), ("dp=4", "fsdp"), ("tp=2,dp=2", "megatron_sp"),
    ("dp=4", "zero1"),
]  # fmt: skip


def compiled(mesh_text: str, plan=None, seed: int = 0):
    """(model, AdamW)"""
    mesh = Mesh.parse(mesh_text)
    source, inputs = models.build(MODEL, batch=BATCH, seq=SEQ, device="cpu", seed=seed)
    model = autopar.compile(source, init_device_mesh("cpu", mesh.sizes, mesh_dim_names=mesh.names), inputs, plan=plan)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-3)


def take_steps(model, optimizer, stream, count: int = STEPS) -> list[float]:
    losses = []
    for _ in range(count):
        loss = model(**next(stream)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def whole_state(model, optimizer) -> dict[str, torch.Tensor]:
    """Copies of all parameters and of AdamW's moments, global."""
    found = {}
    for name, p in model.named_parameters():
        layout = model.layouts[name]
        for key, tensor in {"": p, **optimizer.state.get(p, {})}.items():
            part = local(tensor)
            found[name + key] = (
                gather_everywhere(part, p.shape, layout, model.plan.mesh).clone() if part.dim() else part.clone()
            )
    return found


# run
# ----------------------------------------------------------------------------------------------------------------------


def train(folder: Path, *words: str) -> subprocess.Popen:
    command = [
        sys.executable, "-m", "autopar.cli", "train", "--model", "gpt2-tiny", "--mesh", "dp=2", "--batch", "4", "--seq",
        "32", "--steps", "60", "--every", "1", "--keep", "3", "--checkpoint", str(folder), *words,
    ]  # fmt: skip
    return subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    )


def files_of(folder: Path) -> dict[str, bytes]:
    """All but what names the run and the time."""
    files = [p for p in sorted(folder.rglob("*")) if p.is_file() and p.name not in ("manifest.json", "COMMIT")]
    return {str(p.relative_to(folder)): p.read_bytes() for p in files}


def run(rng: random.Random, trials: int) -> int:
    wrong = 0
    with tempfile.TemporaryDirectory(prefix="autopar-") as temporary:
        root = Path(temporary)
        train(root / "whole").communicate()
        whole = files_of(autopar.latest_checkpoint(root / "whole"))
        print(f"{'killed after step':>18} {'with step saved':>16} {'files equal':>12}")
        for trial in range(trials):
            folder, last, wanted = root / str(trial), 0, rng.randrange(1, 55)
            process = train(folder)
            for line in process.stdout:
                if line.startswith("step") and line.split()[1].isdigit():
                    last = int(line.split()[1])
                    if last >= wanted:
                        break
            time.sleep(rng.random() * 0.05)
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            saved = autopar.latest_checkpoint(folder)
            train(folder, "--resume").communicate()
            mine = files_of(autopar.latest_checkpoint(folder))
            equal = sum(mine.get(name) == content for name, content in whole.items())
            wrong += equal != len(whole)
            print(f"{last:18} {saved.name if saved else '-':>16} {equal:>5} of {len(whole)}", flush=True)
    return wrong


# meshes
# -------------------------------------------------------------------------------------------------------------------


def all_pairs(rank: int, plans: list, root: str) -> list[list[tuple[float, bool]]]:
    """[from][to] -> (largest relative difference of the losses after the restart, whether the restored state is
    equal)"""
    warnings.filterwarnings("ignore")
    pairs = [compiled(mesh, plan) for (mesh, _), plan in zip(LAYOUTS, plans)]
    expected, states = [], []
    for i, (model, optimizer) in enumerate(pairs):
        stream = batches(BATCH, SEQ)
        take_steps(model, optimizer, stream)
        autopar.save_checkpoint(f"{root}/{i}", model, optimizer, step=STEPS, data={"position": stream.position})
        states.append(whole_state(model, optimizer))
        expected.append(take_steps(model, optimizer, stream))
    table = []
    for i in range(len(pairs)):
        table.append([])
        for model, optimizer in pairs:
            loaded = autopar.load_checkpoint(f"{root}/{i}", model, optimizer)
            state = whole_state(model, optimizer)
            equal = state.keys() == states[i].keys() and all(torch.equal(state[k], states[i][k]) for k in state)
            losses = take_steps(model, optimizer, batches(BATCH, SEQ, position=loaded.data["position"]))
            table[-1].append((max(abs(a / b - 1) for a, b in zip(losses, expected[i])), equal))
    return table


def meshes() -> int:
    plans = []
    for mesh, strategy in LAYOUTS:
        source, inputs = models.build(MODEL, batch=BATCH, seq=SEQ)
        plans.append(autopar.plan(source, mesh, inputs, hardware="cpu-gloo", strategy=strategy, baselines=False))
    with tempfile.TemporaryDirectory(prefix="autopar-") as root:
        table = gloo.run(4, all_pairs, plans, root, seconds=1200)[0]
    names = [f"{mesh} {strategy}" for mesh, strategy in LAYOUTS]
    print(f"largest relative difference of {STEPS} losses; * restored state not equal bit for bit")
    print(" " * 22 + " ".join(f"{name:>21}" for name in names))
    for name, row in zip(names, table):
        print(f"{name:22}" + " ".join(f"{error:>20.1e}{' ' if equal else '*'}" for error, equal in row))
    cells = [cell for row in table for cell in row]
    same_mesh = max(table[i][i][0] for i in range(len(table)))
    print(f"{len(cells)} pairs: at most {max(e for e, _ in cells):.1e}; on the same mesh {same_mesh:.1e}")
    return sum(not (error <= 1e-6 and equal) for error, equal in cells) + (same_mesh != 0.0)


# saves
# --------------------------------------------------------------------------------------------------------------------


def join(rank: int, ranks: int, store: str) -> None:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)


def set_to(model, step: int) -> None:
    """Weights that say which step they are of."""
    with torch.no_grad():
        for i, p in enumerate(model.parameters()):
            local(p).fill_(step + i / 100)


def has(model, step: int) -> bool:
    """Return whether the model's weights are those of `set_to`."""
    return all(bool((local(p) == step + i / 100).all()) for i, p in enumerate(model.parameters()))


def _point(i: int, count: int, calls: int) -> int:
    """Return the call of point `i`: of `count` points half lie all over the calls and half on every other of the last
    ones, where the checkpoint is committed."""
    spread = count // 2
    return i * calls // spread if i < spread else max(0, calls - 1 - 2 * (i - spread))


def killed_saves(rank: int, root: str, points: int, seed: int) -> list[str]:
    """A line for every point at which a forked process was killed while it saved."""
    warnings.filterwarnings("ignore")
    rng = random.Random(seed)
    model, optimizer = compiled("tp=2")
    take_steps(model, optimizer, batches(BATCH, SEQ), 1)
    folder, start = Path(root, "checkpoints"), Path(root, "start")
    for step in (1, 2):
        set_to(model, step)
        autopar.save_checkpoint(folder, model, optimizer, step=step)
    if rank == 0:
        damage.copy_of(folder, start)
    dist.barrier()
    with damage.counted() as made:  # as those that are killed
        autopar.save_checkpoint(folder, model, optimizer, step=3, keep=2)
    everyone, lines = [None, None], []
    dist.all_gather_object(everyone, made)
    for point in range(points):
        victim = point % 2
        calls = everyone[victim]
        at, fraction = _point(point // 2, points // 2, len(calls)), rng.random()
        if rank == 0:
            damage.copy_of(start, folder)
        dist.barrier()
        dist.destroy_process_group()
        child = os.fork()
        if child == 0:
            join(rank, 2, f"{root}/child-{point}")
            set_to(model, 3)
            try:
                with damage.counted(at if rank == victim else None, fraction):
                    autopar.save_checkpoint(folder, model, optimizer, step=3, keep=2)
            finally:
                os._exit(0)
        ended = os.waitpid(child, 0)[1]
        join(rank, 2, f"{root}/parent-{point}")
        dist.all_gather_object(ends := [None, None], ended)
        assert ends[victim] == signal.SIGKILL, ends
        path = autopar.latest_checkpoint(folder)
        Manifest.read(path).check(path)
        loaded = autopar.load_checkpoint(folder, model, optimizer)
        right = loaded.step in (2, 3) and has(model, loaded.step)
        lines.append(
            f"rank {victim} {calls[at]:8} {at:4} of {len(calls):4}  step {loaded.step} {'' if right else 'WRONG'}"
        )
    return lines


def saves(points: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="autopar-") as root:
        lines = gloo.run(2, killed_saves, root, points, seed, seconds=900)[0]
    print(*(f"killed before {line}" for line in lines), sep="\n")
    wrong = sum("WRONG" in line for line in lines)
    print(f"{len(lines)} kills: {len(lines) - wrong} times the newest complete checkpoint loaded")
    return wrong


# damage
# -------------------------------------------------------------------------------------------------------------------


def damaged(rank: int, root: str, cases: int, seed: int) -> tuple[dict[str, list[int]], list[str]]:
    """({kind: [cases, found]}, what went unnoticed)"""
    warnings.filterwarnings("ignore")
    rng, counts, missed = random.Random(seed), {}, []
    model, optimizer = compiled("tp=2")
    take_steps(model, optimizer, batches(BATCH, SEQ), 1)
    path = autopar.save_checkpoint(root, model, optimizer, step=1)
    set_to(model, 7)
    for _ in range(cases):
        what, undo = damage.corruption(path, rng) if rank == 0 else ("", None)
        dist.barrier()
        try:
            autopar.load_checkpoint(path, model, optimizer)
            found = False
        except CheckpointCorrupt:
            found = has(model, 7)
        dist.barrier()
        if rank == 0:
            undo()
            count = counts.setdefault(what.split()[0], [0, 0])
            count[0] += 1
            count[1] += found
            missed += [] if found else [what]
    dist.barrier()
    autopar.load_checkpoint(path, model, optimizer)  # undamaged again
    return counts, missed


def damages(cases: int, seed: int) -> int:
    with tempfile.TemporaryDirectory(prefix="autopar-") as root:
        counts, missed = gloo.run(2, damaged, root, cases, seed, seconds=900)[0]
    print(f"{'damage':9} {'cases':>6} {'found':>6}")
    for kind, (count, found) in sorted(counts.items()):
        print(f"{kind:9} {count:6} {found:6}")
    print(f"{cases} cases: {cases - len(missed)} found", *missed, sep="\n")
    return len(missed)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", default=["meshes", "saves", "damage", "run"])
    parser.add_argument("--trials", type=int, default=3, help="kills of a run")
    parser.add_argument("--points", type=int, default=50, help="kills of a save")
    parser.add_argument("--cases", type=int, default=1000, help="damaged checkpoints")
    parser.add_argument("--seed", type=int, default=0)
    a = parser.parse_args()
    warnings.filterwarnings("ignore")
    parts = {
        "run": lambda: run(random.Random(a.seed), a.trials), "meshes": meshes, "saves": lambda: saves(a.points, a.seed),
        "damage": lambda: damages(a.cases, a.seed),
    }  # fmt: skip
    wrong = 0
    for part in a.parts:
        print(f"{part} (seed {a.seed})")
        wrong += parts[part]()
        print(flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
