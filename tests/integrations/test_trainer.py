"""transformers.Trainer and Accelerate train a compiled model as they train the plain one in one process."""

from __future__ import annotations

import functools
import os
import types

import pytest
import torch
import transformers
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from safetensors.torch import load_file
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import autopar
from autopar.errors import InputError
from tests.helpers import gloo
from tests.runtime.parity import device_mesh

STEPS, BATCH, RELATIVE = 50, 8, 1e-6


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96, n_positions=32, n_embd=24, n_layer=1, n_head=4, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _data() -> list[dict[str, torch.Tensor]]:
    """Return samples of which some have more labels than others."""
    generator, samples = torch.Generator().manual_seed(1), []
    for i in range(64):
        tokens = torch.randint(0, 96, (12,), generator=generator)
        labels = tokens.clone()
        labels[: i % 5] = -100
        samples.append({"input_ids": tokens, "labels": labels})
    return samples


def _correct(prediction) -> dict[str, float]:
    labels, logits = torch.as_tensor(prediction.label_ids), torch.as_tensor(prediction.predictions)
    return {"samples": len(labels), "correct": float((logits[:, :-1].argmax(-1) == labels[:, 1:]).sum())}


def _trained(kind: type, model, folder, parts: int, resume=None, **options) -> list[dict[str, float]]:
    """Train on batches of BATCH samples in so many parts and return what the Trainer has logged."""
    defaults = dict(
        max_steps=STEPS, learning_rate=1e-3, logging_steps=1, save_strategy="no", max_grad_norm=0.5, seed=3,
        eval_strategy="steps", eval_steps=STEPS // 2, per_device_eval_batch_size=BATCH // parts,
        per_device_train_batch_size=BATCH // parts, use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    arguments = TrainingArguments(str(folder), **(defaults | options))
    data = _data()
    trainer = kind(model, arguments, train_dataset=data, eval_dataset=data[: 2 * BATCH], compute_metrics=_correct)
    trainer.train(resume_from_checkpoint=resume)
    keys = ("loss", "grad_norm", "eval_loss", "eval_samples", "eval_correct", "step")
    return [{k: v for k, v in entry.items() if k in keys} for entry in trainer.state.log_history[:-1]]


def _as_launched(rank: int) -> None:
    """Say what torchrun says of a process."""
    world = str(torch.distributed.get_world_size())
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=world, LOCAL_WORLD_SIZE=world,
                      MASTER_ADDR="localhost", MASTER_PORT="1")  # fmt: skip


