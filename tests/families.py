"""Tiny Hugging Face models built from their configurations, without dropout: (model, keyword arguments of a call)."""

from __future__ import annotations

import torch


def gpt2(batch: int = 8, seq: int = 16):
    import transformers

    config = transformers.GPT2Config(
        vocab_size=128, n_positions=64, n_embd=32, n_layer=2, n_head=4, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config), _tokens(batch, seq)


def llama(batch: int = 8, seq: int = 16):
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config), _tokens(batch, seq)


def bert(batch: int = 8, seq: int = 16):
    import transformers

    config = transformers.BertConfig(
        vocab_size=128, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=64, num_labels=3, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    tokens = _tokens(batch, seq)
    return transformers.BertForSequenceClassification(config), tokens | {"labels": torch.randint(0, 3, (batch,))}


def _tokens(batch: int, seq: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 100, (batch, seq))
    return {"input_ids": ids, "labels": ids.clone()}


FAMILIES = {"gpt2": gpt2, "llama": llama, "bert": bert}
