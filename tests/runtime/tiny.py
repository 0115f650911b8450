"""Tiny models for the tests of the runtime: builders of (model, keyword inputs), the same on every process."""

from __future__ import annotations

import torch
from torch import nn

from autopar import models
from autopar.models.output import Output

NO_DROPOUT = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)


def gpt2(batch: int = 4, seq: int = 12, **options):
    """Hugging Face's GPT-2: Conv1D weights, fused attention weight, tied embedding and head."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    config = GPT2Config(
        **(dict(vocab_size=96, n_positions=32, n_embd=24, n_layer=2, n_head=4, **NO_DROPOUT) | options), use_cache=False
    )
    return GPT2LMHeadModel(config), _tokens(batch, seq)


def llama(batch: int = 4, seq: int = 12, **options):
    """Hugging Face's Llama with grouped query heads."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        **(
            dict(
                vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
                num_key_value_heads=2, max_position_embeddings=32,
            ) | options
        ),
        use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config), _tokens(batch, seq)


def bert(batch: int = 4, seq: int = 12, dropout: float = 0.0, layers: int = 2):
    """Hugging Face's BERT with a classifier on top."""
    from transformers import BertConfig, BertForSequenceClassification

    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=96, hidden_size=32, intermediate_size=48, num_hidden_layers=layers, num_attention_heads=4,
        max_position_embeddings=32, num_labels=3, hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
    )  # fmt: skip
    inputs = dict(input_ids=torch.randint(1, 96, (batch, seq)), labels=torch.randint(0, 3, (batch,)))
    return BertForSequenceClassification(config), inputs


def own(text: str, batch: int = 4, seq: int = 12):
    """One of autopar's own builders, such as "mlp:hidden=16"."""
    return models.build(text, batch=batch, seq=seq, device="cpu", seed=0)


def _tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 96, (batch, seq))
    return dict(input_ids=ids, labels=ids)


def regressor():
    """Two linear layers, a model that is compiled in a moment."""
    return Regressor(loss=True), dict(zip(("x", "target"), Regressor.batch()))


class Shuffled(nn.Module):
    """Draws in a way that has no formula."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(x[torch.randperm(len(x))])


class Regressor(nn.Module):
    """Two layers, x (B, I) -> (B, O); with `loss=True` it takes a target and returns an Output."""

    def __init__(self, inputs: int = 6, hidden: int = 16, outputs: int = 4, loss: bool = False):
        super().__init__()
        torch.manual_seed(0)
        self.up = nn.Linear(inputs, hidden)
        self.down = nn.Linear(hidden, outputs)
        if loss:
            self.forward = self.with_loss

    def forward(self, x):
        return self.down(torch.relu(self.up(x)))

    def with_loss(self, x, target):
        y = Regressor.forward(self, x)
        return Output(nn.functional.mse_loss(y, target), y)

    @staticmethod
    def batch(size: int = 8):
        """(x, target) for the default sizes."""
        generator = torch.Generator().manual_seed(1)
        return torch.randn(size, 6, generator=generator), torch.randn(size, 4, generator=generator)
