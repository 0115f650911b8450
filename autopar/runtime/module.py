"""The compiled model: an nn.Module with the source's parameter names, as DTensors, that runs one rank's graphs."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from .. import _torch
from .._torch.dtensors import mix_with_plain_tensors
from ..adapt.attach import Attachment
from ..adapt.fake_quant import OBSERVER
from ..adapt.lora import LoRA
from ..errors import AdaptError, AutoparError, StrategyError
from ..frontend.call_signature import split_example
from ..frontend.user_lines import line_now
from ..ir.mesh import Mesh
from ..plans.expert_balance import ExpertBalance, balance_of
from ..plans.plan import Plan
from ..processes import agree, watch
from ..processes.stage_mesh import StageMesh
from ..schedule.played import Played
from ..storage.model_folder import save_model
from ..storage.state_dict import translate_states
from ..storage.weights import Weights, persistent_buffers
from . import captures, copies, optimizers, parts
from .adapters import Adapters
from .captures import Captures
from .clipping import WHAT, counts_here, norm_of_all
from .compiler_protocol import Compiler
from .elsewhere import name_absent
from .equal_ranks import EVERY, EqualRanks
from .generation import with_cache
from .inputs import data_axes
from .lengths import Lengths, Padding
from .loaded import FALLS_BACK
from .modes import Modes
from .outputs import own_parts
from .parameters import parallel_already, take_over
from .random_state import RandomState
from .source_attributes import OfSource
from .stand_in import local_gradient

SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")  # tables of the source itself
STATE_HOOKS = (
    "_state_dict_hooks",
    "_state_dict_pre_hooks",
    "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
)
OWN = (
    "capture_limit", "adapter_names", "quantized_names", "plan", "random", "stage_mesh", "elsewhere", "layouts",
    "_forms", "_pp_ranks", "_captures", "_lengths", "_observers_are_frozen", "_adapters", "_equal_ranks",
)  # fmt: skip


class ParallelModule(OfSource):
    """Made by `autopar.compile`; `plan` is what was decided for the call that it was compiled for, `captures` has the
    plans of all calls, of which there may be `capture_limit` of the same shapes. `random`: where its random numbers
    stand. `layouts`: of the parameters by name, on the mesh of `stage_mesh`. Values come from the source or from
    `weights`.

    Under a pipeline each rank has what its stages read: these are its parameters, its state dict and its optimizer's.
    `elsewhere` are the parameters and saved buffers of other stages, by name, on the meta device. Outputs are where
    their stage is, or everywhere, as `outputs` says.

    It has the source's own submodules and tensors. Attributes that it does not know are the source's, to read and to
    set, so that what a user says of the model is said of what is traced. `_forms`: the source's tensors before they
    were taken over."""

    _is_accelerate_prepared = True  # Accelerator.prepare leaves it as it is: it is parallel already

    def __init__(
        self,
        source: nn.Module,
        compiler: Compiler,
        example_inputs,
        inputs: str,
        device_mesh,
        weights: Weights | None = None,
        attachment: Attachment | None = None,
        outputs: str = "stage",
        pad: Padding | None = None,
        check_every: int | None = EVERY,
    ):
        self.begin(source)
        self._equal_ranks = EqualRanks(check_every)
        mesh, self.capture_limit = Mesh.of(device_mesh), captures.LIMIT
        count = math.prod(map(mesh.size, data_axes(mesh))) if inputs == "local" else 1
        self._lengths = Lengths(pad, (source.forward, compiler.loss_fn), count)
        agree.everywhere(self._lengths.check)
        *example_inputs, _ = self._lengths.agreed(*split_example(own_parts(example_inputs)), may_differ=False)
        self.adapter_names = frozenset(attachment.added if attachment else ())  # of parameters and buffers
        replaced = attachment.replaced if attachment else {}
        self.quantized_names = frozenset(
            replaced
        )  # of parameters of the source that are here only in their quantized parts
        if inputs == "global":
            mix_with_plain_tensors()  # outputs and what the script computes of them, beside parameters
        traced = compiler.trace(example_inputs, True)
        self.plan = compiler.plan(traced)
        self.random = RandomState(agree.from_rank_zero(torch.initial_seed))
        program = compiler.lower(traced, self.plan)
        self.stage_mesh = stage = StageMesh.of(self.plan, device_mesh)
        missing = [program.elsewhere(pp_rank) for pp_rank in range(len(stage.ranks))]
        self.elsewhere, self._pp_ranks = _others(source, traced.captured.ties, missing, stage.pp_rank)
        self._forms = compiler.forms
        given = traced.captured, self.plan, stage, weights, self.adapter_names, replaced, missing[stage.pp_rank]
        self.layouts = agree.everywhere(lambda: take_over(source, self._forms, *given))
        name_absent(source, self.elsewhere, self._where)
        self.__dict__.update({name: vars(source)[name] for name in SHARED})
        translate_states(self, self.layouts, stage, self.elsewhere)
        self._captures = Captures(
            self, compiler, Modes(source), self.layouts, inputs, outputs, mesh, device_mesh, stage
        )
        self._captures.add(traced, self.plan, program)
        lora = next((a for a in compiler.adapt if isinstance(a, LoRA)), None)
        self._observers_are_frozen = False
        self._adapters = Adapters(self, lora, self._captures.modes.set_adapters) if lora else None
        parts.install(self)

    def begin(self, source: nn.Module) -> None:
        """Become the module in front of `source`, without anything else of its own yet."""
        super().__init__(source, OWN, SHARED)
        for name in STATE_HOOKS:  # the source's, and those that are registered here
            vars(self)[name] = vars(source)[name].copy()

    def __deepcopy__(self, memo: dict) -> ParallelModule:
        """Return another compiled module with the same values, as moving averages of parameters need. All ranks call
        it."""
        made = copies.deep_copy(self, memo)
        optimizers.follow(made)
        return made

    def __reduce_ex__(self, protocol):
        """Let `torch.save(model)` and pickle write the plain model with whole parameters. All ranks call it."""
        return copy.copy, (copies.plain_model(self),)  # what reads it needs nothing of autopar

    def forward(self, *args, **kwargs):
        """Run the model's call on all ranks, which make it together. Raises subclasses of AutoparError."""
        if torch.compiler.is_dynamo_compiling():
            return _torch.outside_dynamo(ParallelModule.forward)(self, *args, **kwargs)
        try:
            args, kwargs, lengths = self._lengths.agreed(args, kwargs, self._captures.serves_several)
            step, call = self._captures.find(args, kwargs)
            call.lengths = lengths
            self._equal_ranks.before(self, call)
            return step(call)
        except AutoparError as error:
            error.locate(line_now())
            raise

    @property
    def captures(self) -> dict[str, Plan]:
        """Return the plans by the calls that they are for, such as "x (4, 6); eval, no_grad", in the order in which
        they were met."""
        return {capture.call: capture.plan for capture in self._captures.table}

    @property
    def pads(self) -> Padding:
        """Return what inputs are padded with where ranks have lengths of their own."""
        return self._lengths.pad

    def pad_with(self, pad: Padding) -> None:
        """Let ranks agree on the longest of their tensors in each call, as `autopar.compile(..., pad=pad)` does, of
        those that `pad` names. All ranks call it."""
        self._lengths = Lengths(pad, (self._source.forward, self._captures.compiler.loss_fn), self._lengths.parts)

    @property
    def takes_parts(self) -> bool:
        """Return whether each rank passes its own part of the batch."""
        return self._captures.mode == "local"

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients: a backward inside adds to gradients that are not reduced over the ranks; the next
        backward outside adds its own, and reduces them all at once. What counts is where `backward()` is called.

        Inside, the `.grad` of such a parameter is a Partial DTensor: `zero_grad` drops it, `full_tensor()` gives its
        value, and an optimizer or clipping that reads it makes DTensor reduce it, tensor by tensor. It is as large as
        what the rank computes: `unreduced_gradient_bytes` for all, also where the parameter and its reduced gradient
        are sharded (ZeRO). Under a pipeline they come on top of the sums of the micro-batches of the next call, which
        the plan counts, and a parameter that several stages share is reduced in each backward."""
        with watch.asking("no_sync, entered for the first time"):
            self._captures.prepare_no_sync()
        with self._captures.accumulation.deferring():
            yield

    @property
    def unreduced_gradient_bytes(self) -> int:
        """Return the bytes that this rank holds of unreduced gradients inside of no_sync."""
        return self._captures.table[0].step.unreduced_bytes

    def measured_schedule(self) -> Played:
        """Return when each action of the last call ran, on this rank and those before and after it in the pipeline.
        `play`, `grid` and `svg` of autopar/schedule say the same of a predicted one. All ranks call it. Raises
        StageError where a step is one program."""
        return self._captures.last.step.measured()

    def expert_balance(self) -> ExpertBalance:
        """Return how many rows the busiest device got of each mixture of experts, over the mean of all, in the latest
        forwards of the last call's graphs (64 at most), beside the load that was assumed. A step counts what its host
        knows anyway; here ranks tell each other, so all call it. Raises StrategyError where no rows are sent to
        experts, or none were counted."""
        rows, routing = agree.from_all(lambda: self._captures.last.step.expert_rows()), self.plan.routing
        if any(rows):
            return balance_of(rows, routing.load if routing else 1.0)
        if routing is None:
            raise StrategyError(
                "no experts are cut over devices, so that no rows are sent", fix='use strategy="expert"'
            )
        raise StrategyError("no rows of experts were counted yet", fix="call the model before, without model.compile()")

    def compile(self, **options) -> None:
        """Run this rank's graphs through torch.compile with these options of it (`backend`, `mode`, ...), from the next
        call of each on; that call compiles, which takes minutes for a large model. What is around the graphs stays as
        it is, so `torch.compile(model)` changes nothing."""
        self._captures.compile(options)

    def compile_graphs(self, falls_back: bool) -> None:
        """Run the graphs through torch.compile as it is; with `falls_back` one on which that fails runs op by op, and a
        warning says so."""
        self._captures.compile({FALLS_BACK: True} if falls_back else {})

    def shard_inputs(self, *args, **kwargs):
        """Return the batch of a call as DTensors in the layouts that the plan gave the inputs, in the structure of the
        call: a dict of the keyword arguments, or a tuple. Inputs not compiled for, as in `shard_inputs(labels=labels)`
        for a loss outside of the model, are cut along dim 0 as the first input is."""
        return self._captures.table[0].inputs.shard(args, kwargs)

    def save_pretrained(self, folder: str | Path) -> None:
        """Write a Hugging Face folder: config.json, if the source has a config, and safetensors shards under the
        original names, which `from_pretrained` and `weights=` load. All ranks call it; each writes tensors of its own,
        whole, one at a time. Raises AdaptError for a quantized base, whose weights are not those of the folder any
        more."""
        if self.quantized_names:
            raise AdaptError(
                f"the base is quantized: {len(self.quantized_names)} weights are here in their packed form alone",
                fix="save_adapter(folder) for what trained; its base is the folder or model that this one was compiled "
                "from",
            )
        with watch.asking("save_pretrained"):
            save_model(self, folder)

    def _lora(self) -> Adapters:
        """Return the adapters. Raises AdaptError if the model was compiled without LoRA."""
        if self._adapters is None:
            raise AdaptError(
                "the model has no adapters", fix="compile it with adapt=[autopar.LoRA(target_modules=...)]"
            )
        return self._adapters

    def save_adapter(self, folder: str | Path) -> None:
        """Write what trains, the active adapter, as adapter_config.json and adapter_model.safetensors in PEFT's format.
        All ranks call it."""
        self._lora().save(folder)

    def load_adapter(self, folder: str | Path, adapter_name: str | None = None) -> None:
        """Read an adapter that `save_adapter` or PEFT wrote, each rank its parts: into the active one, or as another
        one, which `set_adapter` makes active. Raises AdaptError for one of another model or of other settings."""
        self._lora().load(folder, adapter_name)

    def set_adapter(self, adapter_name: str) -> None:
        """Make one of the loaded adapters the active one; "default" is the one that the model was compiled with. An
        optimizer keeps its state of the parameters, which then hold other values."""
        self._lora().activate(adapter_name)

    def disable_adapter(self):
        """Return a context in which the model computes without its adapters. What trains beside them (biases,
        modules_to_save) stays."""
        return self._lora().disabled()

    def merge_adapter(self) -> None:
        """Add the active adapter to the base: calls then run graphs without it, and `save_pretrained` writes the
        sum."""
        self._lora().merge()

    def unmerge_adapter(self) -> None:
        """Take a merged adapter out of the base again."""
        self._lora().unmerge()

    def freeze_observers(self, frozen: bool = True) -> None:
        """Let the observers of fake-quantized inputs keep their ranges, or go on following the inputs, whatever
        `train()` and `eval()` say meanwhile; calls in the new state are a capture of their own. In eval mode ranges are
        never changed."""
        self._observers_are_frozen = frozen
        self._set_observers()

    def train(self, mode: bool = True):
        """Set training mode as the source does, and leave observers that are frozen in eval mode."""
        super().train(mode)
        self._set_observers()
        return self

    def _set_observers(self) -> None:
        """Set the training flags of observers to those of their layers, or to False while observers are frozen."""
        for layer in self.modules():
            if OBSERVER in layer._modules:
                layer._modules[OBSERVER].training = layer.training and not self._observers_are_frozen

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip gradients by their norm over the whole model, all its stages, and return the norm as a plain tensor,
        equal on all ranks, which call this together. A parameter that several stages share counts once."""
        trained = {n: p for n, p in self.named_parameters() if p.grad is not None}
        with watch.collective(WHAT):
            local = [local_gradient(p) for p in trained.values()]
            counted = [gradient for gradient, name in zip(local, trained) if counts_here(self, name)]
            norm = norm_of_all(counted, norm_type, self.stage_mesh.device)
        norm = norm.to(next((g.dtype for g in local), torch.float32))
        if local:
            torch._foreach_mul_(local, torch.clamp(max_norm / (norm + 1e-6), max=1.0))
            torch.autograd.graph.increment_version([p.grad for p in trained.values()])
        return norm

    def pp_ranks_of(self, name: str) -> tuple[int, ...]:
        """Return where along the pipeline a parameter or buffer is."""
        return self._pp_ranks.get(
            name, (0,) if self.stage_mesh.pp_group is None else tuple(range(len(self.stage_mesh.ranks)))
        )

    def _where(self, name: str) -> str:
        ranks = ", ".join(str(rank) for pp_rank in self.pp_ranks_of(name) for rank in self.stage_mesh.ranks[pp_rank])
        return f"{name} is on rank {ranks}, in another stage of the pipeline than those of rank {dist.get_rank()}"

    def _apply(self, fn, recurse: bool = True):
        """Accept `.to(...)`, `.half()` and the like if they change nothing. Raises StrategyError otherwise: the graph
        would not fit any more."""
        for tensor in (*self.parameters(), *self.buffers()):
            local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
            probe = fn(local.detach()[:0] if local.dim() else local.detach())
            if probe.dtype != tensor.dtype or probe.device.type != local.device.type:
                raise StrategyError(
                    f"a compiled model stays on its devices and in its dtype, not {probe.device} and {probe.dtype}",
                    source=line_now(),
                    fix="move or cast the model before autopar.compile",
                )
        return self

    def __setattr__(self, name: str, value) -> None:
        if name == "_is_fsdp_managed_module":  # what FSDP begins with
            raise parallel_already("FullyShardedDataParallel")
        super().__setattr__(name, value)

    def register_forward_pre_hook(self, hook, **options):
        """Register a hook. Raises StrategyError for one of FSDP's: the model is parallel already."""
        if f"{getattr(hook, '__module__', '')}.".startswith("torch.distributed.fsdp."):  # and fully_shard
            raise parallel_already("fully_shard")
        return super().register_forward_pre_hook(hook, **options)

    def __getattr__(self, name: str) -> Any:
        if name == "_ddp_params_and_buffers_to_ignore":  # and DistributedDataParallel
            raise parallel_already("DistributedDataParallel")
        value = super().__getattr__(name)
        return with_cache(self, value) if name == "generate" and not isinstance(value, nn.Module) else value


def _others(source: nn.Module, ties: Mapping[str, str], missing: Sequence[Set[str]], here: int):
    """Return (parameters and saved buffers that the pipeline rank `here` does not get, on the meta device; of all that
    some pipeline rank does not get, the ranks that have it). `missing`: by pipeline rank, what it does not get."""
    elsewhere: dict[str, Tensor] = {}
    found: dict[str, tuple[int, ...]] = {}
    made: dict[int, Tensor] = {}
    for name, tensor in (*source.named_parameters(remove_duplicate=False), *persistent_buffers(source)):
        first = ties.get(name, name)
        if any(first in names for names in missing):
            found[name] = tuple(pp_rank for pp_rank, names in enumerate(missing) if first not in names)
        if first in missing[here]:
            if id(tensor) not in made:
                empty = torch.empty_like(tensor, device="meta")
                made[id(tensor)] = (
                    nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                )
            elsewhere[name] = made[id(tensor)]
    return elsewhere, found
