"""The load that is assumed of the busiest device, with and without copies of hot experts."""

from __future__ import annotations

import math

import numpy as np
import pytest

from autopar.cost.skew import Skew, zipf


@pytest.mark.parametrize("load", [1.0, 1.5, 3.0, 1e9])
@pytest.mark.parametrize("devices", [2, 8])
def test_without_copies_it_is_what_was_said(load, devices):
    assert Skew(load).at(devices) == Skew(load).sent_at(devices) == min(load, devices)
    assert Skew(load).staying(devices) == 0.0
    assert Skew(math.inf).at(devices) == devices


@pytest.mark.parametrize(("experts", "devices"), [(8, 8), (16, 4), (128, 8), (256, 64)])
@pytest.mark.parametrize("load", [1.2, 2.0, 4.0])
def test_shares_of_a_load_have_that_load(experts, devices, load):
    """Shares follow Zipf's law, on a device that has the first expert and average others."""
    load = min(load, devices)
    shares = zipf(experts, devices, load)
    assert shares.sum() == pytest.approx(1.0) and all(np.diff(shares) <= 0)
    others = (experts / devices - 1) / (experts - 1)
    assert devices * (shares[0] + (1 - shares[0]) * others) == pytest.approx(load, rel=1e-6)
    ratio = np.log(shares[0] / shares[1]) / np.log(2)
    assert np.allclose(np.log(shares[0] / shares), ratio * np.log(np.arange(1, experts + 1)), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("load", [1.5, 3.0])
def test_copies_lessen_a_load(load):
    found = [Skew(load, hot=hot, experts=128).at(8) for hot in (0, 1, 2, 4, 8)]
    assert found[0] == load and found == sorted(found, reverse=True) and found[-1] < 1.2
    assert Skew(load, hot=200, experts=128).at(8) == pytest.approx(1.0)


def test_copies_do_not_help_where_rows_are_even():
    """A device without hot experts has its own rows of these beside all of its experts'."""
    assert Skew(1.0, hot=1, experts=8).at(8) == pytest.approx(1 + 1 / 8)
    assert Skew(1.0, hot=8, experts=8).at(8) == pytest.approx(1.0)


def test_shares_expert_by_expert():
    """Devices have experts 0 and 1, and 2 and 3."""
    shares = (5.0, 1.0, 1.0, 3.0)
    assert Skew(shares=shares, experts=4).at(2) == pytest.approx(2 * 6 / 10)
    one = Skew(shares=shares, experts=4, hot=1)
    assert one.at(2) == pytest.approx(0.5 + 2 * 4 / 10) and one.sent_at(2) == pytest.approx(2 * 4 / 10)
    assert Skew(shares=shares, experts=4, hot=2).staying(2) == pytest.approx(0.8)
    assert not one.is_even and Skew().is_even and not Skew(1.5).is_even


@pytest.mark.parametrize(("experts", "devices", "hot"), [(8, 8, 1), (8, 4, 3), (6, 2, 2), (4, 2, 4)])
def test_the_worst_that_can_be_with_copies(experts, devices, hot):
    """Tried: rows of one device's cold experts and of the hot ones, so that none of the former has more than one of
    the latter, with all rows of that device hot or as many as of others."""
    here, most = experts // devices, 0.0
    for cold in np.linspace(0.0, devices, 4001):  # rows of the cold experts of one device, in those of a device
        if hot >= experts and cold or cold / here > (devices - cold) / hot + 1e-9:
            continue
        own = min(1.0, devices - cold)  # hot rows of the device itself
        most = max(most, cold + own)
    assert Skew(hot=hot, experts=experts).worst.at(devices) == pytest.approx(most, abs=2e-3)
