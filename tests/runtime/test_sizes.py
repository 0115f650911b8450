"""Calls of changing sizes: two are traced, the others follow; equal to the unsharded eager model."""

from __future__ import annotations

import copy
import math
import random

import pytest
import torch
import torch.distributed as dist
from torch import nn

import autopar
from autopar.codegen.follow_size import Factor, Line
from autopar.ir.layout import Layout, is_legal, local_shape
from autopar.ir.mesh import Mesh
from autopar.runtime.following import Sharded
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, assert_same_gradients, device_mesh, pair

FEWEST = 2  # traces of a family of calls


def _captured(model) -> int:
    """Return how many calls of the model were traced."""
    return 1 + model._captures.traces


def _tokens(length: int, batch: int = 4, pad: bool = False) -> dict[str, torch.Tensor]:
    made = torch.Generator().manual_seed(100 * batch + length)
    ids = torch.randint(1, 90, (batch, length), generator=made)
    mask = torch.ones_like(ids)
    if pad:
        mask[0, length - 1 :] = 0
    return dict(input_ids=ids, attention_mask=mask, labels=ids)


def _check(parallel, reference, batches, tolerance: float = 1e-5) -> None:
    for batch in batches:
        losses = []
        for m in (parallel, reference):
            m.zero_grad()
            out = m(**batch)
            out.loss.backward()
            losses.append((out.loss, out.logits))
        assert_close(losses[0][0], losses[1][0], "loss", tolerance)
        assert_close(losses[0][1] * 1, losses[1][1], "logits", tolerance)
        assert_same_gradients(parallel, reference, tolerance)


def test_a_new_length_needs_no_capture(alone):
    parallel, reference = pair(tiny.gpt2(seq=12, n_layer=1)[0], alone, _tokens(12))
    _check(parallel, reference, map(_tokens, (12, 9, 20)))
    assert _captured(parallel) == FEWEST and len(parallel._captures.sizes.known) == 1
    _check(parallel, reference, map(_tokens, (13, 8, 31, 3, 13)))
    assert _captured(parallel) == FEWEST and len(parallel.captures) == 7


def test_evaluation_has_a_program_of_its_own_that_follows_too(alone):
    batches = [torch.randn(3, n, 4) for n in (10, 12, 7, 17)]
    parallel, reference = pair(Fixed("none"), alone, (batches[0],))
    for training in (True, False):
        parallel.train(training), reference.train(training)
        with torch.set_grad_enabled(training):
            for x in batches:
                assert_close(parallel(x), reference(x))
    assert _captured(parallel) == 2 * FEWEST


@pytest.mark.slow
def test_a_last_batch_and_gradients_of_other_outputs(alone):
    parallel, reference = pair(tiny.gpt2(seq=12)[0], alone, _tokens(12, 8))
    _check(parallel, reference, (_tokens(12, batch) for batch in (8, 6, 3, 5, 2)))
    assert _captured(parallel) == FEWEST
    for m in (parallel, reference):  # of the logits, which the program has no tangent for
        m.zero_grad()
        out = m(**_tokens(12, 7))
        (out.loss + out.logits.square().mean()).backward()
    assert_same_gradients(parallel, reference)
    _check(parallel, reference, [_tokens(12, 7), _tokens(12, 4)])


class Fixed(nn.Module):
    """A model whose program is another one at every length, or on the other side of one."""

    def __init__(self, way: str):
        super().__init__()
        self.way, self.linear = way, nn.Linear(4, 4)

    def forward(self, x):
        y = self.linear(x)
        if self.way == "root":
            y = y * math.sqrt(x.shape[1])
        if self.way == "loop":
            for _ in range(x.shape[1]):
                y = y * 0.9
        if self.way == "threshold" and x.shape[1] > 15:
            y = y * 2.0
        if self.way == "window":
            y = y[:, -15:].cumsum(1)
        return y.square().mean()


