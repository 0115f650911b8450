"""Tests of what a rank hears of others that answer, are gone, say nothing or cannot be reached."""

from __future__ import annotations

import socket

import pytest

from autopar.processes import peers
from autopar.processes.peers import CUT_OFF, GONE, MOST_AT_ONCE, SILENT, UNKNOWN, Peers
from tests.helpers import gloo


def test_a_refusal_is_another_answer_than_silence():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        address = listener.getsockname()
        assert peers._exchange(address, b"{}\n", 0.1) == SILENT
    assert peers._exchange(address, b"{}\n", 0.1) == GONE


@pytest.mark.parametrize("error", [TimeoutError(), OSError(113, "No route to host"), socket.gaierror(-2, "no name")])
def test_no_way_is_no_death(error, monkeypatch):
    def fails(*args, **options):
        raise error

    monkeypatch.setattr(socket, "create_connection", fails)
    assert peers._exchange(("machineb", 1), b"{}\n", 0.1) == CUT_OFF


def _peers(machines: tuple[int, ...], unheard: tuple[int, ...] = ()) -> Peers:
    made = object.__new__(Peers)
    made.rank, made.word, made.machines, made.unheard = 0, "", machines, frozenset(unheard)
    made.addresses = [("", rank) for rank in range(len(machines))]
    return made


def test_what_a_lacking_answer_says(monkeypatch):
    """Rank 1 is on this machine, which is not cut off from itself; rank 3 could not be asked at the start."""
    monkeypatch.setattr(peers, "_exchange", lambda address, *rest: (CUT_OFF, CUT_OFF, CUT_OFF, GONE, GONE)[address[1]])
    assert _peers((0, 0, 1, 1, 2), (3,)).ask({}, range(5)) == {1: UNKNOWN, 2: CUT_OFF, 3: UNKNOWN, 4: GONE}


def test_no_rank_asks_thousands(monkeypatch):
    """A rank asks some of a large group, others each time, and hears little of what is asked of all."""
    monkeypatch.setattr(peers, "_exchange", lambda address, *rest: {})
    many = _peers((0,) * 1024)
    first, second = many.ask({}, range(1024)), many.ask({}, range(1024))
    assert len(first) == len(second) == MOST_AT_ONCE and {*first} != {*second} and 0 not in {*first, *second}


def _rendezvous(rank: int, fault: str) -> str:
    """Meet at a first call to which rank 1 comes late, dies, or has a worker of its DataLoader killed."""
    import os
    import time

    from torch.utils.data._utils import signal_handling

    from autopar.errors import AutoparError
    from autopar.processes import agree, watch
    from autopar.processes.meeting import Meeting

    os.environ["AUTOPAR_TIMEOUT_S"] = "0.1"
    watch.start()
    if rank == 1 and fault == "late":
        time.sleep(1.5)
    if rank == 1 and fault == "killed worker":  # where torch's handler of signals finds the rank
        code = compile("def handler():\n    raise RuntimeError('DataLoader worker is killed')",
                       signal_handling.__file__, "exec")  # fmt: skip
        exec(code, scope := {})
        Meeting.is_complete = lambda *args: scope["handler"]()
    try:
        agree.rendezvous("module", 0, "x (4, 8)")
    except AutoparError as error:
        return f"{type(error).__name__}: {error}"
    except RuntimeError as error:
        watch.fail(error)  # as the end of a program does
        return f"RuntimeError: {error}"
    return "met"


@pytest.mark.gloo
@pytest.mark.parametrize(("fault", "first", "second"), [
    ("late", "CollectiveTimeout: rank 1 did not arrive in time at a call with x (4, 8) for the first time: rank 1 is "
     "at test_peers.py", "CollectiveTimeout: rank 1 did not arrive in time"),
    ("killed worker", "RankFailure: rank 1 failed in step 0 with RuntimeError: DataLoader worker is killed",
     "RuntimeError: DataLoader worker is killed"),
])  # fmt: skip
def test_a_first_call_to_which_a_rank_does_not_come(fault, first, second):
    """A slow one may take ten times AUTOPAR_TIMEOUT_S, as a compile may."""
    results = gloo.run(2, _rendezvous, fault, seconds=30)
    assert results[0].startswith(first) and results[1].startswith(second), results


def _leaves_early(rank: int) -> str:
    """Start to watch, but on rank 1, which leaves where nobody can be asked why."""
    from autopar.errors import CollectiveTimeout
    from autopar.processes import process_groups, watch

    process_groups.control_group()
    if rank == 1:
        process_groups.release()
        return ""
    with pytest.raises(CollectiveTimeout) as caught:
        watch.start()
    return str(caught.value)


@pytest.mark.gloo
def test_a_rank_that_leaves_before_it_can_be_asked():
    """It alone is named, also by those that others leave in turn, and by those whose neighbours are all there."""
    first, _, *others = gloo.run(5, _leaves_early, seconds=40)
    for said in (first, *others):
        assert "rank 1 did not come to the exchange of addresses any more" in said, said


def _gathers_alone(rank: int) -> str:
    import os
    import time

    import torch
    from torch.distributed.device_mesh import init_device_mesh

    from autopar.errors import CollectiveTimeout
    from autopar.ir.layout import Layout
    from autopar.ir.mesh import Mesh
    from autopar.processes import watch
    from autopar.processes.stage_mesh import StageMesh
    from autopar.storage.gather import Held, gather_to
    from autopar.storage.tensor_file import Form

    os.environ["AUTOPAR_TIMEOUT_S"] = "0.1"
    watch.start()
    stage = StageMesh.alone(Mesh.parse("dp=2"), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    if rank == 1:
        time.sleep(1.5)
        return ""
    held = Held(Form((4,), torch.float32), Layout((("dp",),)), lambda: torch.ones(2))
    try:
        gather_to(0, held, stage)
    except CollectiveTimeout as error:
        return str(error)
    return "gathered"


@pytest.mark.gloo
def test_saving_waits_as_long_as_autopar_does():
    """The process group that the user made waits for a minute."""
    said, _ = gloo.run(2, _gathers_alone, seconds=30)
    assert "rank 1 did not arrive in time at a tensor gathered from its parts: rank 1 is at test_peers.py" in said
