"""Hold what the tests of the lowering share: random layouts, a joint graph of one tensor, and whole steps on the
simulator."""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar._torch import fake_mode
from autopar.codegen.verify_graph import check_global, check_local, check_ranks, check_sharding
from autopar.cost.redistribute import Link
from autopar.frontend.export import differentiate, export
from autopar.ir.graph import OutputRole, Role, is_op, output_node, tensor_arguments, values_of
from autopar.ir.layout import ZIGZAG, Layout, is_legal, local_part
from autopar.ir.mesh import Mesh
from autopar.passes.distribute.localize import localize
from autopar.passes.distribute.lower_ops import lower_ops
from autopar.passes.distribute.partition import Parts, partition
from autopar.plans.sharding import NodeSharding, Sharding
from autopar.simulate.collectives import Simulator, assemble


def links(mesh: Mesh, seed: int = 0) -> dict[str, Link]:
    """Links of different speeds, so that different orders of moves are cheapest."""
    rng = random.Random(seed)
    return {axis: Link(rng.choice([0.0, 1e-5, 1e-3]), rng.choice([1e9, 1e10, 1e11])) for axis in mesh.names}


def random_layout(rng: random.Random, shape, mesh: Mesh, reduction: str | None = None) -> Layout:
    """A legal layout; `reduction` is what its partial axes use, None for no partial axis."""
    while True:
        dims, partial = [[] for _ in shape], []
        for axis in rng.sample(mesh.names, len(mesh.names)):
            choice = rng.randrange(-1 if reduction is None else -2, len(shape))
            if choice >= 0:
                dims[choice].append(axis)
            elif choice == -2:
                partial.append((axis, reduction))
        parts = tuple(rng.choice([1, 1, 2, 3]) if len(axes) == 1 else 1 for axes in dims)
        parts = tuple(ZIGZAG if rng.random() < 0.2 else count for count in parts)
        layout = Layout(tuple(map(tuple, dims)), tuple(sorted(partial)), parts)
        if is_legal(shape, layout, mesh):
            return layout


def identity_joint(shape, dtype=torch.float64) -> fx.GraphModule:
    """A joint graph that returns its one input, "x"."""
    graph = fx.Graph()
    x = graph.placeholder("x")
    with fake_mode():
        x.meta = {"val": torch.empty(shape, dtype=dtype), "role": Role("input", "x"), "phase": "forward"}
    graph.output((x,)).meta["roles"] = [OutputRole("output", "0")]
    return fx.GraphModule(torch.nn.Module(), graph)


def redistribution(
    shape, source: Layout, target: Layout, mesh: Mesh, seed: int = 0, dtype: torch.dtype = torch.float64
) -> tuple[fx.GraphModule, Sharding]:
    """A joint graph of one tensor that arrives as `source` and leaves as `target`."""
    sharding = Sharding(mesh, links(mesh, seed), 1e11, nodes={}, leaves={"x": source}, outputs=(target,))
    return identity_joint(shape, dtype), sharding


def partial_values(shape, layout: Layout, mesh: Mesh, generator: torch.Generator):
    """(value(coordinate, kept axes), blocks): addends that differ along partial axes, and each rank's block of its
    own."""
    axes = [axis for axis, _ in layout.partial]
    positions = list(itertools.product(*(range(mesh.size(a)) for a in axes)))
    addends = {p: torch.randn(tuple(shape), generator=generator, dtype=torch.float64) for p in positions}

    def value(coordinate, still_partial=()):
        """The addends of all devices that differ from `coordinate` along the axes that are no longer partial,
        combined."""
        chosen = [
            v for p, v in addends.items()
            if all(p[i] == coordinate[a] for i, a in enumerate(axes) if a in still_partial)
        ]  # fmt: skip
        stack = torch.stack(chosen)
        return stack.amax(0) if ("max" in {r for _, r in layout.partial}) else stack.sum(0)

    coordinates = [mesh.coordinate(rank) for rank in range(mesh.devices)]
    blocks = [local_part(addends[tuple(c[a] for a in axes)], layout, mesh, c) for c in coordinates]
    return value, blocks


def local_graphs(joint: fx.GraphModule, sharding: Sharding, reduce_scatter: str = "native") -> list[fx.GraphModule]:
    """Every rank's graph, verified."""
    check_global(joint)
    check_sharding(joint, sharding)
    graphs = [localize(joint, sharding, rank, reduce_scatter) for rank in range(sharding.mesh.devices)]
    for graph in graphs:
        check_local(graph, sharding.mesh)
    check_ranks(graphs)
    return graphs


def run_step(joint: fx.GraphModule, sharding: Sharding, values: dict, reduce_scatter: str = "native"):
    """(global outputs, global gradients by parameter, local graphs, simulator) of one step on the simulator.

    `values`: global tensors by placeholder name, tangents included."""
    graphs = local_graphs(joint, sharding, reduce_scatter)
    inputs, tangents = zip(*(local_inputs(graph, values) for graph in graphs))
    simulator = Simulator(sharding.mesh)
    parts = [partition(lower_ops(graph)) for graph in graphs]
    outputs, gradients = run_parts(simulator, parts, inputs, tangents)
    roles, whole = output_node(joint.graph).meta["roles"], {}
    per_rank = [list(out) + list(grad) for out, grad in zip(outputs, gradients)]
    order = [i for i, r in enumerate(roles) if r.kind in ("output", "mutation")]
    order += [i for i, r in enumerate(roles) if r.kind not in ("output", "mutation")]
    for position, index in enumerate(order):
        value, layout = output_node(joint.graph).args[0][index], sharding.outputs[index]
        blocks = [values[position] for values in per_rank]
        whole[roles[index].kind, roles[index].name] = assemble(blocks, layout, sharding.mesh, value.meta["val"].shape)
    return whole, parts, simulator


