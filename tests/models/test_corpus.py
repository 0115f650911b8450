import itertools

import pytest
import torch

from autopar.errors import ModelError
from autopar.models import build
from autopar.models.corpus import batches, text


def test_the_text_is_english_of_the_promised_size():
    assert 60_000 < len(text()) < 100_000
    assert text().isascii() and text().count(" the ") > 200
    assert "Shall I compare thee to a summer's day?" in text()


def test_batches_are_windows_of_the_text():
    batch = next(batches(batch=3, seq=20))
    assert batch["input_ids"].shape == (3, 20) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].data_ptr() != batch["labels"].data_ptr()
    for row in batch["input_ids"]:
        assert bytes(row.tolist()).decode() in text()


def test_the_same_seed_gives_the_same_batches_and_another_seed_others():
    def first(seed):
        return torch.stack([b["input_ids"] for b in itertools.islice(batches(2, 16, seed=seed), 5)])

    assert torch.equal(first(1), first(1))
    assert not torch.equal(first(1), first(2))
    assert len({row.numpy().tobytes() for row in first(1).flatten(0, 1)}) == 10


def test_resumes_at_a_position():
    stream = batches(2, 16, seed=3)
    for _ in range(7):
        next(stream)
    resumed = batches(2, 16, seed=3, position=stream.position)
    assert stream.position == 7
    assert torch.equal(next(stream)["input_ids"], next(resumed)["input_ids"])


def test_every_window_can_be_drawn_up_to_the_whole_text():
    assert bytes(next(batches(1, len(text())))["input_ids"][0].tolist()).decode() == text()


@pytest.mark.parametrize("options", [dict(vocab=255), dict(seq=10**6), dict(seq=0), dict(batch=0)])
def test_impossible_batches_are_refused(options):
    with pytest.raises(ModelError):
        batches(**(dict(batch=1, seq=8) | options))


def test_a_tiny_model_learns_from_it():
    model, _ = build("llama-tiny", batch=1, seq=8, device="cpu")
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for batch in itertools.islice(batches(16, 64), 40):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert 5.0 < losses[0] < 6.0  # ln 256 = 5.55: a fresh model guesses evenly
    assert losses[-1] < 2.9  # the frequencies of single letters alone give 3.13 nats, of pairs 2.36