def _compiled(mesh: str, parts: int, **options):
    batch = torch.utils.data.default_collate(_data()[: BATCH // parts])
    options = ({"strategy": "fsdp"} if mesh == "dp=2" else {}) | options
    return autopar.compile(_model(), device_mesh(mesh), batch, inputs="local", **options)


def _on_autopar(rank: int, mesh: str, parts: int, folder, **options) -> list[dict[str, float]]:
    from autopar.integrations.trainer import Trainer

    _as_launched(rank)
    return _trained(Trainer, _compiled(mesh, parts), folder, parts, **options)


def _assert_same(found: list[dict[str, float]], expected: list[dict[str, float]]) -> None:
    assert [entry.keys() for entry in found] == [entry.keys() for entry in expected]
    for mine, wanted in zip(found, expected):
        for key, value in wanted.items():
            assert mine[key] == pytest.approx(value, rel=1e-5 if key == "grad_norm" else RELATIVE), (
                key,
                wanted["step"],
            )


def _start_anew() -> None:
    """Let Accelerate forget what it knows of the process."""
    for state in (AcceleratorState, PartialState, GradientState):
        state._reset_state() if hasattr(state, "_reset_state") else state._shared_state.clear()


@pytest.fixture
def plain(tmp_path):
    """Return a function that trains in one process and returns what transformers logs."""

    def train(**options):
        _start_anew()
        return _trained(transformers.Trainer, _model(), tmp_path / "plain", 1, **options)

    return train


@pytest.mark.gloo
@pytest.mark.parametrize(
    ("mesh", "parts", "options"),
    [
        pytest.param("dp=2", 2, dict(max_steps=STEPS), marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", 2, dict(max_steps=STEPS, eval_steps=STEPS // 2), marks=pytest.mark.slow),
        pytest.param("dp=2,tp=2", 2, dict(max_steps=8, gradient_accumulation_steps=2), marks=pytest.mark.slow),
        ("dp=2", 2, dict(max_steps=4, gradient_accumulation_steps=2)),
        # a loss outside of the model
        pytest.param("dp=2", 2, dict(max_steps=4, label_smoothing_factor=0.1), marks=pytest.mark.slow),
    ],
)
def test_losses_are_those_of_one_process(plain, tmp_path, mesh, parts, options):
    """Compare steps of AdamW with clipping, batches accumulated or not, and evaluation."""
    options = dict(eval_steps=4) | options
    expected = plain(**options)
    ranks = 2 if mesh == "dp=2" else 4
    for found in gloo.run(ranks, _on_autopar_with, mesh, parts, tmp_path / "autopar", options):
        _assert_same(found, expected)


def _on_autopar_with(rank, mesh, parts, folder, options):
    return _on_autopar(rank, mesh, parts, folder, **options)


def _resumed(rank: int, folder) -> None:
    """Compare six steps at once with three that another run takes up: the order of the data, and the optimizer."""
    options = dict(save_strategy="steps", save_steps=3, max_steps=6, eval_strategy="no")
    os.environ["AUTOPAR_CACHE"] = str(folder / "cache")  # the second run finds what the first one has traced
    whole = _on_autopar(rank, "dp=2", 2, folder / "whole", **options)
    found = _on_autopar(rank, "dp=2", 2, folder / "again", resume=folder / "whole/checkpoint-3", **options)
    assert [entry["loss"] for entry in found] == [entry["loss"] for entry in whole]


@pytest.mark.gloo
def test_a_checkpoint_goes_on_with_the_same_bits_and_opens_without_autopar(tmp_path):
    gloo.run(2, _resumed, tmp_path)
    last = [tmp_path / run / "checkpoint-6" for run in ("whole", "again")]
    one, other = ({k: v for f in sorted(x.glob("*.safetensors")) for k, v in load_file(f).items()} for x in last)
    assert one and one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)
    opened = GPT2LMHeadModel.from_pretrained(last[0])
    assert torch.equal(opened.transformer.wte.weight, one["transformer.wte.weight"])


def _with_accelerate(rank: int) -> None:
    """Compare a loop of Accelerate's, two batches a step, with the plain model's."""
    _as_launched(rank)
    data, losses = _data()[:32], []
    model, plain = _compiled("dp=2", 2), _model()
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (model, plain))
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    prepared, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=BATCH // 2))
    assert prepared is model
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    expected = []
    for i, batch in enumerate(DataLoader(data, batch_size=BATCH)):
        loss = plain(**batch).loss
        (loss / 2).backward()
        expected.append(loss.item())
        if i % 2:
            torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            reference.step()
            reference.zero_grad()
    assert losses == pytest.approx(expected, rel=RELATIVE)


@pytest.mark.gloo
def test_accelerate():
    gloo.run(2, _with_accelerate)


class OwnLoss(transformers.Trainer):
    """Sets a forward that calls the model's layers, and computes the loss of what that returns, as TRL's do."""

    def __init__(self, model, *args, **kwargs):
        before = model.forward

        @functools.wraps(type(model).forward)
        def forward(self, *args, by_token=False, labels=None, **kwargs):
            if not by_token:
                return before(*args, labels=labels, **kwargs)
            hidden = self.transformer(*args, **kwargs).last_hidden_state[:, :-1]
            logits = torch.nn.functional.linear(hidden, self.get_output_embeddings().weight)
            return torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels[:, 1:], reduction="none")

        model.forward = types.MethodType(forward, model)
        super().__init__(model, *args, **kwargs)

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        loss = model(**inputs, by_token=True).sum() / num_items_in_batch
        return loss * (self.accelerator.num_processes // self.get_tp_size())


def _own_loss(rank: int, mesh: str, parts: int, folder, options) -> list[dict[str, float]]:
    from autopar.integrations.trainer import ForTrainer

    class Mine(ForTrainer, OwnLoss):
        pass

    _as_launched(rank)
    return _trained(Mine, _compiled(mesh, parts), folder, parts, **options)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh", ["dp=2", pytest.param("dp=2,tp=2", marks=pytest.mark.slow)])
def test_a_trainer_with_a_forward_and_a_loss_of_its_own(tmp_path, mesh):
    options = dict(max_steps=6, eval_strategy="no", gradient_accumulation_steps=2)
    _start_anew()
    expected = _trained(OwnLoss, _model(), tmp_path / "plain", 1, **options)
    for found in gloo.run(2 if mesh == "dp=2" else 4, _own_loss, mesh, 2, tmp_path / "autopar", options):
        _assert_same(found, expected)


def _mistakes(rank: int, folder) -> None:
    from autopar.integrations.trainer import Trainer

    _as_launched(rank)
    arguments = TrainingArguments(str(folder), use_cpu=True, report_to="none")
    batch = torch.utils.data.default_collate(_data()[:4])
    os.environ["AUTOPAR_CACHE"] = str(folder / "cache")  # the second compile finds what the first one has traced
    whole = autopar.compile(_model(), device_mesh("dp=2"), batch, strategy="ddp")
    for model in (_model(), whole):
        with pytest.raises(InputError, match="gives each rank its own samples"):
            Trainer(model, arguments)
    other = autopar.compile(_model(), device_mesh("tp=1,dp=2"), batch, inputs="local", strategy="ddp")
    with pytest.raises(InputError, match="dp is not first on the mesh"):
        Trainer(other, arguments)


@pytest.mark.gloo
def test_mistakes(tmp_path):
    gloo.run(2, _mistakes, tmp_path)


class _Padding:
    """Pads a batch to its longest sample, as a collator of transformers with a tokenizer does."""

    tokenizer = types.SimpleNamespace(pad_token_id=3, padding_side="left")

    def __call__(self, samples: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
        longest = max(len(sample["input_ids"]) for sample in samples)
        values = {"input_ids": 3, "attention_mask": 0, "labels": -100}
        rows = lambda name, value: [  # noqa: E731
            torch.nn.functional.pad(s[name], (longest - len(s[name]), 0), value=value) for s in samples
        ]
        return {name: torch.stack(rows(name, value)) for name, value in values.items()}


def _of_lengths(kind: type, model, folder, parts: int) -> list[dict[str, float]]:
    """Train on samples of several lengths, and evaluate the last batch too."""
    samples = _data()[:32]
    for i, sample in enumerate(samples):
        kept = {name: value[: 5 + i * 5 % 8] for name, value in sample.items()}
        sample.update(kept, attention_mask=torch.ones_like(kept["input_ids"]))
    arguments = TrainingArguments(
        str(folder), max_steps=6, learning_rate=1e-3, logging_steps=1, save_strategy="no", seed=3, eval_steps=3,
        eval_strategy="steps", per_device_eval_batch_size=BATCH // parts, per_device_train_batch_size=BATCH // parts,
        use_cpu=True, report_to="none", disable_tqdm=True,
    )  # fmt: skip
    trainer = kind(model, arguments, _Padding(), samples, samples[: 2 * BATCH], compute_metrics=_correct)
    trainer.train()
    keys = ("loss", "grad_norm", "eval_loss", "eval_samples", "eval_correct", "step")
    return [{k: v for k, v in entry.items() if k in keys} for entry in trainer.state.log_history[:-1]]


def _of_lengths_by_rank(rank: int, mesh: str, folder) -> list[dict[str, float]]:
    from autopar.integrations.trainer import Trainer

    _as_launched(rank)
    data = [sample | {"attention_mask": torch.ones(12, dtype=torch.long)} for sample in _data()[: BATCH // 2]]
    model = autopar.compile(_model(), device_mesh(mesh), _Padding()(data), inputs="local")
    found = _of_lengths(Trainer, model, folder, 2)
    assert model.pads["input_ids"] == (3, "left") and model.pads["labels"] == (-100, "left")
    assert len({call.partition(";")[0] for call in model.captures}) > 3
    return found


@pytest.mark.gloo
@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_each_rank_pads_to_its_own_longest(tmp_path, mesh):
    """Ranks agree on a length by what the collator pads with; one process pads the whole batch."""
    _start_anew()
    expected = _of_lengths(transformers.Trainer, _model(), tmp_path / "plain", 1)
    for found in gloo.run(2 if mesh == "dp=2" else 4, _of_lengths_by_rank, mesh, tmp_path / "autopar"):
        _assert_same(found, expected)
