"""Outputs of models of transformers have a cache's place exactly where the model returns one."""

from __future__ import annotations

import copy
import logging
import pickle

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    BertConfig,
    BertModel,
    GPT2Config,
    GPT2LMHeadModel,
    MambaConfig,
    MambaForCausalLM,
    RwkvConfig,
    RwkvForCausalLM,
)

from autopar import compiler
from autopar.errors import AbsentError, AutoparError
from autopar.frontend.no_cache import NoCache

SIZES = dict(vocab_size=13, hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=12, n_embd=8,
             n_layer=1, n_head=2, attention_hidden_size=8, context_length=16, pad_token_id=0, bos_token_id=1,
             eos_token_id=2)  # fmt: skip
BART = dict(vocab_size=13, d_model=8, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_ffn_dim=12,
            decoder_attention_heads=2, encoder_ffn_dim=12, forced_eos_token_id=None)  # fmt: skip
MODELS = {
    "decoder": lambda: GPT2LMHeadModel(GPT2Config(**SIZES)),
    "encoder": lambda: BertModel(BertConfig(**SIZES)),
    "encoder and decoder": lambda: BartForConditionalGeneration(BartConfig(**BART)),
    "state": lambda: RwkvForCausalLM(RwkvConfig(**SIZES | {"num_hidden_layers": 2})),
    "mamba": lambda: MambaForCausalLM(MambaConfig(**SIZES, state_size=4)),
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "kind, training, labelled",
    [
        ("decoder", True, True),
        ("encoder", True, False),
        ("encoder and decoder", True, True),
        ("encoder and decoder", False, False),
        ("state", True, False),
        ("state", False, False),
        ("mamba", True, True),
        ("mamba", False, False),
    ],
)
def test_a_cache_has_its_place(kind, training, labelled, caplog, monkeypatch):
    model = MODELS[kind]().train(training)
    batch = {"input_ids": torch.arange(1, 9).view(2, 4)}
    if labelled:
        batch["labels"] = batch["input_ids"]
    expected = list(model(**batch))
    logging.Logger.warning_once.cache_clear()  # else it would have warned already
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)
    with caplog.at_level("WARNING"):
        returns = compiler.trace(model, batch).returns
        assert list(returns.rebuild([torch.zeros(1)] * returns.count)) == expected
    assert "deprecated" not in caplog.text


def test_whatever_reads_it_is_told():
    cache = NoCache()
    for read in (lambda: cache.get_seq_length(), lambda: cache[0], lambda: len(cache), lambda: [*cache]):
        with pytest.raises(AbsentError, match="use_cache=False"):
            read()
    assert not hasattr(cache, "dtype") and issubclass(AbsentError, AutoparError)
    assert isinstance(pickle.loads(pickle.dumps(copy.deepcopy(cache))), NoCache)
