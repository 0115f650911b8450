"""Adaptations of a pipeline: PEFT's folder both ways, several adapters, merged, also across a cut; packed and converted
bases.

A call returns its loss on every rank, so losses are what is compared.
"""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file

import autopar
from autopar import AdaptError, FakeQuant, LoRA, QLoRA
from autopar.models import build
from autopar.planner.pipeline.replan import with_owners
from tests.helpers import gloo

from . import tiny
from .parity import device_mesh, train

TARGETS = ["q_proj", "o_proj", "down_proj", "embed_tokens"]
CONFIG = dict(r=4, lora_alpha=12, target_modules=TARGETS, modules_to_save=["lm_head"])


def llama(layers: int = 1):
    return tiny.llama(batch=8, num_hidden_layers=layers)


def loss_of(model, batch) -> float:
    with torch.no_grad():
        return model(**batch).loss.item()


def same(a: float, b: float, tolerance: float = 1e-5) -> bool:
    return abs(a / b - 1) < tolerance


def _life(rank: int, mesh: str, folder: str, strategy: str | None) -> None:
    base, batch = llama()
    reference = copy.deepcopy(base)
    options = dict(adapt=[LoRA(**CONFIG)], strategy=strategy, micro_batches=2)
    model = autopar.compile(base, device_mesh(mesh), batch, **options)
    assert any(name in model.adapter_names for name in model.elsewhere)
    plain = loss_of(model, batch)
    train(model, batch, 3)
    trained = loss_of(model, batch)
    assert plain - trained > 1e-2
    model.save_adapter(f"{folder}/mine")
    if rank == 0:
        import peft

        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), f"{folder}/mine", is_trainable=True)
        assert same(trained, loss_of(theirs, batch))
        train(theirs, batch, 3)
        theirs.save_pretrained(f"{folder}/theirs")
        torch.save(loss_of(theirs, batch), f"{folder}/loss")
    dist.barrier()
    model.load_adapter(f"{folder}/theirs", "second")
    assert loss_of(model, batch) == trained
    model.set_adapter("second")
    assert same(loss_of(model, batch), torch.load(f"{folder}/loss"))
    model.set_adapter("default")
    assert loss_of(model, batch) == trained
    if rank == 0:
        tensors = load_file(f"{folder}/mine/adapter_model.safetensors")
        save_file(dict(list(tensors.items())[1:]), f"{folder}/mine/adapter_model.safetensors")
    dist.barrier()
    with pytest.raises(AdaptError, match="missing: "):  # also on the ranks that would not read it
        model.load_adapter(f"{folder}/mine")
    _merged(rank, model, reference, batch, trained, f"{folder}/merged")


def _merged(rank: int, model, reference, batch, trained: float, folder: str) -> None:
    model.merge_adapter()
    assert same(loss_of(model, batch), trained)
    model.save_pretrained(folder)
    model.unmerge_adapter()
    assert same(loss_of(model, batch), trained)
    if rank == 0:
        assert same(loss_of(type(reference).from_pretrained(folder), batch), trained)
    dist.barrier()


def _cut_at_an_adapter(rank: int, folder: str) -> None:
    """The stages' border is such that a weight is in the first stage and its adapter in the second."""
    base, batch = llama(2)
    reference, mesh = copy.deepcopy(base), device_mesh("pp=2")
    options = dict(adapt=[LoRA(target_modules=["q_proj"], r=2, use_dora=True)], micro_batches=2, schedule="1f1b")
    found = autopar.compile(copy.deepcopy(base), mesh, batch, **options)
    graph = found._captures.table[0].traced.captured.graph
    reads = next(n for n in graph.nodes if "layers_1_self_attn_q_proj_lora_B" in n.name).users
    cut = next(n.name for n in reads if n.meta["phase"] == "forward")
    plan = replace(found.plan, pipeline=replace(found.plan.pipeline, cuts=(cut,)))
    model = autopar.compile(
        base, mesh, batch, **options, plan=with_owners(found._captures.table[0].traced.captured, plan)
    )
    site = "model.layers.1.self_attn.q_proj"
    assert 0 in model.pp_ranks_of(f"{site}.weight") and model.pp_ranks_of(f"{site}.lora_B.weight") == (1,)
    train(model, batch, 3)
    _merged(rank, model, reference, batch, loss_of(model, batch), folder)


def _packed(rank: int, folder: str) -> None:
    """A rank has the packed weights of its stages."""

    def source(device: str):
        torch.manual_seed(0)
        return build(
            "llama:hidden=128,layers=2,heads=4,kv_heads=2,ffn=256,vocab=96,seq=16", batch=8, seq=8, device=device
        )

    (base, batch), mesh = source("cpu"), device_mesh("pp=2")
    options = dict(adapt=[QLoRA(r=4, target_modules=["q_proj", "down_proj"])], micro_batches=2)
    model = autopar.compile(base, mesh, batch, **options)
    assert any("weight_packed" in name for name in model.elsewhere)
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    train(model, batch, 2, optimizer=optimizer)
    autopar.save_checkpoint(f"{folder}/steps", model, optimizer, step=2)
    after = train(model, batch, 2, optimizer=optimizer)
    autopar.load_checkpoint(f"{folder}/steps", model, optimizer)
    assert train(model, batch, 2, optimizer=optimizer) == after
    model.save_adapter(f"{folder}/packed")


def _converted(rank: int, folder: str) -> None:
    """Every rank gets the whole model with integers; observers saw what their own stage did."""
    batch = dict(zip(("x", "target"), tiny.Regressor.batch()))
    config = FakeQuant("int8", activations="int8", activation_granularity="per_tensor")
    model = autopar.compile(tiny.Regressor(loss=True), device_mesh("pp=2"), batch, adapt=[config])
    assert model.plan.pipeline.micro_batches == 1  # an observer's range is that of the whole batch
    train(model, batch, 3, lr=3e-3)
    plain = autopar.convert(model, folder)
    assert same(loss_of(plain, batch), model(**batch).loss.item(), 5e-2)  # ranges of activations are other ones
    assert loss_of(autopar.load_quantized(tiny.Regressor(loss=True), folder), batch) == loss_of(plain, batch)


def _on_two(rank: int, folder: str) -> None:
    _cut_at_an_adapter(rank, f"{folder}/cut")
    _packed(rank, folder)
    _converted(rank, f"{folder}/integers")


@pytest.mark.slow
@pytest.mark.gloo
@pytest.mark.parametrize(
    "mesh, strategy", [("pp=2", None), pytest.param("pp=2,tp=2", "megatron", marks=pytest.mark.slow)]
)
def test_life(mesh, strategy, tmp_path):
    pytest.importorskip("peft")
    gloo.run(2 if mesh == "pp=2" else 4, _life, mesh, str(tmp_path), strategy, seconds=240)


@pytest.mark.slow
@pytest.mark.gloo
def test_cuts_at_an_adapter_and_packed_bases(tmp_path):
    gloo.run(2, _on_two, str(tmp_path), seconds=240)
