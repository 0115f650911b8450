"""Tell what the busiest device of each mixture of experts really got, beside what a plan assumed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..utils.format import table


@dataclass(frozen=True)
class LayerBalance:
    """Rows of one layer over its `forwards`: the mean over its devices, and those of the device with most, each forward
    for itself."""

    layer: str
    forwards: int
    mean_rows: float
    busiest_rows: int

    @property
    def load(self) -> float:
        """Return the rows of the busiest device over the mean of all, 1.0 of no rows."""
        return self.busiest_rows / self.mean_rows if self.mean_rows else 1.0


@dataclass(frozen=True)
class ExpertBalance:
    """The layers of a model whose rows were sent to their experts, in order; `assumed`: the load that the plan is made
    for (`expert_load`)."""

    assumed: float
    layers: tuple[LayerBalance, ...]

    @property
    def load(self) -> float:
        """Return the rows that the others wait for over the mean rows, of all layers."""
        mean = sum(one.mean_rows for one in self.layers)
        return sum(one.busiest_rows for one in self.layers) / mean if mean else 1.0

    def __str__(self) -> str:
        rows = [
            [one.layer, f"{one.forwards:,}", f"{one.mean_rows:,.1f}", f"{one.busiest_rows:,}", f"{one.load:.2f}"]
            for one in self.layers
        ]
        head = f"experts: the busiest device got {self.load:.2f} times the mean of the rows, {self.assumed:.2f} assumed"
        return "\n".join([head, *table(["layer", "forwards", "mean rows", "busiest", "load"], rows)])


def balance_of(rows: Sequence[Mapping[str, Sequence[int]]], assumed: float) -> ExpertBalance:
    """Return the balance of the rows that each device got: by layer, those of each forward. A layer is compared over
    the devices that have it, as are those of its stage."""
    layers = []
    for layer in dict.fromkeys(name for mine in rows for name in mine):
        counts = [mine[layer] for mine in rows if layer in mine]
        forwards = list(zip(*counts))
        total = sum(map(sum, forwards))
        layers.append(LayerBalance(layer, len(forwards), total / len(counts), sum(map(max, forwards))))
    return ExpertBalance(assumed, tuple(layers))
