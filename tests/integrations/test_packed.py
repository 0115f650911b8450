"""Several documents in one row, as transformers' DataCollatorWithFlattening puts them, give what one process gives."""

from __future__ import annotations

import pytest
import torch
from transformers import DataCollatorWithFlattening, LlamaConfig, LlamaForCausalLM

from autopar.integrations.padding import padding_of
from tests.helpers import gloo
from tests.runtime.parity import assert_close, assert_same_gradients, device_mesh, pair


def _model() -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, use_cache=False,
                         num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64)  # fmt: skip
    return LlamaForCausalLM(config)


def _documents(seed: int) -> list[dict[str, list[int]]]:
    """Return four documents of lengths of their own."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(3, 9, (4,), generator=generator).tolist()
    return [{"input_ids": torch.randint(1, 64, (n,), generator=generator).tolist()} for n in lengths]


def _alone(model, documents: list[dict[str, list[int]]]) -> torch.Tensor:
    """Return the loss over all tokens of documents that the model sees one by one."""
    losses = []
    for document in documents:
        tokens = torch.tensor([document["input_ids"]])
        logits = model(input_ids=tokens).logits[0, :-1]
        losses.append(torch.nn.functional.cross_entropy(logits, tokens[0, 1:], reduction="none"))
    return torch.cat(losses).mean()


def _packed(rank: int, mesh_text: str, inputs: str, strategy: str) -> None:
    mesh, collator = device_mesh(mesh_text), DataCollatorWithFlattening()
    part = slice(rank // (mesh.size() // mesh.size(0)) * 2, None) if inputs == "local" else slice(None)
    rows = lambda seed: collator(_documents(seed)[part][: 2 if inputs == "local" else 4])  # noqa: E731
    pad = padding_of(collator, None) if inputs == "local" else None
    parallel, reference = pair(_model(), mesh, rows(0), inputs=inputs, strategy=strategy, pad=pad)
    for seed in (0, 1):
        found, whole = parallel(**rows(seed)), _documents(seed)
        expected = _alone(reference, whole)
        assert_close(found.loss, expected, f"documents one by one, seed {seed}")
        assert_close(found.loss, reference(**collator(whole)).loss, f"documents in one row, seed {seed}")
        found.loss.backward()
        expected.backward()
        assert_same_gradients(parallel, reference, 1e-4)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.gloo
@pytest.mark.parametrize("mesh, inputs, strategy", [
    ("dp=2", "local", "ddp"), ("tp=2", "global", "megatron"), ("cp=2", "global", "ring"),
    ("cp=2", "global", "all_gather_kv"),
    pytest.param("dp=2,tp=2", "local", None, marks=pytest.mark.slow),
])  # fmt: skip
def test_packed_documents(mesh, inputs, strategy):
    gloo.run(4 if "," in mesh else 2, _packed, mesh, inputs, strategy)
