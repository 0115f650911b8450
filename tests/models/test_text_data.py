"""A user's text as batches: documents in order, every sequence once an epoch, and the same again from a position."""

from __future__ import annotations

import json

import pytest
import torch

from autopar.errors import InputError
from autopar.models.text_data import Packed, tokens_of


def test_every_sequence_is_there_once_an_epoch():
    stream = Packed(torch.arange(23), batch=2, seq=3, seed=1)  # 7 sequences, two tokens are left
    rows = torch.cat([next(stream)["input_ids"] for _ in range(7)])
    first, second = rows[:7, 0].tolist(), rows[7:, 0].tolist()
    assert sorted(first) == sorted(second) == list(range(0, 21, 3)) and first != second
    assert torch.equal(rows, rows[:, :1] + torch.arange(3))
    again = Packed(torch.arange(23), batch=2, seq=3, seed=1, position=5)
    assert torch.equal(next(again)["labels"], rows[10:12]) and again.position == 6


def test_without_a_tokenizer_a_token_is_a_byte(tmp_path):
    (tmp_path / "x.jsonl").write_text('{"text": "a"}\n\n{"text": "\u00e9\u2028", "more": 1}\n', encoding="utf-8")
    (tmp_path / "x.txt").write_text("b\nc")
    assert bytes(tokens_of(tmp_path / "x.jsonl", None, 256).tolist()) == "a\n\u00e9\u2028\n".encode()
    assert bytes(tokens_of(tmp_path / "x.txt", tmp_path, 256).tolist()) == b"b\nc\n"


def test_the_tokenizer_of_a_folder_ends_each_document(tmp_path):
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<unk>": 0, "</s>": 1, "a": 2, "b": 3}, "<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(tmp_path)
    (tmp_path / "x.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in ("a b", "c")))
    assert tokens_of(tmp_path / "x.jsonl", tmp_path, 4).tolist() == [2, 3, 1, 0, 1]
    with pytest.raises(InputError, match="has the token 3, the model a vocabulary of 3"):
        tokens_of(tmp_path / "x.jsonl", tmp_path, 3)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(InputError, match="cannot be read"):
        tokens_of(tmp_path / "x.jsonl", tmp_path, 4)


def test_files_that_are_no_text(tmp_path):
    (tmp_path / "x.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(InputError, match="is not text"):
        tokens_of(tmp_path / "x.txt", None, 256)
    with pytest.raises(InputError, match="cannot read"):
        tokens_of(tmp_path / "none.txt", None, 256)
