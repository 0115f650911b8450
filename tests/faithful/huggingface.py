"""Models of transformers, with what their users switch on and off."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from .program import Topic, ids

huggingface = Topic(__name__)


def _llama(**settings):
    sizes = dict(vocab_size=23, hidden_size=12, intermediate_size=20, num_hidden_layers=1, num_attention_heads=2,
                 num_key_value_heads=2, max_position_embeddings=16, use_cache=False)  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**sizes | settings))


def _gpt2(**settings):
    sizes = dict(
        vocab_size=23, n_embd=12, n_layer=1, n_head=2, n_positions=16, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return GPT2LMHeadModel(GPT2Config(**sizes | {"use_cache": False} | settings))


def _batch(seed: int, size: int = 3, length: int = 6) -> dict:
    tokens = ids(seed, 23, size, length)
    mask = torch.ones_like(tokens)
    mask[0, length - 2 :] = 0
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def _loss(run):
    run.loss = lambda out: out.loss
    return run


@huggingface(tolerance=1e-4)
def loss_and_logits():
    """A loss that reads both of what the model returns."""

    def script(run):
        run.loss = lambda out: out.loss + 0.1 * out.logits.softmax(-1).square().mean()
        run(1)
        run(2)

    return _llama(), _batch, script


@huggingface(tolerance=1e-4)
def label_smoothing_outside():
    """The Trainer's label smoothing reads the logits and drops the loss."""

    def script(run):
        def smoothed(out):
            log_probs = out.logits[:, :-1].log_softmax(-1)
            return 0.9 * out.loss - 0.1 * log_probs.mean()

        run.loss = smoothed
        run(1)

    return _gpt2(), _batch, script


@huggingface(tolerance=1e-4)
def checkpointing_enabled_between():
    """gradient_checkpointing_enable() and _disable() between calls."""

    def script(run):
        _loss(run)(1)
        run.model.gradient_checkpointing_enable()
        run(2)
        run.model.gradient_checkpointing_disable()
        run(3)

    return _llama(), _batch, script


@huggingface(tolerance=1e-4)
def checkpointing_enabled_before():
    """gradient_checkpointing_enable(use_reentrant=False) before compile."""
    model = _gpt2()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return model, _batch, lambda run: _loss(run)(1)


@huggingface(tolerance=1e-4)
def hidden_states_asked_for():
    """output_hidden_states as an argument, in some of the calls."""

    def script(run):
        run.loss = lambda out: out.loss + (out.hidden_states[1].mean() if out.hidden_states else 0)
        run(1)
        run.call(**_batch(2), output_hidden_states=True)

    return _llama(), _batch, script


@huggingface(tolerance=1e-4)
def tuple_instead_of_output():
    """return_dict=False."""

    def script(run):
        run.loss = lambda out: out[0]
        run.call(**_batch(1), return_dict=False)

    return _gpt2(), _batch, script


@huggingface(tolerance=1e-4)
def evaluation_and_lengths():
    """Evaluation in batches of other sizes and lengths."""

    def script(run):
        _loss(run)(1)
        run.model.eval()
        with torch.no_grad():
            for seed, (size, length) in enumerate(((2, 5), (3, 7), (1, 6))):
                run.call(**_batch(seed, size, length))
        run.model.train()
        run(2)

    return _llama(), _batch, script


@huggingface(tolerance=1e-4)
def without_labels():
    """Planned with labels, called without them."""

    def script(run):
        _loss(run)(1)
        run.loss = lambda out: out.logits.square().mean()
        run.call(**{k: v for k, v in _batch(2).items() if k != "labels"})

    return _llama(), _batch, script


@huggingface(tolerance=1e-4)
def preferences_against_a_reference():
    """DPO: log probabilities of chosen and rejected answers, against a frozen copy (Rafailov et al. 2023)."""

    def script(run):
        torch.manual_seed(6)
        reference = copy.deepcopy(_llama()).requires_grad_(False)

        def log_prob(model, batch):
            out = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])
            chosen = out.logits[:, :-1].log_softmax(-1).gather(2, batch["input_ids"][:, 1:, None])[..., 0]
            return (chosen * batch["attention_mask"][:, 1:]).sum(1)

        margin = 0.0
        for sign, seed in ((1, 1), (-1, 2)):
            margin = margin + sign * (log_prob(run.model, _batch(seed)) - log_prob(reference, _batch(seed)))
        (-F.logsigmoid(0.1 * margin).mean()).backward()
        run.record(margin=margin)

    return _llama(), lambda seed: {k: v for k, v in _batch(seed).items() if k != "labels"}, script


@huggingface(tolerance=1e-4)
def embeddings_as_input():
    """inputs_embeds that require a gradient, as in prompt tuning."""

    def script(run):
        torch.manual_seed(7)
        prompt = torch.nn.Parameter(torch.randn(3, 4, 12) / 3)
        out = run.model(inputs_embeds=prompt)
        out.logits.log_softmax(-1)[..., 0].sum().backward()
        run.record(gradient=prompt.grad, logits=out.logits)

    return _llama(), lambda seed: {"inputs_embeds": torch.randn(3, 4, 12)}, script


@huggingface(tolerance=1e-4)
def config_changed_between():
    """A setting of the config that the forward reads is changed between calls."""

    def script(run):
        _loss(run)(1)
        run.model.config.output_hidden_states = True
        run(2)

    return _gpt2(), _batch, script


@huggingface(tolerance=1e-4, refused="no cache")
def cache_returned():
    """A model whose configuration returns a cache beside the logits, which is read."""

    def script(run):
        out = run.model(**_batch(1))
        run.record(loss=out.loss, names=list(out))
        run.record(length=out.past_key_values.get_seq_length(), keys=out.past_key_values.layers[0].keys)

    return _llama(use_cache=True), _batch, script


@huggingface(tolerance=1e-4)
def cache_not_read():
    """Outputs are counted, and looked up by number, where a cache is among them."""

    def script(run):
        out = run.model(**_batch(1))
        out[0].backward()
        run.record(names=list(out), logits=out[1], encoded=out[3], has_cache=out.past_key_values is not None)
        run.model.eval()
        with torch.no_grad():
            out = run.model(**_batch(2))
        run.record(names=list(out), count=len(out.to_tuple()))

    sizes = dict(vocab_size=23, d_model=12, d_kv=4, d_ff=20, num_layers=1, num_heads=2, dropout_rate=0.0)
    return T5ForConditionalGeneration(T5Config(**sizes, decoder_start_token_id=0)), _batch, script


@huggingface(tolerance=1e-4, refused="cache")
def cache_in_a_tuple():
    """return_dict=False, where a cache would be one of the tuple's elements."""

    def script(run):
        run.record(count=len(run.model(**_batch(1), return_dict=False)))

    return _gpt2(use_cache=True), _batch, script


@huggingface(tolerance=1e-4, refused="cache")
def cache_given_back():
    """A later call goes on with the cache of an earlier one."""

    def script(run):
        with torch.no_grad():
            out = run.model(input_ids=ids(1, 23, 2, 4))
            more = run.model(input_ids=ids(2, 23, 2, 1), past_key_values=out.past_key_values)
        run.record(logits=more.logits)

    return _llama(use_cache=True).eval(), lambda seed: {"input_ids": ids(seed, 23, 2, 4)}, script


@huggingface(refused="save_pretrained")
def embeddings_resized():
    """resize_token_embeddings on the compiled model."""

    def script(run):
        _loss(run)(1)
        run.model.resize_token_embeddings(25)
        run(2)

    return _gpt2(), _batch, script
