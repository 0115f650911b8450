"""LoRA on several processes: training, PEFT's folder both ways, several adapters, merged, disabled, checkpoints."""

from __future__ import annotations

import copy
import json

import pytest
import torch

import autopar
from autopar import AdaptError, LoRA
from tests.families import FAMILIES
from tests.helpers import gloo

from . import tiny
from .parity import assert_close, device_mesh, full, planned, train

pytestmark = pytest.mark.usefixtures("kept")

CONFIG = dict(
    r=4, lora_alpha=12, target_modules=["q_proj", "o_proj", "down_proj", "embed_tokens"], modules_to_save=["lm_head"]
)
EXPERTS = dict(
    r=2, lora_alpha=6, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"]
)


def mixture():
    torch.manual_seed(0)
    return FAMILIES["mixtral"](4, 8)


def _logits(model, batch) -> torch.Tensor:
    with torch.no_grad():
        return full(model(**batch).logits)


def _life(rank: int, mesh: str, plan: autopar.Plan, folder: str) -> None:
    base, batch = tiny.llama(num_hidden_layers=1)
    reference = copy.deepcopy(base)
    model = autopar.compile(base, device_mesh(mesh), batch, adapt=[LoRA(**CONFIG)], plan=plan)
    assert {n.rpartition("lora_")[2] for n in model.adapter_names} == {
        "A.weight",
        "B.weight",
        "embedding_A",
        "embedding_B",
    }
    plain = _logits(reference, batch)
    assert_close(_logits(model, batch), plain, "before training the adapters add nothing")
    train(model, batch, 3)
    trained = _logits(model, batch)
    assert (trained - plain).abs().max() > 1e-2
    model.save_adapter(f"{folder}/mine")
    if rank == 0:
        import peft

        theirs = peft.PeftModel.from_pretrained(copy.deepcopy(reference), f"{folder}/mine", is_trainable=True)
        assert_close(trained, _logits(theirs, batch), "PEFT's logits of our adapter", 1e-6)
        train(theirs, batch, 3)
        theirs.save_pretrained(f"{folder}/theirs")
    torch.distributed.barrier()
    _switching(rank, model, batch, trained, folder)
    with model.disable_adapter():
        off = _logits(model, batch)  # but for lm_head, which trains as a whole and is no adapter
    head = full(model.get_parameter("lm_head.weight")).detach()
    with torch.no_grad():
        reference.lm_head.weight.copy_(head)
    assert_close(off, _logits(reference, batch), "disabled")
    model.merge_adapter()
    assert_close(_logits(model, batch), trained, "merged", 1e-5)
    with pytest.raises(AdaptError, match="merged into the base"):
        model.save_adapter(f"{folder}/merged")
    model.save_pretrained(f"{folder}/whole")
    model.unmerge_adapter()
    assert_close(_logits(model, batch), trained, "unmerged", 1e-5)
    if rank == 0:
        whole = type(reference).from_pretrained(f"{folder}/whole")
        assert not any("lora" in name for name in whole.state_dict())
        assert_close(trained, _logits(whole, batch), "merged and saved", 1e-5)
    torch.distributed.barrier()


def _switching(rank: int, model, batch, trained: torch.Tensor, folder: str) -> None:
    """PEFT's adapter beside ours, and back again."""
    model.load_adapter(f"{folder}/theirs", "second")
    assert_close(_logits(model, batch), trained, "a loaded adapter is not active")
    model.set_adapter("second")
    second = _logits(model, batch)
    if rank == 0:
        import peft

        theirs = peft.PeftModel.from_pretrained(tiny.llama(num_hidden_layers=1)[0], f"{folder}/theirs")
        assert_close(second, _logits(theirs, batch), "our logits of PEFT's adapter", 1e-6)
    model.set_adapter("default")
    assert_close(_logits(model, batch), trained, "switched back", 1e-6)
    with pytest.raises(AdaptError, match="no adapter 'thrid'"):
        model.set_adapter("thrid")


@pytest.mark.gloo
def test_life(tmp_path):
    pytest.importorskip("peft")
    model, batch = tiny.llama(num_hidden_layers=1)
    plan = planned(model, "tp=2", batch, strategy="megatron_sp", adapt=[LoRA(**CONFIG)])
    gloo.run(2, _life, "tp=2", plan, str(tmp_path), seconds=240)


