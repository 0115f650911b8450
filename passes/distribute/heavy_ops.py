"""Name the ops that take a device long enough for a collective to travel meanwhile: products, attention,
convolutions."""

from __future__ import annotations

import re

from torch import fx

from ..._torch import op_name

HEAVY = re.compile(r"_?(fp8_)?(linear|mm|addmm|bmm|baddbmm|matmul|grouped_mm|convolution)(_\w+)?|\w*attention\w*")


def is_product(node: fx.Node) -> bool:
    """Return whether a node is a heavy op that all ranks have: around a ring some leave out blocks of attention, and
    where collectives stand must not depend on that."""
    return is_heavy(node) and "attention" not in op_name(node.target)


def is_heavy(node: fx.Node) -> bool:
    """Return whether a node is such an op, in canonical form or lowered."""
    return node.op == "call_function" and HEAVY.fullmatch(op_name(node.target)) is not None
