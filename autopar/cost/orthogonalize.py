"""Price what Muon's update of a matrix takes beside going through memory: collectives and products.

A device that has a part of a matrix gathers all of its update, in bfloat16, and takes five steps of Newton-Schulz
iteration with the whole, whoever else does the same. A matrix of m rows and k columns, m the fewer, takes in each step
products of (m, k) by (k, m), (m, m) by (m, m) and (m, m) by (m, k): Jordan, "Muon: An optimizer for hidden layers in
neural networks", 2024, and torch.optim.Muon. Parts that are orthogonalized alone take less than this.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..ir.layout import Layout
from .product_seconds import ProductSeconds
from .redistribute import Redistribution
from .transfer_prices import TransferPrices

STEPS = 5
ELEMENT_BYTES = 2  # of bfloat16


@dataclass(frozen=True)
class OrthogonalizeCost:
    """Seconds of updates by Muon. A step has `micro_batches`."""

    prices: TransferPrices
    products: ProductSeconds
    micro_batches: int = 1

    def gather(self, layout: Layout) -> Redistribution:
        """Return the collectives that gather an update from a parameter's layout."""
        found = self.prices.redistribute(layout, Layout.replicated(len(layout.dims)))
        assert found is not None  # a parameter is not partial
        return found

    def gather_seconds(self, elements: int, layout: Layout) -> float:
        """Return the seconds of a step to gather so many elements in all."""
        return self.prices.at_once.pair(layout, Layout.replicated(len(layout.dims)), float(ELEMENT_BYTES * elements))

    def product_seconds(self, shape: Sequence[int]) -> float:
        """Return the seconds of a step for the products, which are the same on every device."""
        m, k = sorted(shape)
        peak = self.products.hardware.peak_flops_per_second("bf16")
        one = ((1, m, m, k), (1, m, m, m), (1, m, k, m))
        return STEPS * sum(self.products(product, peak, ELEMENT_BYTES) for product in one)

    def pass_seconds(self, shape: Sequence[int], layout: Layout) -> float:
        """Return a pass's part of both."""
        m, k = shape
        return (self.gather_seconds(m * k, layout) + self.product_seconds(shape)) / self.micro_batches
