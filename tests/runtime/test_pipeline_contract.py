"""The contract of a call is the same with a pipeline: parts of a batch, DTensors, outputs on all ranks, no_sync."""

from __future__ import annotations

import copy
import io
import os
import time
from contextlib import nullcontext

import pytest
import torch
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import autopar
from autopar.errors import AbsentError, DesyncError, InputError, RankFailure, StageError
from autopar.ir.mesh import Mesh
from autopar.runtime.inputs import data_axes
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, pair

MESH = "pp=2,dp=2"


def _batch(seed: int) -> dict:
    ids = torch.randint(1, 96, (4, 12), generator=torch.Generator().manual_seed(seed))
    labels = ids.clone()
    for i in range(len(ids)):  # another number of tokens for each sample
        labels[i, : 2 * i + 1] = -100
    return dict(input_ids=ids, labels=labels)


def _assert_gradients(parallel, reference, what: str) -> None:
    for name, parameter in parallel.named_parameters():
        assert_close(parameter.grad, full(reference.get_parameter(name).grad), f"{what}: {name}", 2e-5)


def _inputs_and_outputs(rank: int) -> dict[str, str]:
    """Messages of calls that must fail, by what is wrong with them."""
    os.environ["AUTOPAR_CHECK"] = "1"  # of this process: the server that it was forked from may be older
    mesh, errors, batch, replica = device_mesh(MESH), {}, _batch(1), rank % 2
    mine = {k: v[2 * replica : 2 * replica + 2] for k, v in batch.items()}

    def refused(what: str, call) -> None:
        with pytest.raises(InputError) as caught:
            call()
        errors[what] = str(caught.value)

    def build():
        return tiny.gpt2(n_layer=1, embd_pdrop=0.1, resid_pdrop=0.1)[0]

    whole = autopar.compile(build(), mesh, batch, micro_batches=2, schedule="1f1b", strategy="ddp")
    parallel, reference = pair(build(), mesh, mine, inputs="local", outputs="everywhere", plan=whole.plan)
    refused("parts that differ along pp", lambda: parallel(**{k: v + (rank == 2) for k, v in mine.items()}))
    whole.random.seed = parallel.random.seed = 0  # whatever seed the models were built with since
    wanted, output = whole(**batch), parallel(**mine)
    assert_close(output.loss, wanted.loss, "the same masks")
    assert (wanted.logits is None) == (rank < 2) and output.logits.requires_grad
    wanted.loss.backward(), output.loss.backward()
    _assert_gradients(parallel, whole, "parts")
    output = parallel(**mine)
    with pytest.raises(
        StageError, match="a gradient arrives for logits, and with stages or micro-batches the loss alone has one"
    ):
        (output.loss + output.logits.full_tensor().square().mean()).backward()
    for m in (parallel, reference):
        m.eval()
    with torch.no_grad():
        expected = reference(**batch)
        assert_close(parallel(**mine).loss, expected.loss)
        assert_close(parallel(**mine).logits, expected.logits, "logits in the order of the batch")
        cut = distribute_tensor(batch["input_ids"], mesh, [Replicate(), Shard(0)])
        odd = distribute_tensor(batch["labels"], mesh, [Shard(1), Shard(0)])  # also along the pipeline
        assert_close(parallel(input_ids=cut, labels=odd).loss, expected.loss, "DTensors")
        away = distribute_tensor(batch["input_ids"], mesh["dp"], [Shard(0)])
        refused("another mesh", lambda: parallel(input_ids=away, labels=odd))
        refused("uneven parts", lambda: parallel(**{k: v[[0, 1, 1][: 1 + 2 * replica]] for k, v in mine.items()}))
    return errors


@pytest.mark.gloo
def test_parts_of_the_batch_and_outputs_everywhere():
    for errors in gloo.run(4, _inputs_and_outputs, seconds=240):
        assert errors["another mesh"].startswith("input_ids is a DTensor of another mesh")
        assert "is called with input_ids (3, 12)" in errors["uneven parts"] or "(1, 12)" in errors["uneven parts"]
        assert errors["parts that differ along pp"].startswith(
            "rank 2 passes another input_ids than rank 0, but inputs='local' wants one part of the batch for all ranks "
            "at dp 0"
        )


def _accumulate(rank: int) -> bool:
    """Tied embeddings are on both pipeline ranks; with one micro-batch gradients are reduced as they are made until
    no_sync; a batch of two samples cannot be cut over dp, so that its gradients are not Partial."""
    first, short, *others = _batch(0), {k: v[:2] for k, v in _batch(1).items()}, _batch(2), _batch(3)
    for micro_batches, strategy, batches in ((2, "fsdp", [first, short, *others]), (1, "ddp", [first, *others])):
        model, _ = tiny.gpt2(n_layer=1)
        options = dict(micro_batches=micro_batches, schedule="1f1b", strategy=strategy)
        parallel, reference = pair(model, device_mesh(MESH), first, **options)
        for again in range(2):  # the second time over what the first one left
            for step, batch in enumerate(batches):
                reference(**batch).loss.backward()
                with parallel.no_sync() if step < len(batches) - 1 else nullcontext():
                    (parallel(**batch).loss * 2).mul(0.5).backward()
                if not again and step == 0:
                    partial = {
                        n: p.grad.to_local()
                        for n, p in parallel.named_parameters()
                        if p.grad.placements[0].is_partial()
                    }
                    assert partial and "transformer.wte.weight" not in partial
                    assert sum(g.numel() * 4 for g in partial.values()) == parallel.unreduced_gradient_bytes
            _assert_gradients(parallel, reference, f"{strategy} {again}")
        for m in (parallel, reference):
            with parallel.no_sync():
                m(**others[0]).loss.backward()
            m.zero_grad()  # drops what waits
            m(**others[0])  # and a call that nobody differentiates adds nothing
            m(**first).loss.backward()
        _assert_gradients(parallel, reference, f"{strategy} after zero_grad")
    return True