@pytest.mark.parametrize("way, captured", [
    ("loop", 5), ("threshold", 4), ("none", 2), pytest.param("root", 5, marks=pytest.mark.slow),
    pytest.param("window", 4, marks=pytest.mark.slow),
])  # fmt: skip
def test_lengths_that_need_captures(alone, way, captured):
    batches = [torch.randn(3, n, 4) for n in (10, 12, 7, 17, 20)]
    parallel, reference = pair(Fixed(way), alone, (batches[0],))
    for x in batches:
        for m in (parallel, reference):
            m.zero_grad()
            m(x).backward()
        assert_same_gradients(parallel, reference)
    assert _captured(parallel) == captured


@pytest.mark.slow
def test_dropout_draws_what_a_capture_of_the_length_draws(alone):
    model = tiny.gpt2(seq=12, resid_pdrop=0.3, embd_pdrop=0.3, attn_pdrop=0.3)[0]
    other = autopar.compile(copy.deepcopy(model), alone, _tokens(17))
    parallel = autopar.compile(model, alone, _tokens(12))
    for length in (12, 9, 20):
        parallel(**_tokens(length))
    losses = []
    for m in (parallel, other):
        torch.manual_seed(7)
        losses.append([m(**_tokens(17)).loss.item() for _ in range(2)])
    assert _captured(parallel) == FEWEST and losses[0] == losses[1] and losses[0][0] != losses[0][1]


@pytest.mark.slow
def test_accumulation(alone):
    parallel, reference = pair(tiny.gpt2(seq=12)[0], alone, _tokens(12))
    for lengths in ((12, 9, 20), (17, 5, 23), (11, 8, 30)):
        for m in (parallel, reference):
            m.zero_grad()
        with parallel.no_sync():
            for length in lengths[:-1]:
                parallel(**_tokens(length)).loss.backward()
        parallel(**_tokens(lengths[-1])).loss.backward()
        for length in lengths:
            reference(**_tokens(length)).loss.backward()
        assert_same_gradients(parallel, reference)
    assert _captured(parallel) == FEWEST


def test_remainders_tell_where_shards_are_on_a_line():
    seed = random.randrange(10**6)
    print("seed", seed)
    draw = random.Random(seed)
    for _ in range(300):
        sizes = [draw.choice([2, 3, 4]) for _ in range(draw.choice([1, 2]))]
        mesh = Mesh(tuple(f"a{i}" for i in range(len(sizes))), tuple(sizes))
        slope, start = draw.randint(1, 3), draw.randint(0, 5)
        dim = Sharded(Line((Factor(0, slope, start),), 1, 1, "int", 1), 1, math.prod(sizes))
        layout, alike = Layout((mesh.names,)), {}
        for size in range(1, 80):
            if dim.remainder((size,)) is not None:
                assert is_legal([slope * size + start], layout, mesh)
                alike.setdefault(dim.remainder((size,)), []).append(size)
        for found in alike.values():
            a, b = found[0], found[-1]
            for rank in range(math.prod(sizes)):
                at = mesh.coordinate(rank)
                local = {n: local_shape([slope * n + start], layout, mesh, at)[0] for n in found}
                for n in found:
                    assert (local[n] - local[a]) * (b - a) == (local[b] - local[a]) * (n - a)


@pytest.mark.slow
def test_two_sizes_at_once(alone):
    parallel, reference = pair(tiny.gpt2(seq=12, n_layer=1)[0], alone, _tokens(12, 6))
    _check(parallel, reference, [_tokens(*sizes) for sizes in ((12, 6), (9, 5), (20, 6), (13, 3))])
    assert _captured(parallel) == FEWEST and len(parallel.captures) == 4


