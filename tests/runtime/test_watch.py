"""A rank that dies, fails or stands still: every other one says which, where and in what step, and ends."""

from __future__ import annotations

import os
import re
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import pytest
import torch
from torch import fx
from torch.utils.data._utils import signal_handling

import autopar
from autopar._torch import c10d
from autopar.errors import DesyncError
from autopar.processes import process_groups
from autopar.processes.call_log import CallLogs
from autopar.processes.causes import Cause, Progress
from autopar.processes.guarded import Guarded
from autopar.processes.peers import SILENT
from autopar.processes.watch import Watch
from tests.helpers import faults, gloo

from .parity import planned

MESH, VICTIM = "dp=2,tp=2", 3


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned(faults.inputs()[0], MESH, faults.inputs()[1], strategy="hsdp")


WORDS = {
    "kill": "rank 3 died",
    "raise": "rank 3 failed in step .* with ValueError: a bad batch",
    "stop": "rank 3 does not answer",
    "sleep": r"rank 3 is at faults.py:\d+ in _main",
}


@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("fault", WORDS)
def test_survivors_name_the_rank(fault, plan):
    """Also rank 0, which shares no group with rank 3."""
    outcome = faults.run(fault, MESH, plan, VICTIM, after=0.1)
    assert sorted(outcome.errors) == [0, 1, 2] and not outcome.silent and set(outcome.codes) == {3}, outcome
    assert outcome.named_right(fault, VICTIM), outcome
    for *_, text in outcome.errors.values():
        assert re.search(WORDS[fault], text), text
        assert "all_" in text or "reduce_scatter" in text, text
        assert "node: " in text and "source: mlp.py:" in text and "fix: " in text, text
    assert outcome.seconds < (faults.TIMEOUT_SECONDS if fault in faults.HANGS else 0) + 5, outcome
    has_record = fault in ("raise", "sleep")  # the others end or stand still before they could write one
    said = "rank 3's program is at .*faults.py:[0-9]+ in _main" if has_record else "rank 3 left no record: killed"
    assert re.search(said, "\n".join(outcome.diagnosis)) and outcome.diagnosis[0].startswith("run "), outcome.diagnosis


APART = {
    "clip": "rank 3 waits at the norm of the gradients",
    "no_sync": "rank 3 waits at no_sync, entered for the first time",
    "save": "rank 3 waits at save_checkpoint",
}


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("fault", APART)
def test_a_rank_that_calls_alone_is_named(fault, plan):
    """It waits for the others at what it called, and they for it: nobody is late, and nobody aborts."""
    outcome = faults.run(fault, MESH, plan, VICTIM, after=0.1)
    assert sorted(outcome.errors) == [0, 1, 2] and not outcome.silent and set(outcome.codes) == {3}, outcome
    for kind, ranks, _, text in outcome.errors.values():
        assert (kind, ranks) == ("DesyncError", (3,)) and re.search(APART[fault], text), text
        assert "ranks 0, 1, 2 wait at" in text and "on every rank alike" in text, text
        assert "autopar doctor" in text, text
    assert len(outcome.diagnosis) > 2 and "ranks 0, 1, 2, 3" in outcome.diagnosis[0], outcome.diagnosis
    assert any(line.startswith("call ") and "rank 3" in line for line in outcome.diagnosis), outcome.diagnosis
    assert outcome.seconds < faults.TIMEOUT_SECONDS + 5, outcome


UNLIKE = {
    "skip": "skipped the backward graph",
    "extra": "called the forward graph once more",
    "step": "skipped the optimizer's step",
    "evaluation": "called the forward graph without gradients once more",
    "no_grad": "called the forward graph without gradients",
}


def _is_named(fault: str, mesh: str, plan: autopar.Plan, victim: int, ranks: tuple[int, ...]) -> None:
    outcome = faults.run(fault, mesh, plan, victim, after=0.1)
    assert outcome.errors and not outcome.silent and set(outcome.codes) == {3}, outcome
    for kind, named, _, text in outcome.errors.values():
        assert (kind, named) == ("DesyncError", ranks) and "ranks did not call the same" in text, text
        assert f"rank {victim} " in text and "on every rank alike" in text and "autopar doctor" in text, text
        assert UNLIKE[fault] in text, text
    assert outcome.seconds < faults.TIMEOUT_SECONDS + 5, outcome


@pytest.mark.gloo
def test_a_skipped_backward_is_found_where_collectives_look_alike():
    """The backward of `megatron` has no collectives here: the ranks' forwards go on meeting, each in another step."""
    model, batch = faults.inputs()
    _is_named("skip", "tp=2", planned(model, "tp=2", batch, strategy="megatron"), victim=1, ranks=(0, 1))


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["tp=2", "dp=2,tp=2"])
@pytest.mark.parametrize("fault", UNLIKE)
def test_a_rank_that_calls_otherwise_is_found_where_collectives_look_alike(fault, mesh):
    model, batch = faults.inputs()
    victim, ranks = (1, (0, 1)) if mesh == "tp=2" else (3, (3,))
    _is_named(fault, mesh, planned(model, mesh, batch, strategy="megatron"), victim, ranks)


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize("fault", UNLIKE)
def test_a_rank_that_calls_otherwise_is_found_under_hsdp(fault, plan):
    _is_named(fault, MESH, plan, VICTIM, (VICTIM,))


