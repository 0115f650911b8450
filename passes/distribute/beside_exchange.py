"""Products beside exchanges of experts' rows: what neither makes the rows nor reads them is computed while they travel.

A shared expert reads the tokens that others are sent, gradients of weights wait for nobody. The plan says which
products are beside which exchange (autopar/planner/objective/beside_exchange.py). Those that come before it in the
graph are moved behind its start, together with what reads them that early; those that come after it before its wait,
together with what they are made from. The host knows how many rows there are before the exchange starts, so nothing
that it launches meanwhile has to wait for that. Collectives move with the ops that they belong to, on all ranks alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import fx

from ...errors import VerifyError
from ...ir.graph import describe
from ...plans.sharding import BesideExchange
from .bucket import made_after
from .exchange_rows import started_by
from .overlap import wait_of


def beside_exchange(local: fx.GraphModule, exchanges: Iterable[BesideExchange]) -> fx.GraphModule:
    """Move ops of a local joint graph in place. Run it before collectives are packed. Raise VerifyError for an
    exchange that is in the graph without its products, or where these make the rows or read them."""
    nodes = {node.name: node for node in local.graph.nodes}
    for one in exchanges:
        start = nodes.get(started_by(one.exchange))
        if start is None:  # it is in another stage, or graph, of the step
            continue
        if not nodes.keys() >= {*one.products}:
            raise VerifyError(f"{start.name} has not all of {', '.join(one.products)} beside it", node=describe(start))
        _move(start, [nodes[name] for name in one.products])
    local.graph.lint()
    local.recompile()
    return local


def _move(start: fx.Node, products: Sequence[fx.Node]) -> None:
    """Move products between the start of an exchange and its wait."""
    wait = wait_of(start)
    earlier = _read_before(start, products)
    later = made_after(start, products)
    if start in earlier or wait in later:
        names = ", ".join(node.name for node in products)
        raise VerifyError(f"{start.name} is not independent of {names}", node=describe(start))
    for node in (*earlier, *later):
        wait.prepend(node)


def _read_before(anchor: fx.Node, values: Iterable[fx.Node]) -> list[fx.Node]:
    """Return those of these values that stand before `anchor`, and what is computed from them up to there, in order."""
    order = {node: i for i, node in enumerate(anchor.graph.nodes)}
    found, left = set(), [node for node in values if order[node] < order[anchor]]
    while left:
        node = left.pop()
        if order[node] <= order[anchor] and node not in found:
            found.add(node)
            left += node.users
    return sorted(found, key=order.__getitem__)
