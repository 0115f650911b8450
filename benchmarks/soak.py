"""Train for hours on processes of which one has a fault every minute, and count what was not as it should be.

    OMP_NUM_THREADS=1 python benchmarks/soak.py [--minutes 120] [--every 60] [--pause 0] [--nodes 1] [--seed 0]

Four ranks train a GPT on dp=2,tp=2 and save every 20 steps, every other time while the training goes on. Kinds of
faults take turns, each of a random rank at a random moment: what ends a run is started again from the newest whole
checkpoint. A fault is "right" if every survivor raised the right error about the right rank (or none where the run
goes on), all processes ended, and every loss has the bits that the first run through that step gave it. "ended":
seconds from the fault until the last process was gone, at the most; the limit of a collective is 5 s. Memory and file
descriptors are those of the processes after 30 steps and at the end of their lives. --pause: seconds that each step
waits, as for data, so that the machine does other work beside. --nodes 2: two ranks in each of two network namespaces
(which needs root and iproute2), and two kinds of faults more.
"""

from __future__ import annotations

import argparse
import ast
import errno
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

import torch
import torch.distributed as dist

import autopar
from autopar import models
from autopar.errors import CheckpointError
from tests.helpers import gloo
from tests.helpers.two_nodes import TwoNodes

MESH, WORLD, MODEL = "dp=2,tp=2", 4, "gpt2-tiny"
SAVED_EVERY, CHECKED_EVERY, SETTLED = 20, 5, 30  # steps
TIMEOUT_SECONDS, END_SECONDS = 5.0, 60.0
DIED, APART, LATE = "RankFailure", "DesyncError", "CollectiveTimeout"
KINDS = {  # the error of all survivors, "" where the run goes on; whether it names the rank; what happens
    "kill": (DIED, True, "SIGKILL in a step"),
    "save": (DIED, True, "SIGKILL in the middle of a save"),
    "damage": (DIED, True, "SIGKILL, and a file of the newest checkpoint is damaged"),
    "raise": (DIED, True, "an exception of the program"),
    "stop": (LATE, True, "SIGSTOP"),
    "pause": ("", False, "SIGSTOP for two seconds"),
    "skip": (APART, True, "a rank skips a backward"),
    "differ": (APART, True, "a parameter of one rank changes"),
    "nan": ("NotFiniteError", False, "a parameter becomes NaN"),
    "disk": ("", False, "no room on the disk for two saves"),
    "node": (DIED, True, "SIGKILL of both ranks of a node"),
    "cable": (LATE, True, "the link between the nodes is cut"),
}
DEADLY = ("kill", "save", "damage", "raise")  # to the rank itself
OF_NODES = ("node", "cable")


def _train(rank: int, folder: str, life: int, plan: autopar.Plan, pause: float, nodes: TwoNodes | None) -> None:
    """Run one rank from the newest checkpoint until something goes wrong."""
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.processes import process_groups

    os.environ |= {"AUTOPAR_TIMEOUT_S": str(TIMEOUT_SECONDS), "AUTOPAR_RECORDS": f"{folder}/records-{life}"}
    process_groups.STEPS = 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    store = f"file://{folder}/store-{life}" if nodes is None else nodes.enter(rank, life)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    source, batch = models.build(MODEL, batch=4, seq=16, device="cpu", seed=0)
    model = autopar.compile(source, mesh, batch, plan=plan, check_every=CHECKED_EVERY)
    optimizer, vocab = torch.optim.AdamW(model.parameters(), lr=1e-3), source.config.vocab
    root, files = Path(folder, "checkpoints"), Faults(folder, rank, model)
    try:
        step = 0
        if autopar.latest_checkpoint(root) is not None:
            step = autopar.load_checkpoint(root, model, optimizer).step
        while True:
            step += 1
            time.sleep(pause)
            ids = torch.randint(0, vocab, batch["input_ids"].shape, generator=torch.Generator().manual_seed(step))
            if files.before(step):
                model(input_ids=ids, labels=ids)  # without a backward
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            files.note(step, loss)
            if step % SAVED_EVERY == 0:
                files.before_save()
                try:
                    autopar.save_checkpoint(root, model, optimizer, step=step, keep=3, wait=step % 40 == 0)
                except CheckpointError as error:
                    files.failed_saves(error)
    except Exception as error:
        ranks = getattr(error, "ranks", None) or (getattr(error, "rank", None),)
        Path(folder, f"error-{life}-{rank}").write_text(repr((type(error).__name__, ranks, str(error))))
        sys.excepthook(*sys.exc_info())
        os._exit(3)


