"""Tests of which ranks share a machine, and of profiles of links that say otherwise."""

from __future__ import annotations

import os
import socket

import pytest

import autopar
from autopar.hardware.profile import load
from autopar.processes.machines import (
    Machine,
    cores_per_rank,
    fitted_to_machines,
    numbered,
    on_machines,
    own_address,
    own_cores,
)
from tests.helpers import gloo
from tests.helpers.two_tiers import two_tiers
from tests.runtime import tiny


def test_processes_of_one_machine_say_the_same():
    assert numbered([Machine.of_this_process()] * 3) == (0, 0, 0)


def test_machines_with_one_name_or_one_boot_differ_by_network_or_address():
    boots = [("a", "1"), ("a", "1"), ("a", "2"), ("a", "1")]
    addresses = ["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2"]
    assert numbered([Machine(*pair) for pair in zip(boots, addresses)]) == (0, 0, 1, 2)


@pytest.mark.parametrize(
    "ranks, expected",
    [
        ([("a", "1", 0b11)] * 2, 1.0),
        ([("a", "1", 0b11)] * 4, 0.5),
        ([("a", "1", 1 << core) for core in range(4)], 1.0),  # each is bound to a core of its own
        ([("a", "1", 0b11)] * 2 + [("a", "2", 0b11)] * 2, 0.5),  # two containers of one boot
        ([("a", "1", 0b1111)] * 2 + [("b", "1", 0b11)] * 3, 2 / 3),  # the machine that has fewest says how fast all are
    ],
)
def test_cores_are_shared_by_the_ranks_of_a_boot(ranks, expected):
    machines = [Machine((boot, network), "10.0.0.1", cores) for boot, network, cores in ranks]
    assert cores_per_rank(machines) == pytest.approx(expected)


def test_a_process_knows_its_cores():
    assert own_cores().bit_count() == len(os.sched_getaffinity(0))


def _compiled_on_one_core(rank: int) -> tuple[str, float]:
    from torch.distributed.device_mesh import init_device_mesh

    import autopar

    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    model, inputs = tiny.own("gpt:hidden=32,layers=1,heads=2,vocab=64,seq=12", batch=4)
    plan = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), inputs, strategy="ddp").plan
    return plan.hardware, plan.step_seconds


@pytest.mark.gloo
def test_two_ranks_on_one_core_are_priced_so():
    model, inputs = tiny.own("gpt:hidden=32,layers=1,heads=2,vocab=64,seq=12", batch=4)
    alone = autopar.plan(model, "dp=2", inputs, hardware="cpu-gloo", precision="fp32", strategy="ddp", baselines=False)
    for hardware, step_seconds in gloo.run(2, _compiled_on_one_core):
        assert hardware == "cpu-gloo at 0.5 cores a process"
        assert step_seconds == pytest.approx(2 * alone.step_seconds, rel=1e-9)


def test_the_address_is_that_on_the_way_to_the_master(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    assert own_address() == "127.0.0.1"
    monkeypatch.delenv("MASTER_ADDR")
    assert own_address() == socket.gethostname()


def test_a_node_of_four_is_not_priced_as_one_of_eight():
    h100 = load("h100")
    fitting, said = on_machines(h100, [0] * 4 + [1] * 4)
    assert fitting.links[0].devices == 4 and fitting.links[1:] == h100.links[1:]
    assert fitting.tier_index(4) == 0 and fitting.tier_index(8) == 1
    assert "joins 8 devices by NVLink 4, but a machine has 4 ranks" in said


@pytest.mark.parametrize(
    "hardware, numbers",
    [("h100", [0] * 8), ("h100", [0] * 8 + [1] * 8), ("h200-nvl", [0] * 8 + [1] * 8), ("cpu-gloo", [0, 0])],
)
def test_what_fits_is_left_alone(hardware, numbers):
    assert on_machines(load(hardware), numbers) == (load(hardware), "")


def test_one_kind_of_links_over_two_machines_is_told():
    with pytest.warns(UserWarning, match=r"one kind of links, gloo, but ranks are on 2 machines.*autopar calibrate"):
        assert fitted_to_machines(load("cpu-gloo"), [0, 0, 1, 1]) == load("cpu-gloo")


@pytest.mark.parametrize("numbers", [[0, 1, 0, 1], [0, 0, 0, 1]])
def test_ranks_out_of_order_are_told(numbers):
    hardware, said = on_machines(two_tiers(2), numbers)
    assert hardware == two_tiers(2) and "not equally many in a row" in said
