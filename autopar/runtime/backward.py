"""The backward of one rank's step: from saved values and the outputs' gradients to the gradients of
parameters and inputs."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import fx
from torch.distributed.tensor import DTensor

from .. import _torch
from ..codegen.follow_size import Line, Sizes
from ..codegen.rank_program import DeferredProgram
from ..errors import InputError
from ..frontend.export import Captured
from ..ir.graph import output_node
from ..ir.layout import local_part
from ..plans.plan import Plan
from ..processes.dtensors import redistributed, spec_of
from ..processes.process_groups import ProcessGroups
from .accumulation import Accumulation, Locals, ParameterGradients
from .loaded import LoadedGraph


class Backward:
    """Gradients of the `inputs`, in their layouts, and of the parameters `names`, which have the DTensor `specs`;
    `owners` are the kinds and names of all of them, in order."""

    reduce: _Gradients  # of gradients that were not reduced, once there are some

    def __init__(
        self,
        graph,
        captured: Captured,
        plan: Plan,
        inputs: list[str],
        names: list[str],
        specs: list,
        device_mesh,
        groups: ProcessGroups,
        accumulation: Accumulation,
    ):
        self.gradients = ParameterGradients(names, specs, accumulation)
        self.groups = groups
        self.mesh, self.device_mesh, self.device = plan.mesh, device_mesh, torch.device(device_mesh.device_type)
        self.owners = [("input", name) for name in inputs] + [("parameter", name) for name in names]
        self.reduced = _Gradients(graph, groups, self.device)
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
        self.unreduced: _Gradients | None = None
        self.compile_options: Mapping[str, object] | None = None  # of torch.compile, if the graphs go through it

    @classmethod
    def following(cls, backwards: Mapping[Sizes, Backward]) -> tuple[Backward, frozenset[Line]]:
        """Return the backward whose graphs follow the size, and the lines of their numbers, given those for some sizes.
        Raises Differs."""
        made = copy.copy(backwards[max(backwards)])
        made.gradients = copy.copy(made.gradients)
        made.gradients.unreduced = {}
        made.reduced, lines = _Gradients.following({size: b.reduced for size, b in backwards.items()})
        made.unreduced = None
        return made, lines

    def follow_deferred(self, backwards: Mapping[Sizes, Backward]) -> frozenset[Line]:
        """Load the graphs for gradients that wait for their reduction, given those for some sizes, and return the lines
        of their numbers. Raises Differs."""
        newest = backwards[max(backwards)]
        self.reduce, self.gradients.unreduced = newest.reduce, newest.gradients.unreduced  # of parameters alone
        loaded = {size: b.unreduced for size, b in backwards.items() if b.unreduced is not None}
        self.unreduced, lines = _Gradients.following(loaded)
        return lines

    def load_deferred(self, program: DeferredProgram) -> None:
        """Load the graphs for gradients that wait for their reduction."""
        self.reduce = _Gradients(program.reduce, self.groups, self.device)
        values = {name: self.values[name] for name in program.layouts}
        self.gradients.unreduced = {
            name: spec_of(program.layouts[name], v.shape, v.dtype, self.mesh, self.device_mesh)
            for name, v in values.items()
        }
        self.unreduced = _Gradients(program.backward, self.groups, self.device)
        if self.compile_options is not None:
            self._compile_deferred()

    def compile(self, options: Mapping[str, object]) -> None:
        """Run all graphs, also those that are loaded later, through torch.compile with these options of it."""
        self.compile_options = options
        self.reduced.compile(options)
        if self.unreduced is not None:
            self._compile_deferred()

    def _compile_deferred(self) -> None:
        self.unreduced.compile(self.compile_options)
        self.reduce.compile(self.compile_options)

    def __call__(
        self,
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
            results = (self.unreduced if waits or taken else self.reduced)(saved)
            of_inputs.extend(results[at] if at is not None and leads[at] else None for at in self.input_gradient_at)
            found, led_to = {name: results[at] for name, at in self.gradient_at.items()}, [*taken]
            del results
            if taken:
                for name in led_to:
                    found[name].add_(taken.pop(name))
                waiting = self.gradients.unreduced
                found |= zip(waiting, self.reduce([found.pop(name) for name in waiting]))
            led_to += [name for name, at in self.gradient_at.items() if leads[at]]
            return {name: found[name] for name in led_to}

        own = self.gradients(parameters, nodes, make)
        return of_inputs + own

    def _local_tangent(self, tangent: torch.Tensor | None, layout, like: torch.Tensor) -> torch.Tensor:
        if tangent is None:
            return torch.zeros(like.shape, dtype=like.dtype, device=self.device)
        if isinstance(tangent, DTensor):
            tangent = redistributed(tangent, layout, self.mesh, self.device_mesh)
        elif not layout.is_replicated:  # of an output that another program of the call gave whole
            tangent = local_part(tangent, layout, self.mesh, self.mesh.coordinate(self.groups.rank))
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


class _Gradients(LoadedGraph):
    """A graph that returns gradients, each in memory of its own: optimizers and accumulation write into gradients."""

    def __init__(self, module, groups: ProcessGroups, device: torch.device):
        super().__init__(module, groups, device, "backward")

    def load(self, phase: str) -> None:
        """Make the module ready to run."""
        super().load(phase)
        self.to_copy: list[bool] | None = None  # a result each; known after the first run

    def compile(self, options: Mapping[str, object]) -> None:
        """Compile the graph as LoadedGraph does, and look anew for results that share memory."""
        super().compile(options)
        self.to_copy = None

    def __call__(self, values: list) -> Sequence[torch.Tensor]:
        if self.to_copy is None:
            given = [v for v in values if isinstance(v, torch.Tensor)]
            taken, names = [_span(v) for v in given], [_torch.weak_storage(v) for v in given]
            del given  # so that each value is freed after its last use, in the first run too
            results = self.run(values)
            self.to_copy = _shared_memory(results, taken)
            del names  # until now no result could have the key of a value that was freed
        else:
            results = self.run(values)
        return [r.clone() if copy else r for r, copy in zip(results, self.to_copy)] if any(self.to_copy) else results


def _shared_memory(results: Sequence, taken: list[tuple[int, int, int]]) -> list[bool]:
    """Return for each result whether it overlaps itself, an earlier one or what the graph was given: the spans `taken`,
    to which those of the results are added."""
    shared = []
    for result in results:
        if not isinstance(result, torch.Tensor):
            shared.append(False)
            continue
        key, start, end = _span(result)
        overlaps_itself = end - start < result.numel() * result.element_size()
        shared.append(overlaps_itself or any(key == k and start < e and s < end for k, s, e in taken))
        taken.append((key, start, end))
    return shared


def _span(tensor: torch.Tensor) -> tuple[int, int, int]:
    """Return a tensor's memory, its first byte there and the one behind its last."""
    length = (
        sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride())) + 1 if tensor.numel() else 0
    )
    start = tensor.storage_offset() * tensor.element_size()
    return _torch.storage_key(tensor), start, start + length * tensor.element_size()
