"""One rank's forward and backward graphs as one differentiable function of the parameters, and of inputs with a
gradient.

The graphs contain all collectives. `_Bridge` hangs them into autograd, so that `loss.backward()`, hooks, optimizers and
gradient clipping work as for any module.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Mapping
from functools import partial

import torch
from torch import fx, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from ..codegen.follow_size import Line, Sizes
from ..codegen.rank_program import FORWARD, WAITING, RankProgram
from ..compiler import lower_deferred
from ..errors import CaptureError, InputError, StageError
from ..frontend.export import Captured
from ..frontend.user_lines import located
from ..ir.graph import output_node
from ..passes.distribute.defer import unreduced_layouts
from ..plans.plan import Plan
from ..processes import agree
from ..processes.process_groups import ProcessGroups
from ..rules.loss_regions import unmade_outputs
from ..schedule.played import Played
from .accumulation import Accumulation
from .backward import Backward, changes_explained, refuse_second_derivatives
from .call import Call
from .inputs import Inputs
from .outputs import OutputForm, OutputForms
from .parameters import tables_of
from .rank_graphs import RankGraphs
from .saved_call import SavedCall, read_by_backward, read_by_outputs, written_by
from .unmade import unmade


class Step:
    """Runs the graphs on the parameters and buffers of `module`. What a step needs of them is looked up once, here.

    `complete` gives, for a step and the inputs of a call, the step in whose program all differentiable outputs have
    tangents, for a backward that comes from one that has none here; `make_whole` the one that also makes the outputs
    that this one leaves out. All ranks call them together. `forms`: of the outputs."""

    takes = Inputs
    runs_layers = True  # by themselves, as calls of their own

    def __init__(self, program: RankProgram, captured: Captured, plan: Plan, module: nn.Module, device_mesh,
                 groups: ProcessGroups, accumulation: Accumulation, complete: Callable[[Step, Inputs], Step],
                 forms: OutputForms, make_whole: Callable[[Step, Inputs], Step]):  # fmt: skip
        self.captured, self.plan, self.accumulation = captured, plan, accumulation
        self.returns, self.saved, self.complete = captured.returns, program.parts.saved, complete
        self.make_whole = make_whole
        self.whole: Step | None = None  # see `made`
        self.unmade = unmade_outputs(captured.graph, [t.node for t in plan.tiled])
        self.is_complete = False  # whether it was made for gradients of all outputs
        self.roles = [
            n.meta["role"] for n in captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind != "tangent"
        ]
        self.random = module.random
        self.draws = any(role.kind == "random" for role in self.roles)
        self.names = [role.name for role in self.roles if role.kind == "parameter"]
        self.tables = tables_of(module, [captured.graph])
        self.parameter_tables = [self.tables["parameter", name] for name in self.names]
        self.known = [table[leaf] for table, leaf in self.parameter_tables]
        self.frozen = [i for i, p in enumerate(self.known) if not p.requires_grad]
        self.specs = [p._spec for p in self.known]
        self.buffer_tables = [table for (kind, _), table in self.tables.items() if kind == "buffer"]
        inputs = [role.name for role in self.roles if role.kind == "input"]
        self.read = [captured.signature.tensor_names.index(name) for name in inputs]
        differentiated = {*captured.signature.differentiated_names}
        self.differentiated = [self.read[i] for i, name in enumerate(inputs) if name in differentiated]
        self._read_outputs(captured, plan)
        self.output_forms = forms
        self.forms_at: Callable[[Sizes], OutputForms] | None = None
        self.forms_by_size: dict[Sizes | None, list[OutputForm]] = {None: forms.of(self.layouts)}
        trains = program.parts.backward is not None
        phases = {"F": "forward" if trains else "forward without gradients", "B": "backward", "R": "backward"}
        self.graphs = RankGraphs(groups, torch.device(device_mesh.device_type), phases, plan).load(program.graphs)
        self.backward = None
        if trains:
            wanted = [name for name in inputs if name in differentiated]
            self.backward = Backward(
                captured, plan, wanted, self.names, self.specs, device_mesh, program.rank, accumulation
            )
        tangents = {at for at, *_ in self.backward.tangents} if self.backward else set()
        self.differentiable = {at for at, wanted in enumerate(self.returns.differentiable) if wanted}
        self.without_tangent = sorted(self.differentiable - tangents)
        self._read_sources(captured.graph)

    def _read_sources(self, graph: fx.Graph) -> None:
        """Find positions among the leaves: `checked`, that the backward reads and torch does not watch, since it sees
        local values; `sources`, that a second forward depends on, and `overwritten`, those that it depends on and to
        which the first one writes."""
        keys = [(role.kind, role.name) for role in self.roles]
        written = written_by(graph)  # of which the backward has copies
        late = read_by_backward(graph, self.saved) - written
        self.checked = {i for i, key in enumerate(keys) if key in late and key[0] in ("parameter", "input")}
        early = read_by_outputs(graph) if self.without_tangent or self.unmade else set()
        self.sources = {i for i, key in enumerate(keys) if key in early and key not in written and key[0] != "random"}
        self.overwritten = [i for i, key in enumerate(keys) if key in early and key in written]
        self.watched = sorted(self.checked | self.sources)
        self.parameters_at = [i for i, key in enumerate(keys) if key[0] == "parameter"]
        self.inputs_at = [i for i, key in enumerate(keys) if key[0] == "input"]

    @staticmethod
    def following(steps: Mapping[Sizes, Step]) -> tuple[Step, frozenset[Line]]:
        """Return the step whose graphs follow the sizes of a call, and the lines of their numbers, given the steps for
        some sizes, of one plan. Raises Differs."""
        made = copy.copy(steps[max(steps)])
        made.graphs, lines = RankGraphs.following({size: step.graphs for size, step in steps.items()})
        made.forms_at, more = OutputForms.following({size: step.output_forms for size, step in steps.items()})
        made.forms_by_size = {}
        return made, lines | more

    @property
    def can_wait(self) -> bool:
        """Return whether there are graphs for gradients that wait for their reduction, or no gradients."""
        return self.backward is None or WAITING in self.graphs.loaded

    def prepare_no_sync(self) -> None:
        """Load the graphs for gradients that wait for their reduction. All ranks call this together."""
        if self.can_wait:
            return
        rank = self.graphs.groups.rank
        program = agree.everywhere(lambda: lower_deferred(self.captured, self.plan, rank, self.saved))
        agree.check_programs(self.plan, program.collectives())
        self.graphs.load(program.graphs)
        self.backward.wait(program.layouts)

    @property
    def unreduced_bytes(self) -> int:
        """Return the bytes of this rank's gradients that are Partial inside of no_sync."""
        layouts = unreduced_layouts(self.captured.graph, self.plan.sharding)
        return self.accumulation.bytes_of(layouts, dict(zip(self.names, self.specs)))

    def at(self, sizes: Sizes) -> Step:
        """Return the step for some sizes, if it follows them: itself, which takes them at each call."""
        return self

    @property
    def follows_size(self) -> bool:
        """Return whether one program serves calls of several sizes."""
        return self.forms_at is not None

    def _read_outputs(self, captured: Captured, plan: Plan) -> None:
        output = output_node(captured.graph)
        roles = output.meta["roles"]
        order = [i for i, r in enumerate(roles) if r.is_forward]  # as the forward graph returns them
        self.forward_count = len(order)
        self.outputs = [at for at, i in enumerate(order) if roles[i].kind == "output"]
        written = [(at, roles[i].name) for at, i in enumerate(order) if roles[i].kind == "mutation"]
        names = {name for kind, name in self.tables if kind == "parameter"}
        self.mutated = [(at, self.tables["buffer", name]) for at, name in written if name not in names]
        self.rewritten = [(at, self.tables["parameter", name]) for at, name in written if name in names]
        self.written_inputs = [
            (at, captured.signature.tensor_names.index(roles[i].name))
            for at, i in enumerate(order) if roles[i].kind == "input_mutation"
        ]  # fmt: skip
        layouts = plan.sharding.outputs
        self.layouts = {roles[order[at]].name: layouts[order[at]] for at in self.outputs}

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graphs through torch.compile, with these options of it."""
        self.graphs.compile(options)

    def measured(self) -> Played:
        """Raise StageError: one program has no schedule."""
        raise StageError(
            "a step is one program, which has no schedule", fix="compile for a mesh with an axis pp, or micro_batches"
        )

    def expert_rows(self) -> dict[str, list[int]]:
        """Return by layer of experts the rows that this rank got in each of the latest forwards."""
        return dict(self.graphs.expert_rows())

    def __call__(self, call: Call):
        """Return the model's output for this rank's part of the batch."""
        if self.draws and _torch.is_in_backward():
            raise InputError(
                "the model draws random numbers and is called inside of a backward, where it would not draw those of "
                "the forward",
                fix="leave out torch.utils.checkpoint around the model: compile with a memory limit, and autopar "
                "recomputes blocks",
            )
        parameters = [table[leaf] for table, leaf in self.parameter_tables]
        self._check(parameters)
        if self.written_inputs:
            call.check_apart([i for _, i in self.written_inputs])
        inputs = call.local()
        if torch.is_grad_enabled() and self.backward is not None:
            outputs = _Bridge.apply(self, call, inputs, *[inputs[i] for i in self.differentiated], *parameters)
        else:
            with torch.no_grad():
                values = self.leaves(inputs, parameters, call.sizes)
                saved_call = self.save_call(values, parameters, call) if self.unmade else None
                outputs, _ = self.forward(values, call)
                outputs = self.shown(outputs, call, saved_call)
        return call.returns.rebuild(outputs)

    def _check(self, parameters: list[nn.Parameter]) -> None:
        if not all(map(operator.is_, parameters, self.known)):
            for name, parameter, spec in zip(self.names, parameters, self.specs):
                if not isinstance(parameter, DTensor) or parameter._spec != spec:
                    raise InputError(
                        f"{name} was replaced by a tensor of another layout, shape or dtype",
                        fix="write into the parameter (with torch.no_grad(): parameter.copy_(value)) and leave it in "
                        "place",
                    )
            self.known = parameters
        for i in self.frozen if self.backward is not None else ():  # a graph without backward serves whatever trains
            if parameters[i].requires_grad:
                raise InputError(
                    f"{self.names[i]} was frozen when the model was compiled and requires a gradient now",
                    fix="set requires_grad before autopar.compile",
                )

    def leaves(self, inputs: list[torch.Tensor], parameters, sizes: Sizes | None) -> list:
        """Return what the forward graph takes. A graph that draws advances the random state."""
        values = {
            "input": (inputs[i].detach() for i in self.read),
            "parameter": map(_torch.local_of, parameters),
            "buffer": (table[leaf] for table, leaf in self.buffer_tables),
            "random": (self.random.next() for _ in self.roles),  # asked once, by a graph that draws
        }
        return [next(values[role.kind]) for role in self.roles] + [*(sizes or ())]

    def forward(self, leaves: list, call: Call | None) -> tuple[list[torch.Tensor], list]:
        """Run the forward graph and return (local outputs of the model, values saved for the backward). What the model
        writes to takes its new values, unless it has them already (no `call`)."""
        results = self.graphs.run(FORWARD, leaves)
        if call is not None:
            self._write(results, call)
        return [results[at] for at in self.outputs], list(results[self.forward_count :])

    def shown(self, outputs: list[torch.Tensor], call: Call, saved_call: SavedCall | None = None) -> list[torch.Tensor]:
        """Return local outputs as the user gets them; `saved_call` makes those that this program leaves out."""
        sizes = call.sizes
        if sizes not in self.forms_by_size and sizes is not None and self.forms_at is not None:
            self.forms_by_size[sizes] = self.forms_at(sizes).of(self.layouts)
        # a number is given as an object of its own: the graph may return one tensor as two outputs
        forms = self.forms_by_size[sizes]
        shown = [form.of(output, call.lengths) for form, output in zip(forms, outputs)]
        for at, name in enumerate(self.layouts):
            if name in self.unmade and saved_call is not None:
                make = partial(self.made, at, call.inputs, call.lengths, saved_call)
                shown[at] = unmade(forms[at], outputs[at], call.lengths, make)
        return shown

    def made(self, at: int, inputs: Inputs, lengths, saved_call: SavedCall) -> torch.Tensor:
        """Return an output that this program leaves out, from a second forward of one that makes it."""
        saved_call.check(self.sources, "output")
        whole = self.whole or self.make_whole(self, inputs)
        self.whole = None if self.follows_size else whole  # then one of each size
        (form,) = whole.output_forms.of({name: x for i, (name, x) in enumerate(whole.layouts.items()) if i == at})
        outputs, _ = whole.forward(saved_call.values_for(whole.roles), None)
        return form.of(outputs[at], lengths)

    def _write(self, results, call: Call) -> None:
        for at, (table, leaf) in self.mutated:
            table[leaf].copy_(results[at])
        for at, (table, leaf) in self.rewritten:
            _torch.write_local(table[leaf], results[at])
        for at, i in self.written_inputs:
            call.write(i, results[at])

    def save_call(self, leaves: list[torch.Tensor], parameters, call: Call) -> SavedCall:
        """Return what the backward needs to know of the leaves, before the forward writes to any."""
        owners = list(leaves)
        for at, parameter in zip(self.parameters_at, parameters):
            owners[at] = parameter
        written = {i for _, i in self.written_inputs}
        for at, i in zip(self.inputs_at, self.read):
            if isinstance(call.tensors[i], DTensor) or i not in written:
                owners[at] = call.tensors[i]
        values = list(leaves) if self.without_tangent or self.unmade else None
        for at in self.overwritten:
            values[at] = leaves[at].clone()
        return SavedCall(self.roles, owners, self.watched, values)

    def recompute_gradients(
        self, saved_call: SavedCall, tangents, nodes: Mapping[str, object]
    ) -> dict[tuple[str, str], torch.Tensor | None]:
        """Return gradients by kind and name of the leaf, from a forward that runs a second time. `nodes` by parameter.
        Raises CaptureError for an output through which torch traced no gradient."""
        lost = [self.returns.names[at] for at in self.without_tangent if tangents[at] is not None]
        if lost:
            raise CaptureError(f"torch traced no gradient through {', '.join(lost)}", fix="return a clone of it")
        outputs, saved = self.forward(saved_call.values_for(self.roles), None)
        found = self.backward(self.graphs, saved, tangents, outputs, self.known, [nodes[name] for name in self.names])
        return dict(zip(self.backward.owners, found))


class _Bridge(torch.autograd.Function):
    """A Step in autograd, of the inputs that have a gradient and the parameters."""

    @staticmethod
    def forward(ctx, step: Step, call: Call, inputs: list[torch.Tensor], *leaves):
        parameters = leaves[len(step.differentiated) :]
        values = step.leaves(inputs, parameters, call.sizes)
        ctx.saved_call = step.save_call(values, parameters, call)
        outputs, saved = step.forward(values, call)
        ctx.step, ctx.inputs, ctx.sizes = step, call.inputs, call.sizes
        ctx.empty = [output.to("meta") for output in outputs]
        outputs = step.shown(outputs, call, ctx.saved_call)
        ctx.others = [None if isinstance(s, torch.Tensor) else (s,) for s in saved]
        ctx.save_for_backward(*[s for s in saved if isinstance(s, torch.Tensor)])
        ctx.mark_non_differentiable(*[o for at, o in enumerate(outputs) if at not in step.differentiable])
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    @located
    def backward(ctx, *tangents):
        refuse_second_derivatives()
        step, saved_call = ctx.step, ctx.saved_call
        is_second = any(tangents[at] is not None for at in step.without_tangent)
        if saved_call is not None:  # before torch looks, which does not know names
            saved_call.check(step.sources | step.checked if is_second else step.checked)
        with changes_explained():
            tensors = iter(ctx.saved_tensors)
        if saved_call is None:  # nothing was saved, which torch would miss
            raise InputError("a second backward through one call", fix="pass retain_graph=True to the first one")
        saved = [next(tensors) if other is None else other[0] for other in ctx.others]
        del tensors
        _torch.release_saved(ctx)
        if not _torch.keeps_graph():
            ctx.saved_call = None
        nodes = [node for node, _ in ctx.next_functions][len(step.differentiated) :]
        if not is_second:
            del saved_call
            gradients = step.backward(step.graphs, saved, tangents, ctx.empty, step.known, nodes, ctx.sizes)
            return None, None, None, *gradients
        saved.clear()
        found = step.complete(step, ctx.inputs).recompute_gradients(saved_call, tangents, dict(zip(step.names, nodes)))
        return None, None, None, *[found.get(owner) for owner in step.backward.owners]
