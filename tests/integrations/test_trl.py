"""TRL's SFT and DPO trainers train a compiled model as they train the plain one in one process.

They set a forward of their own on the model, whose head is an autograd function that goes by chunks. The tests need
`pip install trl`, and are skipped without it; test_trainer.py has a trainer of the same kind.
"""

from __future__ import annotations

import importlib.util

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2LMHeadModel, PreTrainedTokenizerFast

import autopar
from tests.helpers import gloo
from tests.runtime.parity import device_mesh

from .test_trainer import BATCH, _as_launched, _assert_same, _model, _start_anew

pytestmark = pytest.mark.skipif(importlib.util.find_spec("trl") is None, reason="trl is not installed")
WORDS = [f"w{i}" for i in range(90)]


def _tokenizer() -> PreTrainedTokenizerFast:
    vocabulary = {word: i for i, word in enumerate(["<pad>", "<eos>", "<unk>", *WORDS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )  # fmt: skip


def _sentences(seed: int, shortest: int, longest: int) -> list[str]:
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(shortest, longest + 1, (64,), generator=generator).tolist()
    return [" ".join(WORDS[i] for i in torch.randint(0, 90, (n,), generator=generator)) for n in lengths]


def _trained(kind: str, bases: tuple[type, ...], compile_, folder, parts: int,
             steps: int = 6) -> list[dict[str, float]]:  # fmt: skip
    """Train on sentences of several lengths and return what the trainer has logged."""
    import trl
    from datasets import Dataset

    options = dict(
        output_dir=str(folder), per_device_train_batch_size=BATCH // parts, max_steps=steps, learning_rate=1e-3,
        bf16=False, logging_steps=1, use_cpu=True, report_to="none", save_strategy="no", max_grad_norm=0.5, seed=3,
        disable_tqdm=True, gradient_checkpointing=False,
    )  # fmt: skip
    words = torch.randint(3, 90, (BATCH // parts * (1 if kind == "sft" else 2), 13))
    batch = {"input_ids": words, "attention_mask": torch.ones_like(words)}
    more = {}
    if kind == "sft":
        base, arguments = trl.SFTTrainer, trl.SFTConfig(max_length=16, **options)
        data = Dataset.from_dict({"text": _sentences(1, 8, 12)})
        batch["labels"] = words
    else:
        base, arguments = trl.DPOTrainer, trl.DPOConfig(**options)
        texts = {"prompt": _sentences(1, 6, 6), "chosen": _sentences(2, 3, 5), "rejected": _sentences(3, 5, 5)}
        data = Dataset.from_dict(texts)
        more["ref_model"] = compile_(_own(), batch)
    trainer = type("Mine", (*bases, base), {})(
        model=compile_(_own(), batch), args=arguments, train_dataset=data, processing_class=_tokenizer(), **more
    )
    trainer.train()
    keys = ("loss", "grad_norm", "entropy", "mean_token_accuracy", "logps/chosen", "num_tokens", "step")
    return [{k: v for k, v in entry.items() if k in keys} for entry in trainer.state.log_history[:-1]]


def _own() -> GPT2LMHeadModel:
    model = _model()
    model.config.pad_token_id = 0
    return model


def _on_autopar(rank: int, mesh: str, parts: int, kind: str, folder, steps: int) -> list[dict[str, float]]:
    from autopar.integrations.trainer import ForTrainer

    _as_launched(rank)
    devices = device_mesh(mesh)
    return _trained(
        kind, (ForTrainer,), lambda model, batch: autopar.compile(model, devices, batch, inputs="local"), folder, parts,
        steps,
    )  # fmt: skip


@pytest.mark.gloo
@pytest.mark.parametrize(("kind", "mesh", "parts", "steps"), [
    ("sft", "dp=2", 2, 3),
    *[pytest.param(*case, marks=pytest.mark.slow) for case in
      (("sft", "dp=2", 2, 6), ("dpo", "dp=1", 1, 6), ("dpo", "dp=2", 2, 6), ("sft", "dp=2,tp=2", 2, 50),
       ("dpo", "dp=2,tp=2", 2, 50))],
])  # fmt: skip
def test_losses_are_those_of_one_process(tmp_path, kind, mesh, parts, steps):
    _start_anew()
    expected = _trained(kind, (), lambda model, batch: model, tmp_path / "plain", 1, steps)
    ranks = {"dp=1": 1, "dp=2": 2}.get(mesh, 4)
    for found in gloo.run(ranks, _on_autopar, mesh, parts, kind, tmp_path / "autopar", steps, seconds=400):
        _assert_same(found, expected)
