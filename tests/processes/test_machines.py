"""Tests of which ranks share a machine, and of profiles of links that say otherwise."""

from __future__ import annotations

import socket

import pytest

from autopar.hardware.profile import load
from autopar.processes.machines import Machine, fitted_to_machines, numbered, on_machines, own_address
from tests.helpers.two_tiers import two_tiers


def test_processes_of_one_machine_say_the_same():
    assert numbered([Machine.of_this_process()] * 3) == (0, 0, 0)


def test_machines_with_one_name_or_one_boot_differ_by_network_or_address():
    boots = [("a", "1"), ("a", "1"), ("a", "2"), ("a", "1")]
    addresses = ["10.0.0.1", "10.0.0.1", "10.0.0.1", "10.0.0.2"]
    assert numbered([Machine(*pair) for pair in zip(boots, addresses)]) == (0, 0, 1, 2)


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
