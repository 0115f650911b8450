"""The compiled model: an nn.Module with the source's parameter names, as DTensors, that runs one rank's graphs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from ..capture import Captured
from ..errors import InputError, SourceMethodError, StrategyError
from ..layout import Layout
from ..lower import lower
from ..plan import Plan, fingerprint
from ..storage.model_folder import save_model
from ..storage.state_dict import translate_states
from ..storage.weights import Weights
from . import agree, watch
from .inputs import Inputs
from .parameters import take_over
from .random_state import RandomState
from .step import Step


class ParallelModule(nn.Module):
    """Made by `autopar.compile`; `plan` is what was decided, `random` where its random numbers stand. `graph_in(training)` traces
    the source again in train or eval mode and returns the fingerprint of its graph; `fixed` is as in Inputs; values come from
    the source or from `weights`."""

    def __init__(
        self, source: nn.Module, captured: Captured, plan: Plan, device_mesh, inputs: str, fixed: Mapping[str, Layout],
        graph_in: Callable[[bool], str], weights: Weights | None = None,
    ):  # fmt: skip
        super().__init__()
        self.plan, self._graph_in = plan, graph_in
        self.random = RandomState(agree.from_rank_zero(torch.initial_seed))
        rank = torch.distributed.get_rank()
        program = agree.everywhere(lambda: lower(captured, plan, rank))
        agree.check_programs(plan.hash, program.collectives(), plan.mesh)
        leaves = {n.meta["role"].name: n.name for n in captured.graph.nodes if n.op == "placeholder"}
        names = captured.signature.tensor_names
        layouts = {name: plan.sharding.leaves[leaves[name]] for name in names if leaves.get(name) in plan.sharding.leaves}
        self._inputs = Inputs(captured.signature, inputs, layouts, fixed, plan.mesh, device_mesh)
        self._graph = fingerprint(captured.graph)
        self._runs_in = {source.training: True}  # modes known to have this graph or not
        coordinate = plan.mesh.coordinate(rank)
        self.layouts = agree.everywhere(lambda: take_over(self, source, captured, plan, coordinate, device_mesh, weights))
        translate_states(self, self.layouts, plan.mesh, device_mesh)
        object.__setattr__(self, "_source", source)  # from here on, its plain attributes are ours
        self._step = Step(program, captured, plan, self, device_mesh)
        self.train(source.training)

    def forward(self, *args, **kwargs):
        if not self._runs_in.get(self.training, False):
            self._check_mode()
        return self._step(self._inputs(args, kwargs))

    def _check_mode(self) -> None:
        """Most models compute the same in train and in eval mode; raises InputError for one that does not, and what tracing
        it raises (UnsupportedOpError for dropout)."""
        if self.training not in self._runs_in:
            self._runs_in[self.training] = self._graph_in(self.training) == self._graph
        if not self._runs_in[self.training]:
            now, then = ("train", "eval") if self.training else ("eval", "train")
            raise InputError(
                f"the model was compiled in {then} mode and is in {now} mode now, where it computes something else",
                fix=f"call .{then}(), or call .{now}() on the model before autopar.compile",
            )

    def shard_inputs(self, *args, **kwargs):
        """The batch of a call as DTensors in the layouts that the plan gave the inputs, in the structure of the call: a dict of
        the keyword arguments, or a tuple. For a loss outside of the model, `shard_inputs(labels=labels)` of inputs not compiled
        for are cut along dim 0 as the first input is."""
        return self._inputs.shard(args, kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: config.json, if the source has a config, and safetensors shards under the original names,
        which `from_pretrained` and `weights=` load. All ranks call it; each writes tensors of its own, whole, one at a time."""
        save_model(self, folder)

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their norm over the whole model; returns the norm as a plain tensor."""
        with watch.meeting("the norm of the gradients"):
            norm = torch.nn.utils.clip_grad_norm_(self.parameters(), max_norm, norm_type)
            return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _apply(self, fn, recurse: bool = True):
        """`.to(...)`, `.half()` and the like: fine if they change nothing, else the graph would not fit any more."""
        for tensor in (*self.parameters(), *self.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            probe = fn(local.detach()[:0] if local.dim() else local.detach())
            if probe.dtype != tensor.dtype or probe.device.type != local.device.type:
                raise StrategyError(
                    f"a compiled model stays on its devices and in its dtype, not {probe.device} and {probe.dtype}",
                    fix="move or cast the model before autopar.compile",
                )
        return self

    def __getattr__(self, name: str):
        try:
            return super().__getattr__(name)
        except AttributeError:
            source = self.__dict__.get("_source")
            if source is None or name.startswith("_"):
                raise
            value = getattr(source, name)
        if callable(value):
            raise SourceMethodError(
                f"{type(source).__name__}.{name} works on the parameters of the source model, which autopar.compile took over",
                fix="call the model itself; for anything else save_pretrained(folder) and load the folder into a plain model",
            )
        return value
