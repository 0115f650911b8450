"""Profiles of GPUs that no profile names are near what their makers say of them."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from autopar.errors import HardwareError
from autopar.hardware import profile as hardware
from autopar.ir.mesh import Mesh

# name, capability, multiprocessors, GHz, memory's GHz, its bus in bits, GB; TFLOP/s in bf16 and fp32, GB/s as published
CARDS = [
    ("Tesla T4", (7, 5), 40, 1.59, 5.0, 256, 16, 8.1, 8.1, 320),
    ("NVIDIA A30", (8, 0), 56, 1.44, 1.215, 3072, 24, 165, 10.3, 933),
    ("NVIDIA A10", (8, 6), 72, 1.695, 6.25, 384, 24, 125, 31.2, 600),
    ("NVIDIA A40", (8, 6), 84, 1.74, 7.25, 384, 48, 150, 37.4, 696),
    ("NVIDIA GeForce RTX 3090", (8, 6), 82, 1.695, 9.75, 384, 24, 71, 35.6, 936),
    ("NVIDIA L4", (8, 9), 58, 2.04, 6.25, 192, 24, 121, 30.3, 300),
    ("NVIDIA GeForce RTX 5090", (12, 0), 170, 2.41, 14.0, 512, 32, 210, 104.8, 1792),
    ("NVIDIA GB200", (10, 0), 152, 1.86, 3.996, 8192, 186, 2310, 75, 8000),
]


def properties(name, capability, processors, ghz, memory_ghz, bits, gb, *_):
    return SimpleNamespace(
        name=name,
        major=capability[0],
        minor=capability[1],
        multi_processor_count=processors,
        clock_rate=round(ghz * 1e6),
        memory_clock_rate=round(memory_ghz * 1e6),
        memory_bus_width=bits,
        total_memory=gb * 10**9,
    )


@pytest.fixture
def here(monkeypatch):
    """Put a card into this machine."""

    def put(card) -> None:
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: card)

    return put


@pytest.mark.parametrize("card", CARDS, ids=lambda card: card[0])
def test_speeds_are_those_of_the_datasheet(card, here):
    here(properties(*card))
    with pytest.warns(UserWarning, match=f"no hardware profile for '{card[0]}'.*autopar calibrate"):
        made = hardware.load(card[0])
    *_, gb, bf16, fp32, gb_per_second = card
    assert made.flops_per_second["bf16"] == pytest.approx(bf16 * 1e12, rel=0.06)
    assert made.flops_per_second["fp32"] == pytest.approx(fp32 * 1e12, rel=0.06)
    assert made.memory_bytes_per_second == pytest.approx(gb_per_second * 1e9, rel=0.03)
    assert 0.9 * gb * 1e9 < made.memory_bytes < gb * 1e9
    assert made.is_gpu and made.kernels.multiprocessors == card[2]
    assert made.links_for(Mesh.parse("dp=4"))["dp"].bytes_per_second > 0


def test_a_slice_of_a_card_has_its_share(here):
    """A MIG slice says how many multiprocessors and bytes it has."""
    card = properties("NVIDIA A100-SXM4-80GB MIG 3g.40gb", (8, 0), 42, 1.41, 1.593, 5120, 40)
    here(card)
    with pytest.warns(UserWarning, match="42 multiprocessors"):
        made = hardware.load(card.name)
    assert made.flops_per_second["bf16"] == pytest.approx(312e12 * 42 / 108, rel=0.01)
    assert made.memory_bytes < 40e9


def test_clocks_that_nobody_tells_are_the_nearest_profiles(here):
    card = properties("NVIDIA A40", (8, 6), 84, 0, 0, 0, 48)
    here(card)
    with pytest.warns(UserWarning):
        made, base = hardware.load(card.name), hardware.load("l40s")
    share = 84 / base.kernels.multiprocessors
    assert made.flops_per_second["fp32"] == pytest.approx(share * base.flops_per_second["fp32"])
    assert made.memory_bytes_per_second == pytest.approx(share * base.memory_bytes_per_second)


def test_a_card_of_the_future_is_as_the_newest(here):
    card = properties("NVIDIA Z100", (99, 0), 200, 2.0, 4.0, 8192, 300)
    here(card)
    with pytest.warns(UserWarning, match="links as of l40s|links as of b200"):
        assert hardware.load(card.name).flops_per_second["bf16"] > 0


def test_a_card_that_is_not_here_is_refused(here):
    here(properties(*CARDS[0]))
    with pytest.raises(HardwareError, match="no hardware profile for 'NVIDIA A30'"):
        hardware.load("NVIDIA A30")
