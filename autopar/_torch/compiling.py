"""torch.compile: what it is given so that it keeps the order of a graph, and what it raises.

Inductor fuses what is before a product with what is behind it, and then runs whatever the two read before them: waits
come before the products that hid them, and gathers start behind. So products wait, without reading it, for what was
started since the product before, and each wait for the product before it. Collectives keep their order by themselves.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from . import inductor


def in_given_order(options: Mapping[str, Any], is_product: Callable[[fx.Node], bool]) -> dict[str, Any]:
    """Return arguments of torch.compile with which Inductor does not reorder the ops of a graph to save memory, and
    leaves products between the start and the wait of a collective, unless it is told to by these."""
    from torch._inductor import list_mode_options

    given = {name: value for name, value in options.items() if value is not None or name == "dynamic"}
    mode, chosen = given.get("mode"), given.get("options")
    if given.get("backend", "inductor") != "inductor" or (mode and chosen):
        return given  # what torch does not take, it refuses itself
    of_mode = list_mode_options(given.pop("mode"), given.get("dynamic")) if mode else {}
    ordered: dict[str, object] = {"reorder_for_peak_memory": False, "reorder_for_locality": False}
    # a torch that has no such dependencies moves some collectives
    with contextlib.suppress(ImportError):
        ordered["post_grad_custom_post_pass"] = _ordered_pass(is_product)
    return {**given, "options": {**ordered, **of_mode, **(chosen or {})}}


def _ordered_pass(is_product: Callable[[fx.Node], bool]) -> object:
    """Return the pass of Inductor that keeps products between starts and waits, one that its cache can name. Raises
    ImportError."""
    from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files
    from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
    from torch.utils._ordered_set import OrderedSet

    class InOrder(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            behind = dependencies(graph, is_product)
            preserve_node_ordering(graph, {node: OrderedSet(others) for node, others in behind.items()})

        def uuid(self) -> object:
            return get_hash_for_files((__file__, inductor.__file__, inspect.getfile(is_product)))

    return InOrder()


def dependencies(graph: fx.Graph, is_product: Callable[[fx.Node], bool]) -> dict[fx.Node, list[fx.Node]]:
    """Return the products of a graph with collectives, and the waits, with what has to come before each without being
    read."""
    functional = torch.ops._c10d_functional
    found: dict[fx.Node, list[fx.Node]] = {}
    before: fx.Node | None = None
    started: list[fx.Node] = []
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        if node.target is functional.wait_tensor.default:
            if before is not None:
                found[node] = [before]
        elif getattr(node.target, "namespace", "") == functional.name or _is_waited_for(node):
            started.append(node)
        elif is_product(node) and isinstance(node.meta.get("val"), torch.Tensor):
            others = started if before is None else [*started, before]
            if others:
                found[node] = others
            before, started = node, []
    return found


def _is_waited_for(node: fx.Node) -> bool:
    """Return whether a node starts a collective, of whatever library."""
    return any(user.target is torch.ops._c10d_functional.wait_tensor.default for user in node.users)


def compiler_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch.compile raises of a graph that it cannot compile."""
    from torch._dynamo.exc import TorchDynamoException

    return (TorchDynamoException,)
