"""A text or JSONL file of a user's, or the shipped corpus, as batches for a model of a Hugging Face folder: tokenized,
documents packed one after the other, cut into sequences."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InputError
from .corpus import Batches

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")  # any of these
JSON_LINES = (".jsonl", ".ndjson", ".json")


class Packed(Batches):
    """Endless batches of all sequences of the tokens, each once an epoch in another order. Tokens that are left after
    the last whole sequence are not used."""

    @property
    def sequences(self) -> int:
        """Return the number of whole sequences."""
        return len(self.tokens) // self.seq

    def _starts(self) -> Tensor:
        places = torch.arange(self.position * self.batch, (self.position + 1) * self.batch)
        epochs = places // self.sequences
        return torch.cat([self._order(e)[places[epochs == e] % self.sequences] for e in epochs.unique().tolist()])

    def _order(self, epoch: int) -> Tensor:
        """Return where the sequences of an epoch start."""
        generator = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
        return torch.randperm(self.sequences, generator=generator) * self.seq


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer."""
    return any((folder / name).is_file() for name in TOKENIZERS)


def tokens_of(file: str | Path, folder: Path | None, vocab: int) -> Tensor:
    """Return the tokens of all documents of a file, by the tokenizer of a folder, with its end token after each;
    without one bytes, and a newline after each. Raises InputError if the file cannot be read as text or as JSON lines
    with a field text, and if a token exceeds the vocabulary."""
    encode = _tokenizer(folder) if folder is not None and has_tokenizer(folder) else _bytes
    tokens = torch.tensor([token for document in _documents(Path(file).expanduser()) for token in encode(document)])
    if len(tokens) and int(tokens.max()) >= vocab:
        raise InputError(
            f"{file} has the token {int(tokens.max())}, the model a vocabulary of {vocab}",
            fix="use the tokenizer that belongs to the model, or a model with a larger vocabulary",
        )
    return tokens


def _bytes(text: str) -> list[int]:
    return [*text.encode(), *b"\n"]


def _tokenizer(folder: Path) -> Callable[[str], list[int]]:
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        raise InputError(f"the tokenizer in {folder} cannot be read: {error}", fix="save it there again") from error
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return lambda text: tokenizer(text, verbose=False)["input_ids"] + end


def _documents(file: Path) -> Iterator[str]:
    """Iterate over the texts of a file: one a line of JSON, else the whole."""
    try:
        text = file.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {file}: {error.strerror}", fix="give --data a text or JSONL file") from error
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not text: {error}", fix="give --data a text or JSONL file in UTF-8") from error
    if file.suffix not in JSON_LINES:
        yield text
        return
    for number, line in enumerate(text.split("\n"), 1):
        if line.strip():
            try:
                yield json.loads(line)["text"] + ""
            except (ValueError, KeyError, TypeError) as error:
                raise InputError(
                    f'line {number} of {file} has no "text"', fix='write {"text": "..."} on each'
                ) from error