class Faults:
    """Holds what one rank is told to do wrong, by a file that is named after it, and what it writes down."""

    def __init__(self, folder: str, rank: int, model):
        self.folder, self.rank, self.model, self.order = Path(folder), rank, model, Path(folder, f"fault-{rank}")
        self.steps, self.in_save, self.full_saves, self.settled = 0, False, 0, None
        self.losses = open(self.folder / "losses", "a", buffering=1) if rank == 0 else None
        self.write = os.write

    def before(self, step: int) -> bool:
        """Do wrong what is to be done before a step; return whether to skip a backward."""
        if not self.order.exists() or step % SAVED_EVERY not in range(1, 15):
            return False  # a check comes before the next save: what is saved is sound
        kind = self.order.read_text()
        self.order.unlink()
        if kind == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif kind == "raise":
            raise ValueError("a bad batch")
        elif kind == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif kind in ("differ", "nan"):
            name = next(n for n, layout in self.model.layouts.items() if not layout.sharding_axes)
            parameter = self.model.get_parameter(name)
            local = parameter.to_local() if hasattr(parameter, "to_local") else parameter
            with torch.no_grad():
                local.view(-1)[0] = float("nan") if kind == "nan" else local.view(-1)[0] + 1.0
        self.in_save, self.full_saves = kind == "save", 2 if kind == "disk" else self.full_saves
        return kind == "skip"

    def before_save(self) -> None:
        """Let the disk be full, or the process end, after some writes of a save."""
        left = [2]

        def write(file, data):
            left[0] -= 1
            if left[0] < 0 and self.in_save:
                os.kill(os.getpid(), signal.SIGKILL)
            if left[0] < 0 and self.full_saves:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.write(file, data)

        os.write = write if self.in_save or self.full_saves else self.write

    def failed_saves(self, error: CheckpointError) -> None:
        """Write down that a save failed on all ranks, and go on."""
        self.full_saves = max(0, self.full_saves - 1)
        os.write = self.write
        if self.rank == 0:
            with open(self.folder / "failed-saves", "a") as file:
                file.write(f"{error.message}\n")

    def note(self, step: int, loss: torch.Tensor) -> None:
        """Write down that a step is done."""
        self.steps += 1
        if self.losses is not None:
            self.losses.write(f"{step} {loss.item().hex()}\n")
        else:
            loss.item()
        if self.steps == SETTLED:
            self.settled = _held()
        if self.steps % SETTLED == 0:
            self.end()

    def end(self) -> None:
        """Write down what the process holds."""
        if self.settled is not None:
            (self.folder / f"held-{self.rank}").write_text(repr((*self.settled, *_held())))


def node(rank: int) -> int:
    """Return the node of a rank."""
    return rank // (WORLD // 2)


