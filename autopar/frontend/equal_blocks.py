"""Deep models traced fast, for compiling: five of the equal blocks are exported, and nothing is taken on trust.

The whole model runs once without values, and what it calls of torch is recorded (call_record.py), which is much faster
than an export. If the calls of one block are those of the next but for a shift, and the model with five blocks makes
the calls of the whole one but for those of the blocks that are left out, then its graph, unrolled (unroll.py), is the
whole model's. The run of the whole model also tells what Python state its forward reads.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from torch import Tensor, nn

from .. import _torch
from ..errors import AutoparError
from .block_lists import DROPPED_FROM, KEPT_AT_END, RepeatedBlocks, candidates, name_if_kept
from .call_record import Call, CallRecord, Source
from .export import Captured, TracedCall, traced, with_tables
from .fake_parameters import Form, Forms
from .flat_call import ROOT, FlatCall
from .guards import Guards


@dataclass(frozen=True)
class EqualBlocks:
    """Blocks of a model that are equal in a call: of `run` all calls are known, and what it read of Python."""

    blocks: RepeatedBlocks
    run: TracedCall

    def completed(self, captured: Captured) -> Captured:
        """Return an unrolled capture with what the whole model's run tells: the Python state that it holds for, and
        what it returns."""
        guards = Guards.using(self.run.watch, captured.guards.used)
        return replace(captured, guards=guards, returns=self.run.call.returns)


def equal_blocks_of(model: nn.Module, example_inputs, forms: Mapping[str, Form] | None, *how) -> EqualBlocks | None:
    """Return a list of equal blocks of a model, None where there is none whose blocks are the same in this call;
    `forms` and `how` as `export` takes them: loss_fn, dtype, loss_alone, with_gradients. Nothing is raised: what is
    wrong with a model is told by its export."""
    forms = forms if isinstance(forms, Forms) else with_tables(model, forms)
    lists = [b for b in candidates(model, {**forms, **forms.buffers}) if _have_one_place(b, model, forms)]
    if not lists:
        return None
    results: dict = {}  # of calls, by their contents
    run = _rehearsed(model, example_inputs, forms, results, *how)
    if run is None:
        return None
    for blocks in lists:
        calls = _BlockCalls.of(run.program, blocks)
        if calls is None or not calls.are_shifted():
            continue
        names = {name_if_kept(name, blocks.names) for name in _names(model)} - {None}
        with blocks.shortened():
            short = _rehearsed(model, example_inputs, forms, results, *how) if set(_names(model)) == names else None
        if short is not None and calls.without_dropped() == short.program and _return_alike(run, short):
            return EqualBlocks(blocks, run)
    return None


@dataclass(frozen=True)
class Rehearsal:
    """The calls of a run, and where its outputs come from; `record` keeps what they tell apart by identity."""

    calls: tuple[Call, ...]
    outputs: tuple[Source, ...]
    record: CallRecord = field(compare=False, repr=False)


def _rehearsed(
    model: nn.Module, example_inputs, forms, results: dict, loss_fn, dtype, loss_alone, with_gradients
) -> TracedCall | None:
    """Run a model's call without values, as it is exported; None if that fails or does what no record shows."""
    try:
        run = traced(
            model,
            example_inputs,
            loss_fn,
            forms,
            dtype,
            loss_alone,
            with_gradients,
            partial(_rehearse, results),
            with_values=False,
        )
    except AutoparError:
        return None
    return run if run.is_plain else None


def _rehearse(results: dict, mode, call: FlatCall, inputs: list[Tensor]) -> Rehearsal:
    model = call.get_submodule(ROOT)
    leaves = {f"input {at}": x for at, x in enumerate(inputs)}
    record = CallRecord(mode, leaves | dict(model.named_parameters()) | dict(model.named_buffers()), results)
    with _torch.as_if_exported(), mode, record:
        outputs = call(*inputs)
    return Rehearsal(tuple(record.calls), tuple(map(record.source, outputs)), record)


def _return_alike(run: TracedCall, short: TracedCall) -> bool:
    one, two = run.call.returns, short.call.returns
    return (one.outputs, one.loss_alone, one.names) == (two.outputs, two.loss_alone, two.names)


def _names(model: nn.Module) -> Iterator[str]:
    """Yield the names of all places of parameters and buffers."""
    for path, module in model.named_modules(remove_duplicate=False):
        for leaf in (*module._parameters, *module._buffers):
            yield f"{path}.{leaf}" if path else leaf


