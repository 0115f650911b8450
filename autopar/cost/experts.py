"""Seconds of the products of one device's experts, in a table of measured operators.

Gate and up are one grouped product, down another; `ep` devices have a share of the experts each, all of the
`intermediate` width or a tp-th of it. Between and after them rows of all tokens, also those of other devices, pass
through memory. Routed evenly every expert gets as many tokens. By a power law of exponent a loads are distributed as
x^-a between 1 and 0.8 tokens, and what was measured is the device with the heaviest expert: that one, which no token
has twice, and its share of the others.
"""

from __future__ import annotations

import numpy as np

from ..hardware.profile import Experts, Hardware
from .product_seconds import product_seconds

Columns = dict[str, np.ndarray]
QUANTILES = (np.arange(512) + 0.5) / 512
HEAVIEST = 0.8  # of the tokens: the end of the power law


def experts_seconds(
    hardware: Hardware, columns: Columns, peak_flops_per_second: float, element_bytes: int
) -> np.ndarray:
    """Return the seconds of rows with the columns of the table."""
    tokens, hidden, topk, experts, ep = (columns[name] for name in ("tokens", "hidden", "topk", "experts", "ep"))
    width, here = columns["intermediate"] / columns["tp"], np.maximum(1.0, experts / ep)
    rows = np.minimum(tokens * topk / ep * imbalance(columns), tokens * np.minimum(topk, here))
    busy = np.minimum(here, rows)

    def seconds(columns: np.ndarray, depth: np.ndarray) -> np.ndarray:
        products = np.stack([busy, rows / busy, columns, depth], axis=1)
        return product_seconds(hardware, products, peak_flops_per_second, element_bytes, "grouped")

    constants = hardware.experts or Experts()
    passed = tokens * topk * (constants.hidden_passes * hidden + constants.width_passes * width) * element_bytes
    through_memory = passed / hardware.reached_memory_bytes_per_second
    return constants.start_seconds + seconds(2 * width, hidden) + seconds(hidden, width) + through_memory


def imbalance(columns: Columns) -> np.ndarray:
    """Return the rows of the device with the heaviest expert over those of a device on average."""
    tokens, topk, experts, ep = (columns[name] for name in ("tokens", "topk", "experts", "ep"))
    exponents = np.array([power_law(text) for text in columns["distribution"]])
    curve = 1.0 - np.where(exponents == 1.0, 1.0 + 1e-6, exponents)  # of the integral
    most = np.maximum(HEAVIEST * tokens, 2.0) ** curve

    def load(quantile):
        return (1.0 - quantile * (1.0 - most)) ** (1.0 / curve)

    share = np.minimum(load(1.0 - 0.5 / experts) / (load(QUANTILES[:, None]).mean(0) * experts), 1.0 / topk)
    others = (np.maximum(1.0, experts / ep) - 1.0) / np.maximum(1.0, experts - 1.0)  # that are on the same device
    return np.where(exponents > 0, ep * (share + (1.0 - share) * others), 1.0)


def power_law(distribution: str) -> float:
    """Return the exponent of "power_law_1.2", 0 if it is "balanced". Raise ValueError for another text."""
    if distribution == "balanced":
        return 0.0
    name, _, exponent = distribution.rpartition("_")
    if name != "power_law" or not 0 < float(exponent) < 10:
        raise ValueError(f"{distribution} is no distribution")
    return float(exponent)