def _experts(rank: int, plan: autopar.Plan, folder: str) -> None:
    base, batch = mixture()
    reference = copy.deepcopy(base)
    model = autopar.compile(base, device_mesh("dp=2"), batch, adapt=[LoRA(**EXPERTS)], plan=plan)
    train(model, batch, 3)
    trained = _logits(model, batch)
    model.save_adapter(folder)
    if rank == 0:
        import peft

        assert_close(trained, _logits(peft.PeftModel.from_pretrained(reference, folder), batch), "experts", 1e-5)
    model.merge_adapter()
    assert_close(_logits(model, batch), trained, "merged experts", 1e-5)


@pytest.mark.slow
@pytest.mark.gloo
def test_experts(tmp_path):
    pytest.importorskip("peft")
    model, batch = mixture()
    plan = planned(model, "dp=2", batch, strategy="fsdp", adapt=[LoRA(**EXPERTS)])
    gloo.run(2, _experts, plan, str(tmp_path / "adapter"), seconds=240)


# in one process -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("options", [{"use_rslora": True}, {"use_dora": True}])
def test_merged_is_added(alone, options):
    base, batch = tiny.llama(num_hidden_layers=1)
    reference = copy.deepcopy(base)
    model = autopar.compile(
        base, alone, batch, adapt=[LoRA(target_modules="all-linear", r=3, **options)], strategy="ddp"
    )
    train(model, batch, 3)
    trained = _logits(model, batch)
    model.merge_adapter()
    model.merge_adapter()  # once is enough
    assert_close(_logits(model, batch), trained, "merged")
    model.unmerge_adapter()
    for name, parameter in reference.named_parameters():
        assert_close(model.get_parameter(name), parameter, name)


def test_accumulation_adds_up(alone):
    base, batch = tiny.regressor()
    model = autopar.compile(base, alone, batch, adapt=[LoRA(target_modules=["up"], r=2)], strategy="ddp")
    model(**batch).loss.backward()
    once = {n: full(p.grad).clone() for n, p in model.named_parameters() if p.grad is not None}
    assert once and all("lora_" in n for n in once)
    with model.no_sync():
        model(**batch).loss.backward()
    for name, gradient in once.items():
        assert_close(model.get_parameter(name).grad, 2 * gradient, name)


def test_weights_and_checkpoints(alone, tmp_path):
    """The base may be on the meta device; a checkpoint holds the adapters, a saved model does not."""
    base, batch = tiny.llama(num_hidden_layers=1)
    base.save_pretrained(tmp_path / "base")
    wanted = _logits(base, batch)
    with torch.device("meta"):
        empty, _ = tiny.llama(num_hidden_layers=1)
    adapt = [LoRA(target_modules=["q_proj"], r=2)]
    model = autopar.compile(empty, alone, batch, adapt=adapt, weights=tmp_path / "base", strategy="ddp")
    assert_close(_logits(model, batch), wanted, "read from files")
    train(model, batch, 3)
    autopar.save_checkpoint(tmp_path / "run", model, step=3)
    other = autopar.compile(tiny.llama(num_hidden_layers=1)[0], alone, batch, adapt=adapt, strategy="ddp")
    autopar.load_checkpoint(tmp_path / "run", other)
    assert torch.equal(_logits(other, batch), _logits(model, batch))
    model.save_pretrained(tmp_path / "again")
    assert_close(_logits(type(base).from_pretrained(tmp_path / "again"), batch), wanted, "the base alone")


def test_adapters_of_others(alone, tmp_path):
    base, batch = tiny.regressor()
    model = autopar.compile(base, alone, batch, adapt=[LoRA(target_modules=["up"], r=2)], strategy="ddp")
    model.save_adapter(tmp_path)
    for settings, message in (
        (dict(target_modules=["up"], r=3), "r is 2 there, 3 here"),
        (dict(target_modules=["down"], r=2), "of another model or other targets; missing: .*; unexpected: up.lora_A"),
        (dict(target_modules=["up", "down"], r=2), "missing: (.|\n)*down.lora_A"),
    ):
        base, batch = tiny.regressor()
        other = autopar.compile(base, alone, batch, adapt=[LoRA(**settings)], strategy="ddp")
        with pytest.raises(AdaptError, match=message):
            other.load_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    for text, message in (
        ("{", "not a configuration"),
        (json.dumps(config | {"peft_type": "IA3"}), "of a IA3 adapter"),
    ):
        (tmp_path / "adapter_config.json").write_text(text)
        with pytest.raises(AdaptError, match=message):
            model.load_adapter(tmp_path)
    with pytest.raises(AdaptError, match="cannot read"):
        model.load_adapter(tmp_path / "nowhere")