@pytest.mark.slow
@pytest.mark.gloo
def test_rank_zero_alone_in_its_first_clip(plan):
    """It waits for a process group to be made, which ranks meet for."""
    outcome = faults.run("clip", MESH, plan, victim=0, after=0.1)
    assert sorted(outcome.errors) == [1, 2, 3] and not outcome.silent and set(outcome.codes) == {3}, outcome
    for kind, ranks, _, text in outcome.errors.values():
        assert (kind, ranks) == ("DesyncError", (0,)) and re.search(r"rank 0 waits at the norm", text), text
    assert any("rank 0" in line and "norm" in line for line in outcome.diagnosis), outcome.diagnosis


def _two_threads(rank: int) -> list[str]:
    import threading

    from torch.distributed.device_mesh import init_device_mesh

    from autopar.api import entry
    from autopar.errors import AutoparError

    x, mesh, said = torch.ones(4, 8), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), []
    models = [
        entry.compile(torch.nn.Linear(8, 8), mesh, {"input": x}, loss_fn=lambda y: y.square().mean(), strategy="ddp")
        for _ in range(2)
    ]

    def train(model) -> None:
        try:
            while True:
                model(x).loss.backward()
        except AutoparError as error:
            said.append(f"{type(error).__name__}: {error}")

    os.environ["AUTOPAR_TIMEOUT_S"], process_groups.STEPS = "3", 0
    threads = [threading.Thread(target=train, args=(model,), daemon=True) for model in models]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return said


@pytest.mark.slow
@pytest.mark.gloo
def test_two_threads_that_train_are_refused():
    for said in gloo.run(2, _two_threads):
        assert len(said) == 2 and any("call compiled models at once" in text for text in said), said


def test_another_thread_in_a_call_is_refused(monkeypatch):
    watch = _watch(peers=SimpleNamespace(rank=1, world=2, ask=lambda *args, **options: {}))
    monkeypatch.setattr(process_groups, "release", lambda: None)
    with watch.collective("the norm of the gradients"), ThreadPoolExecutor(1) as pool:
        with watch.collective("a collective inside"):
            pass
        watch.running = "the norm of the gradients"
        with pytest.raises(DesyncError, match="two threads of rank 1 call compiled models at once"):
            pool.submit(watch.enter_thread).result()
    watch.running = None
    watch.enter_thread()


@pytest.mark.slow
@pytest.mark.gloo
def test_graphs_through_torch_compile(plan, fault="kill"):
    """They have no lines that tell which collective it was."""
    outcome = faults.run(fault, MESH, plan, VICTIM, after=0.1, seconds=120, backend="aot_eager")
    assert outcome.named_right(fault, VICTIM) and not outcome.silent, outcome
    for *_, text in outcome.errors.values():
        assert re.search(WORDS[fault], text) and re.search("the compiled (forward|backward) graph, step", text), text


def _watch(**others) -> Watch:
    """One that has no other ranks."""
    made = object.__new__(Watch)
    vars(made).update(
        calls=0,
        step=1,
        last=[],
        logs=CallLogs(),
        running=None,
        inside=0,
        cause=None,
        failed_at=None,
        heartbeat=SimpleNamespace(is_needed=False, mark=lambda *_: None),
        record=lambda: None,
        **others,
    )
    return made


def test_out_of_memory_is_told_as_that():
    """Also where a collective's result is allocated: no rank is asked, and none is blamed."""
    graph = fx.Graph()
    started = graph.call_function(c10d.all_reduce.default, (graph.placeholder("x"), "sum", "dp"))
    graph.output(graph.call_function(c10d.wait_tensor.default, (started,)))

    def fails(*values):
        raise torch.OutOfMemoryError("CUDA out of memory")

    watch = _watch()
    guarded = Guarded(watch, fx.GraphModule(torch.nn.Module(), graph), "backward", "dp=2", fails)
    guarded.code, guarded.at = fails.__code__, lambda line: (1, "all_reduce", started)
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        guarded(torch.ones(2))
    assert watch.running is None


def test_a_killed_worker_of_a_loader_is_told_as_that():
    """Torch raises it in the middle of whatever runs: no collective failed."""
    handler = compile("raise RuntimeError('DataLoader worker is killed')", signal_handling.__file__, "exec")
    watch = _watch()
    with pytest.raises(RuntimeError, match="worker is killed"), watch.collective("the norm of the gradients"):
        exec(handler)
    assert watch.running is None


def test_who_waits_for_others_is_named_when_all_were_asked(monkeypatch):
    """Rank 1, of the group that failed, is behind: it waits for rank 2, which is stopped."""
    behind = dict(call=1, position=1, step=1, what="the all_gather", doing="the forward graph", cause=None)
    answers = {1: behind, 2: SILENT}
    peers = SimpleNamespace(rank=0, world=3, machines=(0, 0, 0))
    peers.ask = lambda message, ranks: {rank: answers[rank] for rank in ranks if rank in answers}
    here = Progress(1, 3, 1, "the all_reduce", "the forward graph")
    found = _watch(peers=peers).find_cause(here, [0, 1], timed_out=True)
    assert (found.kind, found.ranks) == ("late", [2])
    answers[2] = behind | {"position": 3}
    assert _watch(peers=peers).find_cause(here, [0, 1], timed_out=True).ranks == [1]


def test_those_who_wait_for_the_same_are_told_first():
    told = []
    peers = SimpleNamespace(rank=0, world=4, ask=lambda message, ranks, seconds: told.append(list(ranks)))
    watch = _watch(peers=peers)
    for _ in range(2):
        watch.tell(Cause("gone", [1], "rank 1 died"), [0, 1], range(4))
    assert told == [[0, 1], [0, 1, 2, 3]]
