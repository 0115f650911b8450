"""Kill a rank, a node or the cable between two nodes at random moments of compile, load, steps and saves, and resume.

    OMP_NUM_THREADS=1 python benchmarks/kills.py [--kills 200] [--nodes 1] [--seed 0]

Four ranks train a GPT on dp=2,tp=2 and save every ten steps, every other time while the training goes on. From the
moment that all of them have met, something is killed after a time drawn from the length of a life, compile and load
included; the next life goes on from the newest whole checkpoint. A kill is "right" if every survivor ended with an
AutoparError about the ranks that were lost (a cable: about the other node's), no process is left, the checkpoint that
was complete last is there, and every loss has the bits that the first run through its step gave it. "ended": seconds
until the last survivor was gone, at most; behind a cut cable those wait for the limit of a collective, which is 5 s.
--nodes 2: two ranks in each of two network namespaces (which needs root and iproute2).
"""

from __future__ import annotations

import argparse
import ast
import multiprocessing
import os
import random
import shutil
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
from autopar.storage.manifest import number_of
from benchmarks.soak import MODEL, TIMEOUT_SECONDS, WORLD, node
from tests.helpers import gloo
from tests.helpers.two_nodes import TwoNodes

SAVED_EVERY = 10  # steps
LIVES_SECONDS = (3.0, 10.0)  # at most: of one in which it compiles and loads, and of one that also trains
END_SECONDS = 90.0
KINDS = {"rank": "SIGKILL of a rank", "node": "SIGKILL of both ranks of a node", "cable": "the link is cut"}


def _train(rank: int, folder: str, life: int, nodes: TwoNodes | None) -> None:
    """Run one rank from the newest checkpoint until something goes wrong, and write down where it is."""
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.processes import process_groups

    os.environ |= {"AUTOPAR_TIMEOUT_S": str(TIMEOUT_SECONDS), "AUTOPAR_RECORDS": f"{folder}/records-{life}"}
    process_groups.STEPS = 0
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.dup2(os.open(f"{folder}/stderr-{rank}", os.O_WRONLY | os.O_CREAT | os.O_APPEND), 2)
    root, place = Path(folder, "checkpoints"), Path(folder, f"place-{rank}")
    losses = open(Path(folder, "losses"), "a", buffering=1) if rank == 0 else None
    store = f"file://{folder}/store-{life}" if nodes is None else nodes.enter(rank, life)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=WORLD)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    source, batch = models.build(MODEL, batch=4, seq=16, device="cpu", seed=0)
    try:
        place.write_text("compile")
        model = autopar.compile(source, mesh, batch, hardware="cpu-gloo", strategy="megatron")
        optimizer, vocab, step = torch.optim.AdamW(model.parameters(), lr=1e-3), source.config.vocab, 0
        place.write_text("load")
        if autopar.latest_checkpoint(root) is not None:
            step = autopar.load_checkpoint(root, model, optimizer).step
        while True:
            place.write_text("step")
            step += 1
            ids = torch.randint(0, vocab, batch["input_ids"].shape, generator=torch.Generator().manual_seed(step))
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            if losses is not None:
                losses.write(f"{step} {loss.item().hex()}\n")
            if step % SAVED_EVERY == 0:
                place.write_text("save")
                autopar.save_checkpoint(root, model, optimizer, step=step, keep=3, wait=step % (2 * SAVED_EVERY) == 0)
    except Exception as error:
        ranks = getattr(error, "ranks", None) or (getattr(error, "rank", None),)
        is_typed = isinstance(error, autopar.AutoparError)
        said = (type(error).__name__, is_typed, [rank for rank in ranks if rank is not None], str(error))
        Path(folder, f"error-{life}-{rank}").write_text(repr(said))
        sys.excepthook(*sys.exc_info())
        os._exit(3)


@dataclass(frozen=True)
class Kill:
    """One kill: where the ranks were, how long the survivors took to end, and what was wrong, "" if nothing."""

    kind: str
    place: str
    seconds: float
    wrong: str