@pytest.mark.gloo
@pytest.mark.slow
def test_gradients_that_wait_for_the_last_of_several_calls():
    assert all(gloo.run(4, _accumulate, seconds=240))


def test_which_axes_have_parts():
    wanted = {
        "pp=2": (),
        "pp=2,tp=2": (),
        "pp=2,x=2": ("x",),
        "pp=2,tp=2,dp_a=2,dp_b=2": ("dp_a", "dp_b"),
        "x=2,y=2": ("x",),
    }
    assert {text: data_axes(Mesh.parse(text)) for text in wanted} == wanted


class _Tied(torch.nn.Module):
    """Both stages have the table, and a call with another `factor` reads it in the first alone."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(3)
        self.embed, self.head, self.factor = torch.nn.Embedding(11, 4), torch.nn.Linear(4, 11), 1.0
        self.body = torch.nn.Linear(4, 4)
        self.head.weight = self.embed.weight
        self.head.bias.requires_grad_(False)

    def forward(self, ids):
        logits = self.head(self.body(self.embed(ids))) * self.factor
        return {"loss": torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())}


def _captured_again(rank: int) -> list[tuple[str, ...]]:
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    parallel, reference = pair(_Tied(), device_mesh("pp=2"), {"ids": ids}, micro_batches=2, schedule="gpipe")
    for factor in (1.0, 0.5):
        for model in (parallel, reference):
            model.get_submodule("").factor = factor
            for parameter in model.parameters():
                parameter.grad = None
                parameter.requires_grad_(parameter.requires_grad or factor < 1)  # the bias trains in the second call
            model(ids=ids)["loss"].backward()
        for name, parameter in parallel.named_parameters():
            wanted = reference.get_parameter(name).grad
            assert (parameter.grad is None) == (wanted is None), (rank, factor, name)
            if wanted is not None:
                assert_close(parameter.grad, full(wanted), f"{name}, factor {factor}", 2e-5)
    return list(parallel.plan.pipeline.owners)


@pytest.mark.gloo
def test_a_second_capture_gives_every_gradient_to_all_that_hold_the_parameter():
    owners = gloo.run(2, _captured_again)[0]
    assert all("embed.weight" in names for names in owners), owners


def _thawed_on_one_rank(rank: int) -> str:
    """Return what rank 0 is told that alone has a parameter which trains from the second call on."""
    ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(0))
    model = _Tied()
    model.head.weight = torch.nn.Parameter(torch.ones(11, 4))
    model.embed.requires_grad_(False)
    os.environ["AUTOPAR_TIMEOUT_S"] = "1"  # the error of the one does not wait for it, that of the other does
    parallel = autopar.compile(model, device_mesh("pp=2"), {"ids": ids}, micro_batches=2, schedule="gpipe")
    parallel(ids=ids)["loss"].backward()
    parallel.embed.requires_grad_(True)
    start = time.monotonic()
    if rank == 0:
        with pytest.raises(DesyncError) as caught:
            parallel(ids=ids)
        assert time.monotonic() - start < 8
        return str(caught.value)
    with pytest.raises(RankFailure) as caught:
        parallel(ids=ids)["loss"].backward()
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.gloo
def test_a_parameter_that_begins_to_train_on_one_rank_alone_is_an_error_at_once():
    first, second = gloo.run(2, _thawed_on_one_rank)
    assert "rank 1 is not and has gone on" in first and "set requires_grad of embed.weight before" in first, first
    assert "rank 0" in second, second


def _looked_up(rank: int) -> None:
    """Check what a rank says of a parameter of the other stage; the model works as before, and so do copies."""
    model = torch.nn.Sequential(*(torch.nn.Linear(6, 6) for _ in range(2)), torch.nn.BatchNorm1d(6), Summed())
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(0))
    parallel, reference = pair(model, device_mesh("pp=2"), (x,), micro_batches=1, schedule="gpipe")
    parallel(x).backward(), reference(x).backward()
    for made in (parallel, copy.deepcopy(parallel)):
        for name, _ in [*reference.named_parameters(), *reference.named_buffers()]:
            path, _, leaf = name.rpartition(".")
            layer, is_mine = made.get_submodule(path), rank in made.pp_ranks_of(name)
            assert hasattr(layer, leaf) == is_mine
            if not is_mine:
                with pytest.raises(AbsentError, match=f"{name} is on rank {1 - rank}, .* than those of rank {rank}"):
                    getattr(layer, leaf)
                assert getattr(layer, leaf, None) is None and made.elsewhere[name].is_meta
    torch.save(parallel, plain := io.BytesIO())
    plain.seek(0)
    loaded = torch.load(plain, weights_only=False)
    assert all(type(m._parameters) is dict and type(m._buffers) is dict for m in loaded.modules())
    parallel.eval()  # captured anew
    assert torch.allclose(loaded.eval()(x), parallel(x) if rank else loaded(x), atol=1e-5)
    if not rank:
        parallel(x)


class Summed(torch.nn.Module):
    def forward(self, x):
        return x.square().mean()


@pytest.mark.gloo
def test_a_parameter_of_another_stage_says_where_it_is():
    gloo.run(2, _looked_up)
