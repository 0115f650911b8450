"""A capture as plain data, for another process to take over instead of tracing the same call of its own model.

A graph can be sent. The Python state that it holds for cannot, but the other process has the same: it repeats the reads
of the forward on its own model (see reads.py), compares what it finds with what was found, and so has guards of its
own. A capture that reads or leaves what cannot be described so is not portable: then each process traces for itself.
"""

from __future__ import annotations

import collections
import dataclasses
import hashlib
import json
import types
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ..ir.graph_data import graph_data, graph_of
from ..utils.plain_data import NotPortable, decode, encode, name_of, named
from . import lasting
from .call_signature import Built, CallSignature, Refilled, Returns
from .constants import text_of
from .described import class_of, code_hash, described, fits
from .effects import Effect, Refill, Slot
from .export import Captured
from .fake_parameters import DEVICE, Forms
from .guards import Guards
from .names import Variable, names_in
from .no_cache import NoCache
from .reads import Read, Reads
from .snapshot import MISSING

RETURNED = ("count", "loss", "loss_alone", "names", "differentiable", "buffers")  # of Returns, what is plain

OF_A_PROCESS = frozenset(
    "get_rank get_node_local_rank get_local_rank get_group_rank "
    "environ getenv getpid gethostname current_device".split()
)  # what may differ between the processes of a job, and is no attribute or global of the user's


def capture_data(captured: Captured, forms: Forms) -> tuple[str, list[torch.Tensor]]:
    """Return a capture as JSON, and the constants of its graph. `forms`: of the tensors that it was traced with. Raises
    NotPortable."""
    reads, returns = captured.guards.seen, captured.returns
    if reads is None:
        raise NotPortable("a capture whose reads are not known")
    if asked := sorted(set().union(*(_names(code) for code in reads.reach.functions)) & OF_A_PROCESS):
        raise NotPortable(f"a forward that looks at {asked[0]}")
    graph, constants = graph_data(captured.graph_module)
    places, guards = _Places(reads), captured.guards.reads
    data = {
        "call": call_data(captured.signature),
        "numbers": sorted(captured.signature.open_numbers),
        "model": model_data(reads.model, forms),
        "graph": graph,
        "ties": captured.ties,
        "as_eager": captured.as_eager,
        "gathers": captured.gathers,
        "lasting": lasting.names(reads.model),
        "code": code_hash(reads.reach.functions.values()),
        "classes": places.classes,
        "asked": list(reads.asked),
        "reads": [[places.of(read), described(read.before, reads), read.source] for read in guards],
        "returns": {name: encode(getattr(returns, name)) for name in RETURNED},
        "template": encode(returns.template, _data),
        "own_buffers": [[at, places.number(owner), name] for at, (owner, name) in returns.own_buffers.items()],
        "effects": [_effect_data(effect, places, guards) for effect in returns.effects],
    }
    return json.dumps(data), constants


def captured_from(
    text: str,
    constants: list[torch.Tensor],
    model: nn.Module,
    loss_fn: Callable | None,
    forms: Forms,
    signature: CallSignature,
) -> Captured:
    """Return the capture of this process's own model for a call of this signature. Raises NotPortable if the call, the
    code or the Python state that was read is another one here."""
    data = json.loads(text)
    signature = signature.keeping_open(data["numbers"])
    if json.loads(json.dumps(call_data(signature))) != data["call"]:
        raise NotPortable("another call")
    if model_data(model, forms) != data["model"]:
        raise NotPortable("a model in another state")
    lasting.install(model, data["lasting"])
    reads = Reads(model, loss_fn, [held.container for held in forms.held])
    try:
        reads.repeat((number, name) for number, name in data["asked"])
    except Exception as error:  # what an attribute of the user's raises
        raise NotPortable(f"other objects: {error}") from error
    if code_hash(reads.reach.functions.values()) != data["code"]:
        raise NotPortable("other code")
    places, guards = _Places(reads), []
    if places.classes != data["classes"]:
        raise NotPortable("objects of other classes")
    for place, description, source in data["reads"]:
        read = places.read(place)
        if read is None or not fits(read.before, description, reads):
            raise NotPortable(f"another {place if read is None else read.path}")
        guards.append(replace(read, source=source))
    returns = Returns(decode(data["template"], _of_data), **{n: decode(data["returns"][n]) for n in RETURNED})
    returns.own_buffers = {at: (places.objects[number], name) for at, number, name in data["own_buffers"]}
    returns.effects = [_effect(effect, places, guards) for effect in data["effects"]]
    graph = graph_of(data["graph"], constants, DEVICE)
    how = {name: data[name] for name in ("as_eager", "gathers")}
    return Captured(graph, signature, returns, data["ties"], Guards(guards, reads), **how)


def _names(code: types.CodeType) -> frozenset[str]:
    names = names_in(code)
    return names.read | names.attributes