class Run:
    """Holds a run that is started again after every kill, in one folder."""

    def __init__(self, folder: Path, seed: int, nodes: TwoNodes | None):
        self.folder, self.rng, self.nodes, self.life = folder, random.Random(seed), nodes, 0
        self.context = multiprocessing.get_context("forkserver")
        self.context.set_forkserver_preload(gloo.PRELOAD)
        self.bits: dict[str, str] = {}
        self.newest = 0
        (folder / "losses").touch()

    def kill(self, kind: str) -> Kill:
        """Start a life, kill something in it, and see what comes of it."""
        self.life += 1
        for place in self.folder.glob("place-*"):
            place.unlink()
        arguments = (str(self.folder), self.life, self.nodes)
        processes = [self.context.Process(target=_train, args=(r, *arguments), daemon=True) for r in range(WORLD)]
        for process in processes:
            process.start()
        end = time.monotonic() + END_SECONDS
        while len(list(self.folder.glob("place-*"))) < WORLD and time.monotonic() < end:
            time.sleep(0.02)
        time.sleep(self.rng.uniform(0.0, self.rng.choice(LIVES_SECONDS)))
        victim = self.rng.randrange(WORLD)
        lost = {r for r in range(WORLD) if r == victim or (kind != "rank" and node(r) == node(victim))}
        place = (self.folder / f"place-{victim}").read_text() or "between"
        if any(not process.is_alive() for process in processes):
            return self._ended(processes, Kill(kind, place, 0.0, "a rank ended by itself"))
        if kind == "cable":
            self.nodes.link("down")
        for rank in lost if kind != "cable" else ():
            processes[rank].kill()
        start = time.monotonic()
        survivors = [r for r in range(WORLD) if kind == "cable" or r not in lost]
        for rank in survivors:
            processes[rank].join(max(0.0, start + END_SECONDS - time.monotonic()))
        seconds = time.monotonic() - start
        wrong = "a survivor did not end" if any(processes[r].is_alive() for r in survivors) else ""
        for rank in survivors:
            apart = {r for r in range(WORLD) if node(r) != node(rank)} if kind == "cable" else lost
            wrong = wrong or self._said_wrong(rank, apart)
        return self._ended(processes, Kill(kind, place, seconds, wrong))

    def _said_wrong(self, rank: int, lost: set[int]) -> str:
        file = self.folder / f"error-{self.life}-{rank}"
        if not file.exists():
            return f"rank {rank} said nothing"
        kind, is_typed, ranks, text = ast.literal_eval(file.read_text())
        right = is_typed and {*ranks} <= lost
        return "" if right else f"of {sorted(lost)}, rank {rank} said {kind} of {ranks}: {text.splitlines()[0]}"

    def _ended(self, processes: list, kill: Kill) -> Kill:
        for process in processes:
            process.kill()
            process.join()
        if self.nodes is not None:
            self.nodes.link("up")
        newest = autopar.latest_checkpoint(self.folder / "checkpoints")
        step, wrong = number_of(newest) if newest else 0, kill.wrong
        if step < self.newest:
            wrong = wrong or f"the checkpoint of step {self.newest} was there, now {step} is the newest"
        self.newest = step
        for line in (self.folder / "losses").read_text().splitlines():
            number, bits = line.split()
            if self.bits.setdefault(number, bits) != bits:
                wrong = wrong or f"the loss of step {number} has other bits"
        return Kill(kill.kind, kill.place, kill.seconds, wrong)


def main() -> None:
    """Kill, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--nodes", type=int, choices=(1, 2), default=1)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    kinds = [*KINDS] if args.nodes == 2 else ["rank"]
    folder, rows = Path(tempfile.mkdtemp(prefix="autopar-kills-")), defaultdict(list)
    os.environ["AUTOPAR_CACHE"] = "off"
    with TwoNodes(WORLD) if args.nodes == 2 else nullcontext() as nodes:
        run = Run(folder, args.seed, nodes)
        try:
            for number in range(args.kills):
                kill = run.kill(kinds[number % len(kinds)])
                rows[kill.kind, kill.place].append(kill)
                said = f"{kill.kind} in {kill.place}: {kill.wrong or 'right'}, {kill.seconds:.1f} s"
                print(said, file=sys.stderr, flush=True)
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    print(f"{args.kills} kills in {run.life} lives, {len(run.bits)} steps; seed {args.seed}")
    print(f"{'killed':8s}{'in':10s}{'number':>7s}{'right':>7s}{'ended':>9s}   what happens")
    for (kind, place), kills in sorted(rows.items()):
        right, most = sum(not kill.wrong for kill in kills), max(kill.seconds for kill in kills)
        print(f"{kind:8s}{place:10s}{len(kills):7d}{right:7d}{most:7.1f} s   {KINDS[kind]}")


if __name__ == "__main__":
    main()