def _have_one_place(blocks: RepeatedBlocks, model: nn.Module, forms: Forms) -> bool:
    """Return whether the modules and tensors of the blocks are nowhere else in the model."""
    paths = Counter(id(module) for _, module in model.named_modules(remove_duplicate=False))
    places = Counter(name for t in forms.tables for names in (t.parameters, t.buffers) for name in names.values())
    is_inside = [name for name in places if name is not None and blocks.names.number(name) is not None]
    return all(paths[id(m)] == 1 for m in blocks.modules.modules()) and all(places[name] == 1 for name in is_inside)


class _BlockCalls:
    """The calls of a run by block, each of which begins where a tensor of it is first read; `starts`: of the blocks."""

    def __init__(self, rehearsal: Rehearsal, blocks: RepeatedBlocks, starts: list[int]):
        self.rehearsal, self.names, self.count, self.starts = rehearsal, blocks.names, blocks.names.count, starts
        self.length = starts[2] - starts[1]
        self.dropped = range(starts[DROPPED_FROM], starts[self.count - KEPT_AT_END])

    @staticmethod
    def of(rehearsal: Rehearsal, blocks: RepeatedBlocks) -> _BlockCalls | None:
        """Find the blocks, None if they do not run one after the other."""
        first: dict[int, int] = {}
        for at, call in enumerate(rehearsal.calls):
            for kind, name, *_ in call.sources:
                if kind == "leaf" and (number := blocks.names.number(name)) is not None:
                    first.setdefault(number, at)
        starts = list(first.values())
        if list(first) != list(range(blocks.names.count)) or len(set(starts)) != len(starts):
            return None
        return _BlockCalls(rehearsal, blocks, starts)

    def are_shifted(self) -> bool:
        """Return whether all blocks but the first and the last make the same calls on their own tensors, those of the
        block before, and what all read."""
        last = self.count - KEPT_AT_END
        if any(self.starts[b + 1] - self.starts[b] != self.length for b in range(1, last + 1)):
            return False
        calls = self.rehearsal.calls
        for at in range(self.starts[1], self.starts[last]):
            one, two, block = calls[at], calls[at + self.length], (at - self.starts[1]) // self.length + 1
            if one.content != two.content or len(one.sources) != len(two.sources):
                return False
            if not all(self._is_shift(a, b, block) for a, b in zip(one.sources, two.sources)):
                return False
        return True

    def _is_shift(self, one: Source, two: Source, block: int) -> bool:
        """Return whether what a call of a block reads, and what its like in the next one reads, are a shift apart."""
        if one == two:  # what all read
            return one[0] == "other" or self._block(one) is None
        if self._block(one) is None and one[0] != "other":  # of the first block, or before it
            return block == 1 and two[0] == "call" and self._block(two) == 1
        if one[0] != two[0]:
            return False
        if one[0] == "leaf":
            here, there = (self.names.number(name[1]) for name in (one, two))
            return (here, there) == (block, block + 1) and one[1] == self.names.renamed(two[1], block)
        is_near = one[0] == "call" and self._block(one) in (block, block - 1)
        return is_near and two[1:] == (one[1] + self.length, one[2])

    def _block(self, source: Source) -> int | None:
        """Return the block that a source lies in; None for the first and the last one and what is in none."""
        if source[0] == "leaf":
            number = self.names.number(source[1])
        elif source[0] == "call" and self.starts[1] <= source[1] < self.starts[self.count - 1]:
            number = (source[1] - self.starts[1]) // self.length + 1
        else:
            number = None
        return number if number is not None and 0 < number < self.count - 1 else None

    def without_dropped(self) -> Rehearsal | None:
        """Return the run of the model that has blocks 0, 1, 2 and the last two, None if something reads another."""
        calls = []
        for at, call in enumerate(self.rehearsal.calls):
            if at not in self.dropped:
                if (sources := self._all_kept(call.sources, at)) is None:
                    return None
                calls.append(replace(call, sources=sources))
        outputs = self._all_kept(self.rehearsal.outputs, len(self.rehearsal.calls))
        return None if outputs is None else Rehearsal(tuple(calls), outputs, self.rehearsal.record)

    def _all_kept(self, sources: tuple[Source, ...], at: int) -> tuple[Source, ...] | None:
        found = [self._kept(source, at) for source in sources]
        kept = tuple(source for source in found if source is not None)
        return kept if len(kept) == len(found) else None

    def _kept(self, source: Source, at: int) -> Source | None:
        """Return what the call `at` reads, as the shortened model's does."""
        if source[0] == "leaf":
            name = name_if_kept(source[1], self.names)
            return None if name is None else ("leaf", name)
        if source[0] != "call" or source[1] < self.dropped.start:
            return source
        _, number, position = source
        if number in self.dropped:
            is_neighbour = number >= self.dropped.stop - self.length and at < self.dropped.stop + self.length
            return ("call", number - self.dropped.stop + self.dropped.start, position) if is_neighbour else None
        return "call", number - len(self.dropped), position
