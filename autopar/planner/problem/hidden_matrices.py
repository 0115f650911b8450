"""Find the parameters that Muon updates: the matrices of hidden layers.

Those are matrices that train and multiply what flows forward, but the last of a way through the model, the head, behind
which no other matrix multiplies. Tables of embeddings and vectors are no such matrices; AdamW updates all of them, as
Jordan ("Muon: An optimizer for hidden layers in neural networks", 2024) and torch.optim.Muon say.
"""

from __future__ import annotations

import torch
from torch import fx

from ...ir.graph import op_base_name

PRODUCTS = frozenset(("linear", "fp8_linear", "mm", "matmul", "addmm", "bmm"))


def hidden_matrices(graph: fx.Graph) -> frozenset[fx.Node]:
    """Return the placeholders of a joint graph that are matrices of hidden layers."""
    matrices = {n for n in graph.nodes if n.op == "placeholder" and _is_matrix(n)}
    forward = [n for n in graph.nodes if n.op == "call_function" and n.meta["phase"] == "forward"]
    source = {n: n for n in matrices}  # of what is a matrix in another type or form, or its codes and their scale
    readers: dict[fx.Node, set[fx.Node]] = {n: set() for n in matrices}
    for node in forward:
        read = [source[n] for n in node.all_input_nodes if n in source]
        if len(read) == len(node.all_input_nodes) and len(set(read)) == 1 and op_base_name(node) not in PRODUCTS:
            source[node] = read[0]
        for matrix in read if node not in source else ():
            readers[matrix].add(node)
    products = {n for some in readers.values() for n in some if op_base_name(n) in PRODUCTS}
    before: set[fx.Node] = set()  # what another matrix multiplies, or what comes of it
    for node in reversed(forward):
        if any(user in products or user in before for user in node.users):
            before.add(node)
    return frozenset(n for n, some in readers.items() if some and some <= products and some & before)


def _is_matrix(node: fx.Node) -> bool:
    role, value = node.meta["role"], node.meta["val"]
    is_trained = role.kind == "parameter" and role.trainable
    return is_trained and isinstance(value, torch.Tensor) and value.dim() == 2
