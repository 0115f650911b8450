"""An exchange of experts' rows that travels while a device computes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Beside:
    """Ops that run while an exchange of experts' rows, that of `vertex`, is on its way (see beside_exchange.py): `ops`
    in order, the `products` among them; none where only another micro-batch runs beside it (see side_by_side.py). One
    of its `copies` takes `seconds` of the `stream` of its links. `recomputed`: it is that of a recomputed block."""

    vertex: int
    phase: str
    seconds: float
    stream: int
    ops: tuple[int, ...]
    products: tuple[int, ...]
    copies: int
    recomputed: bool = False