class Pairs(nn.Module):
    """An encoder and a decoder, whose loss counts the tokens but the first of each sample."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(40, 8)
        self.model = nn.Transformer(8, 2, 1, 1, 16, dropout=0.0, batch_first=True)
        self.head = nn.Linear(8, 40)

    def forward(self, source, target):
        logits = self.head(self.model(self.embed(source), self.embed(target)))
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), target[:, 1:].flatten())


@pytest.mark.slow
def test_lengths_of_an_encoder_and_a_decoder(alone):
    made = torch.Generator().manual_seed(3)
    batches = [tuple(torch.randint(40, (n, size), generator=made) for size in sizes)
               for n, *sizes in ((6, 11, 9), (6, 8, 14), (4, 13, 5), (5, 10, 10), (2, 7, 12))]  # fmt: skip
    parallel, reference = pair(Pairs(), alone, batches[0])
    for batch in batches:
        for m in (parallel, reference):
            m.zero_grad()
            m(*batch).backward()
        assert_same_gradients(parallel, reference)
    assert _captured(parallel) == FEWEST


@pytest.mark.slow
def test_micro_batches_of_other_sizes(alone):
    parallel, reference = pair(tiny.gpt2(seq=12, n_layer=1)[0], alone, _tokens(12, 8), micro_batches=2)
    for length, batch in ((12, 8), (9, 4), (13, 6)):
        _check(parallel, reference, [_tokens(length, batch)])
    assert _captured(parallel) == FEWEST


@pytest.mark.slow
@pytest.mark.gloo
def test_micro_batches_and_a_pipeline_follow():
    for captured in gloo.run(2, _in_parts, seconds=240):
        assert captured == {"dp=2": FEWEST, "pp=2": FEWEST}


def _in_parts(rank: int) -> dict[str, int]:
    found = {}
    for text in ("dp=2", "pp=2"):
        options = dict(micro_batches=2, outputs="everywhere", strategy="zero1" if text == "dp=2" else None)
        parallel, reference = pair(tiny.gpt2(seq=12)[0], device_mesh(text), _tokens(12, 8), **options)
        for length, batch in ((12, 8), (9, 8), (16, 8), (11, 4), (7, 5), (8, 7), (13, 6)):  # odd ones, and parts
            for m in (parallel, reference):
                m.zero_grad()
                out = m(**_tokens(length, batch))
                out.loss.backward()
            assert_close(out.logits, parallel(**_tokens(length, batch)).logits)
            held = {name: p.grad for name, p in parallel.named_parameters()}
            for name, p in reference.named_parameters():
                if name in held:
                    assert_close(held[name], p.grad, f"{name} at {length}, {batch}")
        found[text] = _captured(parallel)
    return found


@pytest.mark.slow
@pytest.mark.gloo
def test_remainders_are_lowered_and_not_traced():
    assert gloo.run(2, _cut_sequences, seconds=240) == [FEWEST, FEWEST]


def _cut_sequences(rank: int) -> int:
    parallel, reference = pair(tiny.llama(seq=12)[0], device_mesh("cp=2"), _tokens(12), strategy="all_gather_kv")
    _check(parallel, reference, [_tokens(*sizes) for sizes in ((12,), (9,), (20,), (15, 3), (10, 2), (17,), (21, 3))])
    return _captured(parallel)


@pytest.mark.slow
@pytest.mark.gloo
def test_on_four_ranks():
    for captured in gloo.run(4, _on_four_ranks, seconds=240):
        assert captured["megatron_sp"] <= 2 * FEWEST and captured["fsdp"] == FEWEST


def _on_four_ranks(rank: int) -> dict[str, int]:
    found = {}
    for strategy, make, inputs in (("megatron_sp", tiny.llama, "global"), ("fsdp", tiny.gpt2, "local")):
        mesh = device_mesh("dp=2,tp=2" if inputs == "global" else "dp=4")
        part = slice(None) if inputs == "global" else slice(rank, rank + 1)
        model = make(seq=12)[0]
        reference = copy.deepcopy(model)
        mine = lambda length: {n: v[part] for n, v in _tokens(length).items()}  # noqa: E731, B023
        parallel = autopar.compile(model, mesh, mine(12), inputs=inputs, strategy=strategy, hardware="h100")
        for length in (12, 16, 20, 24, 13, 17, 7, 10, 15, 25):
            parallel.zero_grad()
            reference.zero_grad()
            loss = parallel(**mine(length)).loss
            loss.backward()
            whole = reference(**_tokens(length)).loss
            whole.backward()
            assert_close(loss, whole, f"loss at {length}")
            assert_same_gradients(parallel, reference)
        found[strategy] = _captured(parallel)
    dist.barrier()
    return found
