"""Profiles of nodes of CPU processes with a slow network between them."""

from __future__ import annotations

from dataclasses import replace

from autopar.hardware.profile import Hardware, Tier, load


def two_tiers(devices_a_node: int = 2) -> Hardware:
    """Return nodes of so many processes, joined by gloo: 0.45 GB/s inside, 1.25 MB/s for each process between."""
    inside = Tier("node", devices_a_node, 1e-3, 0.45e9, 2**20)
    return replace(load("cpu-gloo"), links=(inside, Tier("network", None, 3e-3, 1.25e6, 2**20)))