@pytest.mark.parametrize("change, message", [
    ({"init_lora_weights": "pissa"}, "changes the base too"), ({"layer_replication": [[0, 2]]}, "layer_replication"),
])  # fmt: skip
def test_adapters_that_mean_something_else(alone, tmp_path, change, message):
    base, batch = tiny.regressor()
    model = autopar.compile(base, alone, batch, adapt=[LoRA(target_modules=["up"], r=2)], strategy="ddp")
    model.save_adapter(tmp_path)
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    (tmp_path / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(AdaptError, match=message):
        model.load_adapter(tmp_path)


def test_merged_and_disabled_do_not_mix(alone, tmp_path):
    base, batch = tiny.regressor()
    model = autopar.compile(base, alone, batch, adapt=[LoRA(target_modules=["up"], r=2)], strategy="ddp")
    train(model, batch, 3)
    with model.disable_adapter():
        off = _logits(model, batch)
        with model.disable_adapter():
            pass
        assert torch.equal(_logits(model, batch), off)
        with pytest.raises(AdaptError, match="disabled"):
            model.merge_adapter()
    model.merge_adapter()
    with pytest.raises(AdaptError, match="merged"):
        autopar.save_checkpoint(tmp_path, model, step=1)


def test_shared_weights(alone, tmp_path):
    """GPT-2's embedding is its output head too: its adapter stands beside one of them, and cannot be merged into
    both."""
    base, batch = tiny.gpt2(n_layer=1)
    model = autopar.compile(base, alone, batch, adapt=[LoRA(target_modules=["wte"], r=2)], strategy="ddp")
    with pytest.raises(AdaptError, match="shared with another layer"):
        model.merge_adapter()
    peft = pytest.importorskip("peft")
    config = peft.LoraConfig(target_modules=["lm_head"], r=2, lora_alpha=8)
    peft.get_peft_model(tiny.gpt2(n_layer=1)[0], config).save_pretrained(tmp_path, save_embedding_layers=True)
    other = autopar.compile(
        tiny.gpt2(n_layer=1)[0], alone, batch, adapt=[LoRA(target_modules=["lm_head"], r=2)], strategy="ddp"
    )
    other.load_adapter(tmp_path)


def test_lengths_of_weights_that_are_read_later(alone, tmp_path):
    base, batch = tiny.llama(num_hidden_layers=1)
    base.save_pretrained(tmp_path)
    with pytest.raises(AdaptError, match="weights= comes later"):
        autopar.compile(
            base, alone, batch, adapt=[LoRA(target_modules=["q_proj"], r=2, use_dora=True)], weights=tmp_path
        )


def test_what_trains_besides_trains_while_adapters_are_off(alone):
    base, batch = tiny.regressor()
    adapt = [LoRA(target_modules=["up"], r=2, modules_to_save=["down"])]
    model = autopar.compile(base, alone, batch, adapt=adapt, strategy="ddp")
    with model.disable_adapter():
        model(**batch).loss.backward()
    assert [n for n, p in model.named_parameters() if p.grad is not None] == ["down.weight", "down.bias"]


def test_no_adapters(alone):
    base, batch = tiny.regressor()
    model = autopar.compile(base, alone, batch, strategy="ddp")
    with pytest.raises(AdaptError, match="no adapters"):
        model.merge_adapter()


def test_a_failed_compile_leaves_the_model_as_it_was(alone):
    base, batch = tiny.llama(num_hidden_layers=1)
    before = list(base.state_dict())
    with pytest.raises(autopar.AutoparError):
        autopar.compile(base, alone, batch, adapt=[LoRA(target_modules=["q_proj"], r=2)], strategy="no such")
    assert list(base.state_dict()) == before and all(p.requires_grad for p in base.parameters())