def run_parts(
    simulator: Simulator,
    parts: Sequence[Parts],
    inputs: Sequence[Sequence[torch.Tensor]],
    tangents: Sequence[Sequence[torch.Tensor]] = (),
) -> tuple[list[tuple], list[tuple]]:
    """Run one forward and backward on all ranks: (outputs, gradients), one tuple of local tensors a rank.

    inputs[rank]: the forward's placeholders; tangents[rank]: gradients of its outputs, in the order of the graphs."""
    results = simulator.run([p.forward for p in parts], inputs)
    counts = [len(r) - len(p.saved) for r, p in zip(results, parts)]
    outputs = [r[:k] for r, k in zip(results, counts)]
    if any(p.backward is None for p in parts):
        return outputs, [()] * len(parts)
    backward_inputs = [(*r[k:], *t) for r, k, t in zip(results, counts, tangents, strict=True)]
    return outputs, simulator.run([p.backward for p in parts], backward_inputs)


def local_inputs(
    local: fx.GraphModule, values: Mapping[str, torch.Tensor]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Return (inputs, tangents) of a rank's joint graph: its parts of global `values`, given by placeholder name."""
    mesh, coordinate = local.meta["mesh"], local.meta["mesh"].coordinate(local.meta["rank"])
    inputs, tangents = [], []
    for node in local.graph.nodes:
        if node.op == "placeholder":
            part = local_part(values[node.name], node.meta["layout"], mesh, coordinate)
            (tangents if node.meta["role"].is_tangent else inputs).append(part)
    return inputs, tangents


class MLP(torch.nn.Module):
    """Mean squared error of down(relu(up(x * scale))) against a target, x (B, S, H); the two linears are canonical
    ops."""

    def __init__(self, hidden: int = 8, inner: int = 12):
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.scale = torch.nn.Parameter(torch.rand(hidden, generator=generator, dtype=torch.float64) + 0.5)
        self.up = torch.nn.Parameter(torch.randn(inner, hidden, generator=generator, dtype=torch.float64))
        self.down = torch.nn.Parameter(torch.randn(hidden, inner, generator=generator, dtype=torch.float64))

    def forward(self, x, target):
        inner = torch.relu(torch.ops.autopar.linear(x * self.scale, self.up))
        return (torch.ops.autopar.linear(inner, self.down) - target).pow(2).mean()


def capture(model: torch.nn.Module, *inputs: torch.Tensor) -> tuple[fx.GraphModule, dict[str, torch.Tensor]]:
    """(joint graph, global values by placeholder name) of a model that returns its loss."""
    joint = differentiate(export(model, inputs)).graph_module
    return joint, global_values(joint, model, {f"args[{i}]": x for i, x in enumerate(inputs)})


def global_values(joint: fx.GraphModule, model: torch.nn.Module, inputs: dict) -> dict[str, torch.Tensor]:
    """Values by placeholder name; tangents are one."""
    state, values = dict(model.named_parameters()) | dict(model.named_buffers()), {}
    for node in joint.graph.nodes:
        if node.op == "placeholder":
            role, like = node.meta["role"], node.meta["val"]
            if role.kind == "tangent":
                values[node.name] = torch.ones(tuple(like.shape), dtype=like.dtype)
            else:
                values[node.name] = inputs[role.name] if role.kind == "input" else state[role.name].detach()
    return values


def written(joint: fx.GraphModule, mesh: Mesh, default: str, nodes: dict, leaves: dict, outputs, **kept) -> Sharding:
    """A Sharding written as text. nodes: "arguments -> outputs", layouts separated by "|", by node name; an op that
    is not named has the layout `default` for everything, with axes of dims that a tensor lacks or does not stretch
    over left out."""

    def parse(text, value):
        layout = Layout.parse(text, 8)
        dims = tuple(axes if value.shape[d] > 1 else () for d, axes in enumerate(layout.dims[: value.dim()]))
        return Layout(dims, layout.partial, layout.parts[: value.dim()])

    decisions = {}
    for node in joint.graph.nodes:
        if is_op(node):
            ins, outs = [a.meta["val"] for a in tensor_arguments(node)], values_of(node)
            text = nodes.get(node.name) or "|".join([default] * len(ins)) + "->" + "|".join([default] * len(outs))
            left, right = (side.split("|") for side in text.split("->"))
            decisions[node.name] = NodeSharding(
                tuple(map(parse, left, ins)) if ins else (), tuple(map(parse, right, outs))
            )
    by_name = {n.name: n.meta["val"] for n in joint.graph.nodes if n.op == "placeholder"}
    results = output_node(joint.graph).args[0]
    return Sharding(
        mesh, links(mesh), 1e11, decisions, {name: parse(text, by_name[name]) for name, text in leaves.items()},
        tuple(parse(text, value.meta["val"]) for text, value in zip(outputs, results, strict=True)), **kept,
    )  # fmt: skip


def compare_with_autograd(model: torch.nn.Module, inputs, whole: dict, tolerance: float = 1e-6) -> None:
    """The loss and every gradient of a step are those of plain autograd."""
    model.zero_grad()
    loss = model(*inputs)
    loss.backward()
    torch.testing.assert_close(whole["output", "0"], loss.detach(), rtol=tolerance, atol=tolerance)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(
            whole["gradient", name], parameter.grad, rtol=tolerance, atol=tolerance, msg=lambda m, n=name: f"{n}: {m}"
        )
