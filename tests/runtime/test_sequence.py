"""The sequence cut over processes: shifted labels, padding, lengths that the axis does not divide, and LoRA."""

from __future__ import annotations

import os

import pytest
import torch
from torch.distributed.tensor import Shard, distribute_tensor
from torch.func import functional_call

import autopar
from autopar.errors import InputError
from autopar.ops import ring_documents

from ..helpers import gloo
from ..helpers.sequences import Decoder, Packed, WithLogits, batch, packed, reached_keys
from .parity import assert_close, assert_same_gradients, device_mesh, full, pair


def _step(rank: int, mesh: str, strategies: tuple[str, ...], execution: str = "eager") -> None:
    for strategy in strategies:
        inputs = batch(13, "left", samples=4)
        options = dict(strategy=strategy, execution=execution)
        mine, whole = pair(Decoder("padded", 4, 4), device_mesh(mesh), inputs, **options)
        for model in (mine, whole):
            model(**inputs).backward()
        assert_close(mine(**inputs), whole(**inputs), strategy, 1e-10)
        assert_same_gradients(mine, whole, 1e-10)


@pytest.mark.slow  # test_chunks_of_the_sequence has the ring
@pytest.mark.parametrize("mesh, ranks, strategies", [
    ("cp=2", 2, ("ring",)), ("cp=2", 2, ("all_gather_kv", "ulysses")),
    ("cp=4", 4, ("all_gather_kv", "ulysses", "ring")),
    ("dp=2,cp=2", 4, ("all_gather_kv", "ulysses+fsdp", "ring+fsdp")),
])  # fmt: skip
def test_gradients(mesh, ranks, strategies):
    gloo.run(ranks, _step, mesh, strategies)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["all_gather_kv", "ulysses", "ring"])
def test_gradients_through_inductor(strategy):
    """Among them of a mask that is gathered."""
    gloo.run(2, _step, "cp=2", (strategy,), "compiled", seconds=400)


def _lora(rank: int, strategy: str) -> None:
    """Against the eager model whose weights are the sums W + B A."""
    inputs, whole = batch(12, "right", samples=4), Decoder("padded", 4, 2, shift="cut")
    lora = autopar.LoRA(r=2, lora_alpha=2, target_modules=["qkv", "out"], init_lora_weights=False)
    mine = autopar.compile(Decoder("padded", 4, 2, shift="cut"), device_mesh("cp=2"), inputs, adapt=[lora],
                           strategy=strategy)  # fmt: skip
    mine(**inputs).backward()
    factors = {name: full(p).detach().requires_grad_() for name, p in mine.named_parameters() if "lora_" in name}
    assert len(factors) == 4
    weights = {
        f"{layer}.weight": whole.get_submodule(layer).weight.detach()
        + factors[f"{layer}.lora_B.weight"] @ factors[f"{layer}.lora_A.weight"]
        for layer in ("qkv", "out")
    }
    loss = functional_call(whole, weights, kwargs=inputs)
    wanted = torch.autograd.grad(loss, list(factors.values()))
    assert_close(mine(**inputs), loss, strategy, 1e-10)
    found = dict(mine.named_parameters())
    for name, gradient in zip(factors, wanted, strict=True):
        assert_close(found[name].grad, gradient, name, 1e-10)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["all_gather_kv", "ulysses", "ring"])
def test_lora(strategy):
    gloo.run(2, _lora, strategy)


def _chunks(rank: int) -> None:
    """Each rank passes its chunk of the sequence, with a length that the axis does not divide."""
    mesh, inputs = device_mesh("cp=2"), batch(13, "left")
    with pytest.raises(InputError, match=r"(?s)has no axis for them.*Shard\(1\) along cp"):
        autopar.compile(Decoder("padded", 4, 2), mesh, inputs, inputs="local")
    chunks = {name: distribute_tensor(x, mesh, [Shard(1)]) for name, x in inputs.items()}
    mine, whole = pair(Decoder("padded", 4, 2), mesh, chunks, strategy="ring")
    assert mine.plan.layouts["input_ids"] == "cp:S(1)"
    mine(**chunks).backward()
    whole(**inputs).backward()
    assert_close(mine(**chunks), whole(**inputs), "loss", 1e-10)
    assert_same_gradients(mine, whole, 1e-10)


