"""Say which ops draw numbers by counter (counter_rng.py), and where their arguments have the number of their stream.

Behind it come the global index of the first number, the steps of the index along each dim, and, in the graph of one
micro-batch, the step from one to the next. An attention draws if it has them.
"""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import fx

from . import ATTENTION, attention, counter_rng  # noqa: F401  (for their ops, which they register)

_autopar = torch.ops.autopar
STREAM = {
    _autopar.dropout.default: 3,
    _autopar.uniform.default: 2,
    _autopar.normal.default: 2,
    _autopar.attention.default: 16,
    _autopar.attention_bw.default: 18,
    _autopar.attention_bias_bw.default: 18,
}  # its position in the arguments


def stream_of(node) -> int | None:
    """Return the stream number of a graph's node, None if it does not draw."""
    if node.op != "call_function" or node.target not in STREAM:
        return None
    position = STREAM[cast(Any, node.target)]
    if node.target in ATTENTION and _argument(node, position - 2, "state") is None:
        return None
    return cast(int | None, _argument(node, position, "stream"))


def _argument(node: fx.Node, position: int, name: str) -> Any:
    return node.args[position] if len(node.args) > position else node.kwargs.get(name)