def _held() -> tuple[int, int]:
    """Return the resident bytes and open file descriptors of this process."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE"), len(os.listdir("/proc/self/fd"))


@dataclass
class Fault:
    """One fault and what came of it. `wrong`: what was not as it should be, "" if nothing."""

    kind: str
    seconds: float
    wrong: str


class Soak:
    """Holds a run that is started again and again in one folder."""

    def __init__(self, folder: Path, seed: int, pause: float, nodes: TwoNodes | None):
        self.folder, self.rng, self.life = folder, random.Random(seed), 0
        self.pause, self.nodes = pause, nodes
        source, batch = models.build(MODEL, batch=4, seq=16, device="cpu", seed=0)
        self.plan = autopar.plan(source, MESH, batch, hardware="cpu-gloo", strategy="megatron", baselines=False)
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(gloo.PRELOAD)
        self.processes, self.held, self.read, self.known, self.unequal = [], [], 0, {}, 0
        os.environ["AUTOPAR_CACHE"] = str(folder / "cache")
        (folder / "losses").touch()

    def start(self) -> None:
        self.life += 1
        for order in self.folder.glob("fault-*"):
            order.unlink()
        arguments = (str(self.folder), self.life, self.plan, self.pause, self.nodes)
        self.processes = [self.context.Process(target=_train, args=(r, *arguments), daemon=True) for r in range(WORLD)]
        for process in self.processes:
            process.start()

    def losses(self) -> int:
        """Read what was written since, and return the number of steps that are done in all lives."""
        for line in Path(self.folder, "losses").read_text().splitlines()[self.read :]:
            step, bits = line.split()
            self.unequal += self.known.setdefault(int(step), bits) != bits
            self.read += 1
        return self.read

    def wait_for_steps(self, count: int, seconds: float = 120.0) -> bool:
        """Return whether so many more steps are done in time."""
        end, first = time.monotonic() + seconds, self.losses()
        while self.losses() < first + count and time.monotonic() < end:
            if not all(process.is_alive() for process in self.processes):
                return False
            time.sleep(0.2)
        return self.losses() >= first + count

    def fault(self, kind: str) -> Fault:
        """Let a random rank have a fault, and see what comes of it."""
        victim, (error, names_it, _) = self.rng.randrange(WORLD), KINDS[kind]
        unequal, process, named = self.unequal, self.processes[victim], {victim}
        if kind == "pause":
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(2)
            os.kill(process.pid, signal.SIGCONT)
        elif kind in OF_NODES:
            named = {rank for rank in range(WORLD) if node(rank) == node(victim)}
            if kind == "cable":
                self.nodes.link("down")
            for rank in named if kind == "node" else ():
                self.processes[rank].kill()
        else:
            word = "kill" if kind == "damage" else kind
            (self.folder / "order").write_text(word)
            os.replace(self.folder / "order", self.folder / f"fault-{victim}")
        if not error:
            wrong = "" if self.wait_for_steps(4 * SAVED_EVERY) else "the run did not go on"
            if kind == "disk" and not wrong:
                wrong = self._after_full_disk()
            return Fault(kind, 0.0, wrong or self._unequal_since(unequal))
        of_all = kind in ("differ", "nan", "skip", "cable")  # who says something
        survivors = [p for rank, p in enumerate(self.processes) if of_all or rank not in (named if names_it else ())]
        end, order = time.monotonic() + END_SECONDS + 60, self.folder / f"fault-{victim}"
        while time.monotonic() < end and (order.exists() or (kind in DEADLY and process.is_alive())):
            time.sleep(0.02)
        start = time.monotonic()
        for process in survivors:
            process.join(max(0.0, start + END_SECONDS - time.monotonic()))
        seconds = time.monotonic() - start
        wrong = "a survivor did not end" if any(p.is_alive() for p in survivors) else ""
        for rank, process in enumerate(self.processes):
            if process in survivors and not wrong:
                apart = {r for r in range(WORLD) if node(r) != node(rank)}
                wrong = self._said_wrong(rank, error, apart if kind == "cable" else named if names_it else None)
        self.stop()
        if kind in ("differ", "nan"):  # steps after it and before a check had wrong numbers
            self.read = len(Path(self.folder, "losses").read_text().splitlines())
        if kind == "damage":
            newest = autopar.latest_checkpoint(self.folder / "checkpoints")
            file = self.rng.choice(sorted(newest.rglob("*.safetensors")))
            file.write_bytes(file.read_bytes()[:-1])
        self.start()
        if not self.wait_for_steps(SETTLED):
            wrong = wrong or "the run did not start again"
        return Fault(kind, seconds, wrong or self._unequal_since(unequal))

    def _said_wrong(self, rank: int, error: str, named: set[int] | None) -> str:
        file = self.folder / f"error-{self.life}-{rank}"
        if not file.exists():
            return f"rank {rank} said nothing"
        kind, ranks, text = ast.literal_eval(file.read_text())
        if kind != error or (named is not None and not {*ranks} <= named):
            return f"of {named}, rank {rank} said {kind}: {text.splitlines()[0]}"
        return ""

    def _after_full_disk(self) -> str:
        saved = (self.folder / "failed-saves").read_text() if (self.folder / "failed-saves").exists() else ""
        (self.folder / "failed-saves").unlink(missing_ok=True)
        return "" if saved else "no save failed"

    def _unequal_since(self, before: int) -> str:
        self.losses()
        return f"{self.unequal - before} losses have other bits" if self.unequal > before else ""

    def stop(self) -> None:
        """End all processes and note what they held."""
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        self.processes = []
        if self.nodes is not None:
            self.nodes.link("up")
        for file in self.folder.glob("held-*"):
            self.held.append(ast.literal_eval(file.read_text()))
            file.unlink()


def _run(soak: Soak, kinds: list[str], rows: dict[str, list[Fault]], seconds: float, every: float) -> None:
    end = time.monotonic() + seconds
    soak.start()
    assert soak.wait_for_steps(SETTLED), (soak.folder / "stderr-0").read_text()[-2000:]
    while time.monotonic() < end:
        start = time.monotonic()
        kind = kinds[sum(map(len, rows.values())) % len(kinds)]
        rows[kind].append(fault := soak.fault(kind))
        print(f"{kind}: {fault.wrong or 'right'}, {fault.seconds:.1f} s", file=sys.stderr, flush=True)
        if fault.wrong == "the run did not go on":
            soak.stop()
            soak.start()
            soak.wait_for_steps(SETTLED)
        time.sleep(max(0.0, min(start + every, end) - time.monotonic()))


def main() -> None:
    """Run the faults and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=120)
    parser.add_argument("--every", type=float, default=60, help="seconds from one fault to the next")
    parser.add_argument("--pause", type=float, default=0.0, help="seconds that each step waits before")
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    kinds = [kind for kind in KINDS if kind not in OF_NODES or args.nodes == 2]
    folder, before, rows = Path(tempfile.mkdtemp(prefix="autopar-soak-")), _held(), defaultdict(list)
    with TwoNodes(WORLD) if args.nodes == 2 else nullcontext() as nodes:
        soak = Soak(folder, args.seed, args.pause, nodes)
        try:
            _run(soak, kinds, rows, 60 * args.minutes, args.every)
        finally:
            soak.stop()
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{args.minutes:g} minutes, a fault every {args.every:g} s at least, {soak.read} steps in {soak.life} lives")
    print(f"{'fault':8s}{'number':>7s}{'right':>7s}{'ended':>9s}   what happens")
    for kind, found in rows.items():
        ended = f"{max(f.seconds for f in found):.1f} s" if KINDS[kind][0] else "goes on"
        right = sum(not f.wrong for f in found)
        print(f"{kind:8s}{len(found):7d}{right:7d}{ended:>9s}   {KINDS[kind][2]}")
    print(f"losses with other bits than before: {soak.unequal} of {soak.read}")
    if soak.held:
        most = max(last / first for first, _, last, _ in soak.held)
        files = max(last - first for _, first, _, last in soak.held)
        print(
            f"a life's memory at its end: at most {most:.3f} of that after {SETTLED} steps; file descriptors {files:+d}"
        )
    print(f"this process: {_held()[0] / before[0]:.3f} of its memory, {_held()[1] - before[1]:+d} descriptors")


if __name__ == "__main__":
    main()
