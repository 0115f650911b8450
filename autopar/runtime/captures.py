"""The calls that a module is compiled for, each of them one capture.

A capture belongs to a form of call (names, shapes, dtypes and constants of the arguments), to training flags, and to
calls with or without gradients: without, its graph has no backward and its plan no saved activations. All captures
compute with the same parameters, in the layouts of the first plan, and with the same buffers.

A form that was not met before is compiled by all ranks together, and so is the first call of each checked on all of
them. A rank that meets a new form alone cannot know it: agree.rendezvous says how it finds out.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ..codegen.follow_size import Sizes
from ..codegen.rank_program import PipelineProgram, RankProgram
from ..errors import InputError
from ..frontend.call_signature import CallSignature, describe_call, leaf_names
from ..frontend.export import Captured
from ..frontend.hooks import Hooks, Structure
from ..frontend.open_numbers import opened
from ..ir.graph import output_node
from ..ir.layout import Layout
from ..ir.mesh import Mesh
from ..plans.plan import Plan
from ..processes import agree, watch
from ..processes.process_groups import ProcessGroups
from ..processes.stage_mesh import StageMesh
from ..utils.gc_pause import paused_collector
from .accumulation import Accumulation
from .ambient import Ambient
from .call import Call
from .capture import Capture, Point, Traced, fix_of_many
from .compiler_protocol import Compiler
from .following import nearest
from .inputs import Inputs, data_axes, global_example
from .maker import Maker
from .modes import Modes
from .outputs import Kind, OutputForms
from .parameters import table_of
from .sizes import SizeFamilies
from .step import Step

if TYPE_CHECKING:
    from .pipeline_step import PipelineStep

LIMIT = 16  # captures of one module for the same shapes, if it is not told otherwise
MOST = 64  # captures of one module: the one that served last the longest ago goes, but the first

_log = logging.getLogger("autopar")
_module_numbers = itertools.count()  # modules are compiled in the same order on all ranks


@dataclass(eq=False)
class Captures:
    """The captures of `module`, and how it gets more. `layouts` are those of its parameters; `last` served last."""

    module: nn.Module
    compiler: Compiler
    modes: Modes
    layouts: Mapping[str, Layout]
    mode: Kind  # of the inputs
    outputs: str
    mesh: Mesh
    device_mesh: DeviceMesh
    stage: StageMesh
    table: list[Capture] = field(default_factory=list)
    last: Capture = field(init=False)
    calls: Iterator[int] = field(default_factory=lambda: itertools.count(1))
    traces: int = 0  # of calls, but for the first
    rendezvous_count: int = 0
    sizes: SizeFamilies = field(default_factory=SizeFamilies)
    numbers_read: set[str] = field(default_factory=set)  # floats that a forward was seen to read
    compile_options: Mapping[str, object] | None = None  # of torch.compile, if graphs go through it

    def __post_init__(self):
        self.hooks, self.structure = Hooks(self.module._source), Structure(self.module._source)
        self.forward = vars(self.module._source).get("forward")  # when the model was compiled
        self.groups = ProcessGroups(self.mesh, self.device_mesh, dist.get_rank())
        self.accumulation = Accumulation(self.module, self.layouts, self.stage.mesh, self.stage.coordinate)
        self.parameters = dict(self.module.named_parameters())
        self.elsewhere = [(name, p.requires_grad) for name, p in self.module.elsewhere.items()]
        self.name = f"module {next(_module_numbers)}"

    def compile(self, options: Mapping[str, object]) -> None:
        """Run the graphs of all captures, and of those to come, through torch.compile."""
        self.compile_options = options
        for capture in self.table:
            capture.step.compile(options)

    def add(self, traced: Traced, plan: Plan, program: RankProgram) -> None:
        """Add the first capture, for the modes that the module is in."""
        ambient = Ambient.now()._replace(gradients=True)
        self._add(traced, plan, self.step_of(traced, plan, program), self._trains(self.trainable()), ambient)

    def _add(
        self,
        traced: Traced,
        plan: Plan,
        step: Step,
        gradients: bool,
        ambient: Ambient,
        changed: str = "",
        planned_for: CallSignature | None = None,
        sizes: Sizes | None = None,
    ) -> Capture:
        signature, leaves = traced.captured.signature, plan.sharding.leaves
        nodes = {n.meta["role"].name: n.name for n in traced.captured.graph.nodes if n.op == "placeholder"}
        layouts = {name: leaves[nodes[name]] for name in signature.tensor_names if nodes.get(name) in leaves}
        inputs = step.takes(signature, self.mode, layouts, traced.fixed, self.mesh, self.device_mesh)
        call = f"{inputs.text()}; {self._modes_text()}{changed}"
        captured = traced.captured
        around = self.modes.now(), self.hooks.now(), self.trainable(), ambient, gradients
        read = captured.guards, self._buffers_of(captured)
        planned_for = planned_for or signature
        self.last = Capture(call, *around, *read, captured.returns, inputs, step, plan, traced, planned_for, sizes)
        self.table.append(self.last)
        if len(self.table) > MOST:
            self.table.remove(min(self.table[1:-1], key=lambda capture: capture.used))
        return self.last

    def _buffers_of(self, captured: Captured) -> list[tuple[dict, str, torch.Size, torch.dtype]]:
        """Return where the buffers are that a call reads or writes on this rank, and their forms."""
        found = []
        for node in captured.graph.nodes:
            if node.op == "placeholder" and node.meta["role"].kind == "buffer":
                table, leaf = table_of(self.module, node.meta["role"].name, "_buffers")
                if table.get(leaf) is not None:  # a stage may have none
                    found.append((table, leaf, node.meta["val"].shape, table[leaf].dtype))
        return found

    @property
    def serves_several(self) -> bool:
        """Return whether calls of several shapes were met, so that ranks may differ in theirs unnoticed."""
        return len({capture.inputs.parts for capture in self.table}) > 1

    def find(self, args: tuple, kwargs: dict) -> tuple[Step | PipelineStep, Call]:
        """Return what runs a call, and the call; compile it if there is nothing yet.

        Raises InputError if there are too many captures or ranks are called differently, and what compiling raises, on
        all ranks; DesyncError if this rank alone makes a call for the first time."""
        self.structure.check()
        flags, hooks, ambient = self.modes.now(), self.hooks.now(), Ambient.now()
        if ambient.dtype != self.table[0].ambient.dtype:
            raise InputError(
                f"torch's default type is {ambient.dtype}, and was {self.table[0].ambient.dtype} when the model was "
                f"compiled",
                fix="call torch.set_default_dtype before autopar.compile",
            )
        trainable = self.trainable()
        gradients = ambient.gradients and self._trains(trainable)
        tensors = None
        for capture in (self.last, *self.table):
            if capture.state != (flags, hooks, trainable, ambient):
                continue
            tensors = capture.inputs.match(args, kwargs)
            if tensors is not None and capture.holds():
                break
            tensors = None
        if tensors is None or not capture.is_met:
            capture, tensors = self._first_call(None if tensors is None else capture, args, kwargs, gradients)
        self.last, capture.used = capture, next(self.calls)
        if capture.step.draws and self.module.random.is_seeded:
            self._rendezvous(
                "torch seeded anew",
                fix="call torch.manual_seed on every rank, or seed a torch.Generator() of what one rank alone draws",
            )
            self.module.random.restart()
        watch.enter(self.name)
        return capture.step, Call(capture.inputs, tensors, capture.returns, sizes=capture.sizes)

    def _rendezvous(self, call: str, **words: str) -> None:
        """Wait for all ranks, with words for the error if they do not come (see agree.rendezvous)."""
        agree.rendezvous(self.name, self.rendezvous_count, call, **words)
        self.rendezvous_count += 1

    def _first_call(self, capture: Capture | None, args: tuple, kwargs: dict, gradients: bool):
        """Agree with all ranks on a call that they make together, compile it if there is no `capture`, and return its
        capture and the call's tensors."""
        call = f"{describe_call(args, kwargs)}; {self._modes_text()}"
        thawed = [n for n, now, before in zip(self.parameters, self.trainable(), self.last.trainable) if now != before]
        if self.stage.pp_group is not None and thawed:
            first = f"set requires_grad of {thawed[0]} before autopar.compile"
            self._rendezvous(call, fix=f"{first}: ranks of other stages do not see that it changed")
        else:
            self._rendezvous(call)
        if capture is None:
            capture = self._compile(call, args, kwargs, gradients)
        tensors = capture.inputs.match(args, kwargs)
        capture.inputs.check(tensors)
        capture.is_met = True
        return capture, tensors

    @paused_collector()
    def _compile(self, call: str, args: tuple, kwargs: dict, gradients: bool) -> Capture:
        changed = "".join(f", {words}" for _, words in self.last.guards.changed()[:3])
        signature = CallSignature.of(args, kwargs)[0]
        changing = set().union(*(signature.other_numbers(c.inputs.signature) for c in self.table)) - self.numbers_read
        args, kwargs = opened(args, kwargs, changing, leaf_names(args, kwargs))
        alike = [c for c in self.table if _of_tensors(c.inputs.parts) == _of_tensors(signature.shapes)]
        if len(alike) >= self.module.capture_limit:
            raise InputError(
                f"the model is called with {call}{changed}, and is compiled for {len(alike)} calls of these shapes "
                f"already: {' | '.join(c.call for c in alike)}",
                fix=fix_of_many(signature, [c.inputs.signature for c in alike]),
            )
        start, state = time.perf_counter(), (self.modes.now(), self.hooks.now(), self.trainable(), Ambient.now())
        followed = self.sizes.find(
            lambda: global_example((args, kwargs), self.mode, self.mesh), state, self.table, Maker(self, gradients)
        )
        if followed is not None and self.accumulation.is_deferring and followed.program in self._follow_deferred():
            followed = None
        if followed is not None:
            traced, known, _, step, sizes = followed
            capture = self._add(traced, known.plan, step, gradients, state[-1], changed, known.planned_for, sizes)
            how = "follows the size of those before"
        else:
            capture, is_new = self._compile_anew((args, kwargs), gradients, state, changed)
            how = f"compiled in {time.perf_counter() - start:.1f} s" if is_new else "as one before"
        if self.groups.rank == 0:
            _log.info("capture %d: %s%s: %s", len(self.table), call, changed, how)
        return capture

    def _compile_anew(self, call: tuple, gradients: bool, state: tuple, changed: str) -> tuple[Capture, bool]:
        """Capture a call, and return also whether no program for it was there yet."""
        trains = self.by_name(self.trainable())
        traced = self.compiler.trace(call, gradients, self.modes.adapters, trains)
        self.traces += 1
        asked = CallSignature.of(*call)[0].open_numbers
        self.numbers_read |= asked.keys() - traced.captured.signature.open_numbers.keys()
        same = next((c for c in self.table if not c.follows_size and c.traced.computes_as(traced)), None)
        if same is not None:
            return self._add(traced, same.plan, same.step, gradients, state[-1], changed, same.planned_for), False
        like = nearest(self.table, state, traced)
        plan = self.compiler.plan(
            traced, self.table[0].plan, self.layouts_of_all_stages(), like.plan if like is not None else None
        )
        planned_for = like.planned_for if like is not None and like.plan.decides_as(plan) else None
        step = self.step_of(traced, plan, self.compiler.lower(traced, plan))
        return self._add(traced, plan, step, gradients, state[-1], changed, planned_for), True

    @paused_collector()
    def _complete(self, step: Step, inputs: Inputs) -> Step:
        """Return the step of a call in whose program all differentiable outputs have tangents; from now on it serves
        the calls that `step` served, of this size. Called in a backward, on all ranks together."""
        capture = next(c for c in self.table if c.inputs is inputs)
        if capture.step is not step or step.is_complete:  # torch gave it no more tangents
            return capture.step
        call = f"{capture.call}; gradients of all outputs"
        self._rendezvous(call)
        start = time.perf_counter()
        around = self.modes.set_to(capture.flags), self.hooks.forwards_of(capture.hooks), capture.ambient.entered()
        with around[0], around[1], around[2], capture.guards.installed():
            traced = self.compiler.retrace(capture.traced, capture.flags[-1], self.by_name(capture.trainable))
        # the parts of the tensors that the first forward had serve both programs
        given = replace(traced, fixed=capture.inputs.layouts)
        plan = self.compiler.plan(given, self.table[0].plan, self.layouts_of_all_stages())
        whole = self.step_of(traced, plan, self.compiler.lower(traced, plan))
        whole.is_complete = True
        for other in self.table if not capture.follows_size else (capture,):
            if other.step is step:
                other.step, other.plan, other.traced, other.sizes = whole, plan, traced, None
        if self.groups.rank == 0:
            _log.info("%s: compiled in %.1f s", call, time.perf_counter() - start)
        return whole

    def _whole(self, step: Step, inputs: Inputs) -> Step:
        """Return the step of a call that also makes the logits that the plan leaves out. Called on all ranks."""
        capture = next(c for c in self.table if c.inputs is inputs)
        if capture.step is not step or capture.follows_size:
            return self._complete(step, inputs)
        self._rendezvous(f"{capture.call}; logits that are read, by a second forward each time")
        traced, plan = capture.traced, replace(capture.plan, tiled=())
        return cast(Step, self.step_of(traced, plan, self.compiler.lower(traced, plan)))

    def layouts_of_all_stages(self) -> dict[str, Layout]:
        """Return the layouts, by name, of the parameters of the first capture, whoever has them, and of all that this
        rank has."""
        first = self.table[0]
        leaves, nodes = first.plan.sharding.leaves, first.traced.captured.graph.nodes
        roles = {n.name: n.meta["role"] for n in nodes if n.op == "placeholder" and n.name in leaves}
        return {role.name: leaves[name] for name, role in roles.items() if role.kind == "parameter"} | dict(
            self.layouts
        )

    def step_of(self, traced: Traced, plan: Plan, program: RankProgram | PipelineProgram) -> Step | PipelineStep:
        """Return what runs a program of a capture, compiled or deferring as the module is now."""
        kind: Kind = "sharded" if self.outputs == "sharded" else self.mode
        forms = OutputForms(
            kind, traced.captured, traced.fixed, data_axes(self.mesh), self.stage.mesh, self.stage.device_mesh
        )
        if isinstance(program, PipelineProgram):
            from .pipeline_step import PipelineStep

            trains = any(
                r.kind == "gradient" for r in output_node(traced.captured.graph).meta["roles"]
            )  # on whatever rank
            step = PipelineStep(program, traced.captured, plan, self.module, self.stage, self.groups, self.accumulation,
                                trains, self.outputs == "everywhere", forms)  # fmt: skip
        else:
            step = Step(program, traced.captured, plan, self.module, self.device_mesh, self.groups, self.accumulation,
                        self._complete, forms, self._whole)  # fmt: skip
        if self.compile_options is not None:
            step.compile(self.compile_options)
        if self.accumulation.is_deferring:
            step.prepare_no_sync()
        return step

    def prepare_no_sync(self) -> None:
        """Load for all captures what the backward inside of no_sync runs; all ranks call this together."""
        found: list[Capture | Point] = [c for c in self.table if not c.follows_size]
        found.extend(self.sizes.points())
        for one in found:
            one.step.prepare_no_sync()
        self._follow_deferred()

    def _follow_deferred(self) -> list[object]:
        """Return the programs that serve no more: what they served is compiled anew."""
        lost = self.sizes.follow_deferred()
        for step in lost:
            self.table = [c for c in self.table if step not in (c.step, getattr(c.step, "follows", None))]
        return lost

    def _modes_text(self) -> str:
        own = vars(self.module._source).get("forward")  # set by the user, or a layer's that is called by itself
        by = "" if own is self.forward else f", {getattr(own, '__qualname__', 'another forward')}"
        return self.modes.text() + Ambient.now().text(self._trains(self.trainable())) + by

    def trainable(self) -> list[bool]:
        """Return for each parameter whether it trains now."""
        return [p.requires_grad for p in self.parameters.values()]

    def by_name(self, trainable: list[bool]) -> dict[str, bool]:
        """Return whether each parameter trains, by name. All ranks call this together: under a pipeline each knows of
        those of its stages."""
        mine = dict(zip(self.parameters, trainable))
        if self.stage.pp_group is None:
            return mine
        everyone = agree.from_all(lambda: mine)
        return {name: any(theirs.get(name) for theirs in everyone) for theirs in everyone for name in theirs}

    def _trains(self, trainable: list[bool]) -> bool:
        """Return whether anything trains, on whatever rank, with the adapters on or off as they are."""
        here = zip(self.parameters, trainable)
        return any(
            t and (self.modes.adapters or n not in self.module.adapter_names) for n, t in (*here, *self.elsewhere)
        )


def _of_tensors(shapes: tuple) -> list[tuple[int, ...]]:
    """Return the shapes of a call's tensors, without its constants."""
    return [shape for shape in shapes if shape is not None]