def test_chunks_of_the_sequence():
    gloo.run(2, _chunks)


def _in_zigzag(rank: int, strategy: str, folder: str) -> None:
    """Logits that are held in zigzag are read in order, and gradients come back through them; another length has
    another plan."""
    os.environ["AUTOPAR_CACHE"] = folder  # the second model finds what the first one has traced
    pin, inputs, weights = {"input_ids": "cp:Z(1)"}, batch(16), torch.linspace(-1, 1, 16)[:, None]
    mine, whole = pair(WithLogits("causal", 4, 2), device_mesh("cp=2"), inputs, strategy=strategy, pin=pin)
    layouts = [x for node in mine.plan.sharding.nodes.values() for x in node.outputs]
    assert mine.plan.layouts["input_ids"] == "cp:Z(1)" and any(x.text() == "cp:Z(2)" for x in layouts)
    assert [output.layout for output in mine.plan.outputs] == ["R", "cp:Z(1)"]
    for given in (inputs, batch(13)):
        for model in (mine, whole):
            model.zero_grad()
            loss, logits = model(**given)
            (loss + (weights[: logits.shape[1]] * logits).square().sum()).backward()
        assert_close(mine(**given)[1] * 1, whole(**given)[1], strategy, 1e-10)
        assert_same_gradients(mine, whole, 1e-10)
    held = mine(**inputs)[1]
    assert_close(held.full_tensor(), whole(**inputs)[1], "the whole", 1e-10)
    with pytest.raises(InputError, match="cut in zigzag"):
        held.to_local()
    options = dict(strategy=strategy, pin=pin, outputs="sharded")
    mine, whole = pair(WithLogits("causal", 4, 2), device_mesh("cp=2"), inputs, **options)
    (loss, logits), (wanted_loss, wanted) = mine(**inputs), whole(**inputs)
    assert_close(logits, wanted, "as a DTensor", 1e-10)
    (logits.square().sum() + loss).backward()
    (wanted.square().sum() + wanted_loss).backward()
    assert_same_gradients(mine, whole, 1e-10)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("strategy", ["all_gather_kv", "ring"])
def test_outputs_in_zigzag(strategy, tmp_path):
    gloo.run(2, _in_zigzag, strategy, str(tmp_path))


def _among_documents(rank: int, zigzag: bool, batches, execution: str = "eager") -> list[int]:
    """Return the bytes that a rank hands over for each batch, in keys and values and in their gradients."""
    sent, start = [0], ring_documents.start_all_to_all

    def counting(result, x, *ways):
        sent[-1] += x.numel() * x.element_size()
        return start(result, x, *ways)

    ring_documents.start_all_to_all = counting  # of this process
    options = dict(strategy="ring", pin={"input_ids": "cp:Z(1)" if zigzag else "cp:S(1)"}, execution=execution)
    mine, whole = pair(Packed("causal", 4, 2), device_mesh("cp=2"), batches[0], **options)
    for inputs in batches:
        for model in (mine, whole):
            model.zero_grad()
            loss = model(**inputs)
            loss.backward()
        assert_same_gradients(mine, whole, 1e-10)
        sent.append(0)
    return sent[:-1]


@pytest.mark.parametrize(
    "zigzag, execution",
    [(False, "eager"), *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, "eager"), (False, "compiled")))],
)
def test_rings_among_documents(zigzag, execution):
    """Documents of each batch decide what goes where: nothing, where they end with the blocks."""
    kind, batches = "zigzag" if zigzag else "causal", [packed(16, [*lengths]) for lengths in ((16,), (8, 8), (5, 6, 5))]
    batches[1]["documents"] = batches[1]["documents"][:1].expand(2, -1).contiguous()
    found = gloo.run(2, _among_documents, zigzag, batches, execution, seconds=400)
    row_bytes = 2 * 2 * 2 * 8 * 8  # samples, keys and values, heads, width, bytes
    wanted = [3 * row_bytes * reached_keys(one["documents"], kind, 2) for one in batches]
    assert [sum(of_batch) for of_batch in zip(*found)] == wanted and (zigzag or wanted[1] == 0)