def call_data(signature: CallSignature) -> list:
    """Return what the calls of two processes have in common if they are captured alike."""
    s = signature
    constants = [None if c is ... else text_of(c) for c in s.constants]
    return [s.names, s.shapes, [str(d) for d in s.dtypes], s.differentiated, constants]


def model_data(model: nn.Module, forms: Forms) -> str:
    """Return a hash of what makes a model but for its values and what a forward reads: classes and training flags of
    its modules, forms of its tensors."""
    modules = [(name, class_of(module), module.training) for name, module in model.named_modules()]
    return hashlib.sha256(repr((modules, dict(forms), forms.buffers)).encode()).hexdigest()


class _Places:
    """Says where a value is that a forward read: of an object by its number, of a variable by its place among those
    that functions reach, or what an object's dict may have in front of its class's method."""

    def __init__(self, reads: Reads):
        self.found = reads.found
        self.objects = [known for known, _, _ in reads.known.values()]
        self.classes = [class_of(known) for known in self.objects]
        self.variables = list(reads.reach.variables.values())
        self._numbers = {id(known): at for at, known in enumerate(self.objects)}
        self._tables = {id(vars(known)): at for at, known in enumerate(self.objects) if hasattr(known, "__dict__")}
        self._variables = {(id(v.table), v.key): at for at, v in enumerate(self.variables)}

    def number(self, owner: object) -> int:
        """Return the number of a known object. Raises NotPortable for another one."""
        if id(owner) not in self._numbers:
            raise NotPortable(f"a {type(owner).__name__} that was not read of the model")
        return self._numbers[id(owner)]

    def of(self, read: Read) -> list:
        """Return the place of a read as data."""
        if not isinstance(read.owner, Variable):
            return (
                ["class", *name_of(read.owner), read.name]
                if isinstance(read.owner, type)
                else ["object", self.number(read.owner), read.name]
            )
        key = id(read.owner.table), read.owner.key
        if key in self._variables:
            return ["variable", self._variables[key]]
        if key[0] in self._tables:
            return ["table", self._tables[key[0]], read.name]
        raise NotPortable(f"{read.path}, which was not reached")

    def read(self, place: list) -> Read | None:
        """Return the read of a place, None if nothing was read there."""
        kind, *rest = place
        if kind == "class":
            return self.found.get((id(named(*rest[:2])), rest[2]))
        if kind == "variable":
            variable = self.variables[rest[0]] if rest[0] < len(self.variables) else None
            return None if variable is None else self.found.get((id(variable.table), variable.key))
        owner = self.objects[rest[0]]
        return self.found.get((id(vars(owner) if kind == "table" else owner), rest[1]))


def _data(value: object) -> dict:
    """Return a part of an output, or of what is left in an attribute, as data."""
    if isinstance(value, Slot):
        return {"slot": value.position}
    if isinstance(value, Built):
        return {"built": [*name_of(value.cls), encode(value.fields, _data)]}
    if isinstance(value, Refilled) and type(value.empty) is collections.OrderedDict:
        return {"ordered": encode(value.items, _data)}
    if isinstance(value, NoCache):
        return {"no_cache": 0}
    if value is MISSING:
        return {"missing": 0}
    raise NotPortable(f"a {type(value).__name__} that the forward leaves")


def _of_data(kind: str, content: Any) -> object:
    if kind == "slot":
        return Slot(content)
    if kind == "built":
        cls = named(*content[:2])
        if not isinstance(cls, type) or not (dataclasses.is_dataclass(cls) or hasattr(cls, "_fields")):
            raise NotPortable(f"{content[1]}, which is no dataclass")
        return Built(cls, decode(content[2], _of_data))
    if kind == "ordered":
        return Refilled(collections.OrderedDict(), decode(content, _of_data))
    if kind in ("no_cache", "missing"):
        return NoCache() if kind == "no_cache" else MISSING
    raise NotPortable(f"a value of kind {kind}")


def _effect_data(effect: Effect | Refill, places: _Places, guards: list[Read]) -> list:
    if isinstance(effect, Effect):
        plain = [effect.name, effect.path, encode(effect.step), effect.is_saved]
        return [places.number(effect.owner), *plain, encode(effect.value, _data)]
    at = next((i for i, read in enumerate(guards) if read.before.value is effect.owner), None)
    items: Any = effect.value.values() if isinstance(effect.value, dict) else effect.value
    if at is None or any(isinstance(item, (list, dict, tuple)) for item in items):
        raise NotPortable(f"what the forward leaves in {effect.path}")
    return [at, effect.path, encode(effect.value, _data)]


def _effect(data: list, places: _Places, guards: list[Read]) -> Effect | Refill:
    if len(data) == 3:
        return Refill(guards[data[0]].before.value, data[1], decode(data[2], _of_data))
    number, name, path, step, is_saved, value = data
    return Effect(places.objects[number], name, path, decode(value, _of_data), decode(step), is_saved)
