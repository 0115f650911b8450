"""The backward of one rank's step: from saved values and the outputs' gradients to the gradients of
parameters and inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from ..codegen.follow_size import Sizes
from ..codegen.rank_program import BACKWARD, REDUCE, WAITING
from ..errors import InputError
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..ir.layout import Layout, local_part
from ..plans.plan import Plan
from ..processes.dtensors import redistributed, spec_of
from .accumulation import Accumulation, Locals, ParameterGradients
from .rank_graphs import RankGraphs


class Backward:
    """Gradients of the `inputs`, in their layouts, and of the parameters `names`, which have the DTensor `specs`;
    `owners` are the kinds and names of all of them, in order."""

    def __init__(
        self,
        captured: Captured,
        plan: Plan,
        inputs: list[str],
        names: list[str],
        specs: list,
        device_mesh,
        rank: int,
        accumulation: Accumulation,
    ):
        self.gradients = ParameterGradients(names, specs, accumulation)
        self.unreduced: dict[str, object] = {}  # specs of gradients that wait for their reduction, once some do
        self.mesh, self.device_mesh, self.coordinate = plan.mesh, device_mesh, plan.mesh.coordinate(rank)
        self.owners = [("input", name) for name in inputs] + [("parameter", name) for name in names]
        output = output_node(captured.graph)
        pairs = list(zip(output.args[0], output.meta["roles"]))
        gradients = [(n, r) for n, r in pairs if not r.is_forward]
        found = {(r.kind, r.name): at for at, (_, r) in enumerate(gradients)}
        self.gradient_at = {name: found["gradient", name] for name in names if ("gradient", name) in found}
        self.input_gradient_at = [found.get(("input_gradient", name)) for name in inputs]
        self.sources = _sources(captured.graph, [n for n, _ in gradients])
        self.values = {r.name: n.meta["val"] for n, r in pairs if r.kind == "gradient"}
        tangents = [n for n in captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "tangent"]
        self.tangents = [(int(n.meta["role"].name), plan.sharding.leaves[n.name]) for n in tangents]

    def wait(self, layouts: Mapping[str, Layout]) -> None:
        """Learn in which layouts gradients wait for their reduction."""
        self.unreduced = {
            name: spec_of(layout, self.values[name].shape, self.values[name].dtype, self.mesh, self.device_mesh)
            for name, layout in layouts.items()
        }

    def __call__(
        self,
        graphs: RankGraphs,
        saved: list,
        tangents: Sequence,
        empty: Sequence[torch.Tensor],
        parameters: Sequence,
        nodes: Sequence,
        sizes: Sizes | None = None,
    ) -> list[torch.Tensor | None]:
        """Return the gradients of the inputs and parameters, given those of the outputs (None: zero). `empty`: what has
        the local form of each output; `nodes` are what autograd does with those of the parameters next; `sizes`: as
        in Call. A gradient to which no gradient of an output leads is None, as in eager torch. Empties `saved`, so that
        each value is freed after its last use."""
        given = {at for at, _ in self.tangents if tangents[at] is not None}
        saved += [self._local_tangent(tangents[at], layout, empty[at]) for at, layout in self.tangents]
        saved += sizes or ()
        leads = [bool(given & sources) for sources in self.sources]
        of_inputs: list[torch.Tensor | None] = []

        def make(waits: bool, taken: Locals) -> Locals:
            results = graphs.run(WAITING if waits or taken else BACKWARD, saved)
            of_inputs.extend(results[at] if at is not None and leads[at] else None for at in self.input_gradient_at)
            found, led_to = {name: results[at] for name, at in self.gradient_at.items()}, [*taken]
            del results
            if taken:
                for name in led_to:
                    found[name].add_(taken.pop(name))
                found |= zip(self.unreduced, graphs.run(REDUCE, [*map(found.pop, self.unreduced), *(sizes or ())]))
            led_to += [name for name, at in self.gradient_at.items() if leads[at]]
            return {name: found[name] for name in led_to}

        own = self.gradients(parameters, nodes, self.unreduced if WAITING in graphs.loaded else {}, make)
        return of_inputs + own

    def _local_tangent(self, tangent: torch.Tensor | None, layout, like: torch.Tensor) -> torch.Tensor:
        if tangent is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device_mesh.device_type)
        if isinstance(tangent, DTensor):
            tangent = redistributed(tangent, layout, self.mesh, self.device_mesh)
        elif not layout.is_replicated:  # of an output that another program of the call gave whole
            tangent = local_part(tangent, layout, self.mesh, self.coordinate)
        return tangent.contiguous()


def _sources(graph: fx.Graph, gradients: Sequence[fx.Node]) -> list[frozenset[int]]:
    """Return for each gradient the outputs from whose gradients it is computed."""
    reached: dict[fx.Node, frozenset[int]] = {}
    for node in graph.nodes:
        reached[node] = frozenset().union(*(reached[a] for a in node.all_input_nodes))
        if node.op == "placeholder" and node.meta["role"].kind == "tangent":
            reached[node] = frozenset([int(node.meta["role"].name)])
    return [reached[node] for node in gradients]


@contextmanager
def changes_explained() -> Iterator[None]:
    """Raise InputError where torch finds that a saved value is not what it was: a parameter, buffer or input was
    written to."""
    try:
        yield
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        raise InputError(
            "a parameter, buffer or input that the backward reads was changed in place since the forward: "
            + str(error),
            fix="call backward() before optimizer.step() and before other writes to what the forward has read",
        ) from None


def refuse_second_derivatives() -> None:
    """Raise InputError in a backward that is recorded to be differentiated itself."""
    if torch.is_grad_enabled():
        raise InputError(
            "the backward is to be differentiated itself (create_graph=True), and a compiled model has first "
            "derivatives only",
            fix="leave out create_graph=True; compute higher derivatives with the model before autopar.compile",
        )
