"""Copies of a compiled module: another compiled one (`copy.deepcopy`, averaged models), or the plain model (pickle)."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from ..errors import AdaptError
from ..frontend.call_signature import Returns
from ..frontend.fake_parameters import Forms, Tables
from ..storage.model_folder import whole
from ..storage.state_dict import translate_states
from . import captures, parts
from .adapters import Adapters
from .equal_ranks import EqualRanks
from .modes import Modes
from .parameter_hooks import give_all_whole_gradients
from .parameters import taken_over
from .random_state import RandomState

AS_THEY_ARE = (
    "capture_limit", "plan", "layouts", "stage_mesh", "adapter_names", "quantized_names", "elsewhere", "_pp_ranks",
    "_observers_are_frozen", "_lengths",
)  # fmt: skip


def deep_copy(module, memo: dict):
    """Return a compiled module of its own: parameters, buffers and attributes are copies, the program of the first call
    is made anew from its plan, without planning. All ranks call this together."""
    made = memo[id(module)] = type(module).__new__(type(module))  # hooks of the source may refer to the module
    source = copy.deepcopy(module._source, memo)
    taken_over(source)
    made.begin(source)
    old = module._captures
    for name in AS_THEY_ARE:
        setattr(made, name, getattr(module, name))
    made.random = RandomState(module.random.seed, module.random.offset, module.random.follows)
    made._equal_ranks = EqualRanks(module._equal_ranks.every)
    made._forms = _forms(module._forms, memo)
    give_all_whole_gradients(made, made.layouts, made.stage_mesh)
    translate_states(made, made.layouts, made.stage_mesh, made.elsewhere)
    compiler = copy.copy(old.compiler)
    compiler.model, compiler.forms = source, made._forms
    made._captures = captures.Captures(
        made, compiler, Modes(source), module.layouts, old.mode, old.outputs, old.mesh, old.device_mesh, old.stage
    )
    first = old.table[0]
    captured = first.traced.captured
    captured = replace(captured, guards=first.guards.copied(memo), returns=_returns(first.returns, memo))
    traced = replace(first.traced, captured=captured)
    made._captures.add(traced, first.plan, compiler.lower(traced, first.plan))
    mine = made._captures.last  # serves what the first one serves, whatever state the model was copied in
    mine.call, mine.flags, mine.trainable = first.call, first.flags, first.trainable
    mine.ambient, mine.gradients, mine.hooks = first.ambient, first.gradients, [memo.get(id(h), h) for h in first.hooks]
    made._captures.modes.set_adapters(old.modes.adapters)
    made._adapters = _adapters(module._adapters, made) if module._adapters is not None else None
    parts.install(made)
    return made


def plain_model(module, taken: Callable[[str, Any], Tensor] = lambda name, tensor: tensor.clone()) -> nn.Module:
    """Return the model on one device, with whole parameters and buffers, as it was before it was compiled. All ranks
    call this together, and each gets it. `taken`: what it has of a gathered tensor, maybe in this rank's own memory.

    Raises AdaptError for a model with adapters that are not merged or with a quantized base."""
    if module.quantized_names or (module._adapters is not None and not module._adapters.merged):
        raise AdaptError(
            "a compiled model with adapters cannot be pickled: a plain model would compute without them",
            fix="save_adapter(folder) for what trained, or merge_adapter() first",
        )
    forms, here = module._forms, dict(module.named_buffers())
    saved = forms.saved_buffers
    values = {name: nn.Parameter(taken(name, whole(module, name)), form.trainable) for name, form in forms.items()}
    for name in forms.buffers:
        buffer = whole(module, name) if name in saved else here.get(name, forms.left.get(name))
        values[name] = taken(name, buffer.detach())
    return forms.copy_of(module._source, values)


def _forms(forms: Forms, memo: Mapping[int, object]) -> Forms:
    tables = tuple(Tables(memo[id(t.module)], t.parameters, t.buffers) for t in forms.tables)
    # recurrent layers make their lists anew when they are copied
    copied = [h for h in forms.held if id(h.container) in memo]
    held = tuple(replace(h, container=memo[id(h.container)], owner=memo[id(h.owner)]) for h in copied)
    made = Forms(forms, forms.buffers, tables, held)
    made.left, made.all_names = forms.left, forms.all_names
    return made


def _returns(returns: Returns, memo: Mapping[int, object]) -> Returns:
    effects = [replace(e, owner=memo.get(id(e.owner), e.owner)) for e in returns.effects]
    own = {at: (memo.get(id(owner), owner), leaf) for at, (owner, leaf) in returns.own_buffers.items()}
    return replace(returns, effects=effects, own_buffers=own)


def _adapters(old: Adapters, module) -> Adapters:
    made = Adapters(module, old.config, module._captures.modes.set_adapters)
    made.active, made.merged, made.disabled_by = old.active, old.merged, old.disabled_by
    made.loaded, made._lengths = copy.deepcopy(old.loaded), copy.deepcopy(old._lengths)
    return made
