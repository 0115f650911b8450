"""Language models and sequences: lengths that change, masks, tied weights, sampling."""

from __future__ import annotations

import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from .nets import Language, mlp
from .script import script


def _sentences(count: int, longest: int) -> list[torch.Tensor]:
    return [torch.randint(1, 16, (int(length),)) for length in torch.randint(3, longest, (count,))]


@script()
def language_model_with_tied_weights(parallel, log):
    """Next tokens, perplexity on a text held out, and greedy continuations token by token."""
    text = torch.randint(0, 16, (4, 6, 9))
    model = parallel(Language(), (text[0, :, :-1],))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for tokens in text[:3]:
        logits = model(tokens[:, :-1])
        loss = F.cross_entropy(logits.reshape(-1, 16), tokens[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())
    model.eval()
    with torch.no_grad():
        logits = model(text[3, :, :-1])
        log(perplexity=F.cross_entropy(logits.flatten(0, 1), text[3, :, 1:].flatten()).exp().item())
        prompt = text[3, :2, :3]
        for _ in range(3):
            prompt = torch.cat([prompt, model(prompt)[:, -1].argmax(-1, keepdim=True)], 1)
    log(continuations=prompt.tolist(), parameters=sum(p.numel() for p in model.parameters()))


@script()
def lengths_that_change(parallel, log):
    """Batches are padded to their longest sentence, and the last one is short; padding does not count."""
    sentences = _sentences(22, 12)
    model, optimizer = None, None
    for first in range(0, 22, 6):
        tokens = pad_sequence(sentences[first : first + 6], batch_first=True)
        if model is None:
            model = parallel(Language(), (tokens[:, :-1],))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        logits = model(tokens[:, :-1])
        targets = tokens[:, 1:]
        losses = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
        mask = targets != 0
        loss = (losses * mask).sum() / mask.sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), tokens=mask.sum().item(), right=((logits.argmax(-1) == targets) & mask).sum().item())


@script()
def masked_language_model(parallel, log):
    """Some tokens are masked; the others are ignored by the loss."""

    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(17, 12)
            layer = nn.TransformerEncoderLayer(12, 3, 24, dropout=0.0, batch_first=True)
            self.encoder, self.out = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), nn.Linear(12, 17)

        def forward(self, tokens, padding):
            return self.out(self.encoder(self.embed(tokens), src_key_padding_mask=padding))

    tokens, padding = torch.randint(1, 16, (6, 8)), torch.zeros(6, 8, dtype=torch.bool)
    padding[::2, -2:] = True
    model = parallel(Masked(), (tokens, padding))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        chosen = (torch.rand(6, 8) < 0.3) & ~padding
        labels = tokens.masked_fill(~chosen, -100)
        logits = model(tokens.masked_fill(chosen, 16), padding)
        loss = F.cross_entropy(logits.view(-1, 17), labels.view(-1), ignore_index=-100)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), accuracy=(logits.argmax(-1) == labels)[chosen].float().mean().item())


class Translator(nn.Module):
    """source and target tokens -> logits of the next target tokens."""

    def __init__(self):
        super().__init__()
        self.source, self.target = nn.Embedding(14, 12), nn.Embedding(14, 12)
        self.transformer = nn.Transformer(12, 3, 1, 1, 24, dropout=0.0, batch_first=True)
        self.out = nn.Linear(12, 14)

    def forward(self, source, target):
        mask = nn.Transformer.generate_square_subsequent_mask(target.shape[1])
        return self.out(self.transformer(self.source(source), self.target(target), tgt_mask=mask, tgt_is_causal=True))


@script()
def teacher_forcing_with_sampling(parallel, log):
    """Scheduled sampling: a share of the target's tokens is replaced by the model's own before the step."""
    source, target = torch.randint(0, 14, (3, 6, 7)), torch.randint(0, 14, (3, 6, 6))
    model = parallel(Translator(), (source[0], target[0, :, :-1]))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draw = random.Random(3)
    for step in range(3):
        inputs = target[step, :, :-1].clone()
        if draw.random() < 0.3 * (step + 1):
            with torch.no_grad():
                own = model(source[step], inputs).argmax(-1)
            use = torch.rand(inputs[:, 1:].shape) < 0.5
            inputs[:, 1:] = torch.where(use, own[:, :-1], inputs[:, 1:])
        logits = model(source[step], inputs)
        loss = F.cross_entropy(logits.flatten(0, 1), target[step, :, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), inputs=inputs)


@script()
def recurrent_seq2seq(parallel, log):
    """An encoder and a decoder of GRUs are two models; the decoder goes token by token, feeding itself at times."""

    class Encoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn = nn.Embedding(14, 8), nn.GRU(8, 10, batch_first=True)

        def forward(self, tokens):
            return self.rnn(self.embed(tokens))[1]

    class Decoder(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(14, 8), nn.GRU(8, 10, batch_first=True), nn.Linear(10, 14)

        def forward(self, token, hidden):
            y, hidden = self.rnn(self.embed(token), hidden)
            return self.out(y.squeeze(1)), hidden

    source, target = torch.randint(1, 14, (6, 5)), torch.randint(1, 14, (6, 4))
    encoder = parallel(Encoder(), (source,))
    decoder = parallel(Decoder(), (target[:, :1], torch.zeros(1, 6, 10)))
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (encoder, decoder)]
    draw = random.Random(1)
    for _ in range(2):
        for optimizer in optimizers:
            optimizer.zero_grad()
        hidden, token, loss = encoder(source), torch.zeros(6, 1, dtype=torch.long), 0.0
        for t in range(target.shape[1]):
            logits, hidden = decoder(token, hidden)
            loss = loss + F.cross_entropy(logits, target[:, t])
            token = target[:, t : t + 1] if draw.random() < 0.5 else logits.topk(1).indices.detach()
        loss.backward()
        for optimizer in optimizers:
            optimizer.step()
        log(loss=loss.item() / target.shape[1], last=token.flatten().tolist())


@script()
def truncated_backpropagation(parallel, log):
    """An LSTM reads a long text in pieces; its state goes on, its gradient does not."""

    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.rnn, self.out = nn.Embedding(14, 8), nn.LSTM(8, 10, batch_first=True), nn.Linear(10, 14)

        def forward(self, tokens, state):
            y, state = self.rnn(self.embed(tokens), state)
            return self.out(y), state

    text = torch.randint(0, 14, (4, 16))
    state = (torch.zeros(1, 4, 10), torch.zeros(1, 4, 10))
    model = parallel(Reader(), (text[:, :5], state))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for first in range(0, 15, 5):
        logits, state = model(text[:, first : first + 5], state)
        loss = F.cross_entropy(logits.reshape(-1, 14), text[:, first + 1 : first + 6].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.25)
        optimizer.step()
        state = tuple(s.detach() for s in state)
        log(loss=loss.item(), state=state[0])


@script()
def packed_sentences(parallel, log):
    """A bidirectional LSTM on sequences that are packed by their lengths inside of the model."""

    class Tagger(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(16, 8, padding_idx=0)
            self.rnn, self.out = nn.LSTM(8, 6, batch_first=True, bidirectional=True), nn.Linear(12, 4)

        def forward(self, tokens, lengths):
            packed = nn.utils.rnn.pack_padded_sequence(
                self.embed(tokens), lengths, batch_first=True, enforce_sorted=False
            )
            y, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=tokens.shape[1])
            return self.out(y)

    sentences = _sentences(6, 8)
    tokens, lengths = pad_sequence(sentences, batch_first=True), torch.tensor([len(s) for s in sentences])
    tags = torch.where(tokens > 0, tokens % 4, -100)
    model = parallel(Tagger(), (tokens, lengths))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = F.cross_entropy(model(tokens, lengths).flatten(0, 1), tags.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item())


@script()
def sequence_tags(parallel, log):
    """A loss over the active tokens alone, which the script picks by a mask; scores by tag."""
    tokens = pad_sequence(_sentences(8, 9), batch_first=True)
    active, tags = tokens > 0, tokens % 4
    model = parallel(nn.Sequential(nn.Embedding(16, 8), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 4)), (tokens,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(3):
        logits = model(tokens)
        loss = F.cross_entropy(logits[active], tags[active])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found = logits.argmax(-1)[active]
        log(loss=loss.item(), f=[((found == t) & (tags[active] == t)).sum().item() for t in range(4)])


@script()
def speech_with_ctc(parallel, log):
    """A CTC loss outside of the model, of lengths that differ."""
    audio, text = torch.randn(4, 12, 6), torch.randint(1, 5, (4, 4))
    lengths, letters = torch.tensor([12, 10, 11, 12]), torch.tensor([4, 3, 2, 4])
    model = parallel(mlp(6, 16, 5), (audio,))
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    criterion = nn.CTCLoss(blank=0, zero_infinity=True)
    for _ in range(3):
        scores = model(audio).log_softmax(-1)
        loss = criterion(scores.transpose(0, 1), text, lengths, letters)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=loss.item(), greedy=scores.argmax(-1)[0].unique_consecutive().tolist())


@dataclass
class Output:
    """Holds what a model with its loss inside returns."""

    logits: torch.Tensor
    loss: torch.Tensor | None = None
    hidden: tuple[torch.Tensor, ...] = ()


class WithLoss(Language):
    """A language model as libraries write it: keyword arguments, its loss inside, a dataclass or a tuple."""

    def forward(self, input_ids, attention_mask=None, labels=None, return_dict=True):
        hidden = self.embed(input_ids) if attention_mask is None else self.embed(input_ids) * attention_mask[..., None]
        logits = self.head(self.norm(self.block(hidden)))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Output(logits, loss, (hidden,)) if return_dict else (loss, {"logits": logits, "hidden": [hidden]})


@script()
def loss_inside_in_a_dataclass(parallel, log):
    """model(**batch).loss, and logits of the same call for a metric and for a penalty."""
    batch = {"input_ids": torch.randint(0, 16, (6, 8)), "attention_mask": torch.ones(6, 8, dtype=torch.long)}
    batch["labels"] = batch["input_ids"].masked_fill(torch.rand(6, 8) < 0.2, -100)
    model = parallel(WithLoss(), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        outputs = model(**batch)
        loss = outputs.loss + 1e-3 * outputs.logits.logsumexp(-1).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log(loss=outputs.loss.item(), kind=type(outputs).__name__, top=outputs.logits[:, -1].argmax(-1).tolist())
    model.eval()
    with torch.no_grad():
        log(hidden=model(batch["input_ids"]).hidden[0].mean().item(), loss=model(batch["input_ids"]).loss is None)


@script()
def loss_inside_in_a_tuple(parallel, log):
    """loss, more = model(...), with structures inside of structures."""
    tokens = torch.randint(0, 16, (6, 8))
    model = parallel(WithLoss(), {"input_ids": tokens, "labels": tokens, "return_dict": False})
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(3):
        loss, more = model(tokens, labels=tokens, return_dict=False)
        total = loss + 0.1 * more["hidden"][0].pow(2).mean()
        optimizer.zero_grad()
        total.backward()
        optimizer.step()
        log(loss=loss.item(), total=total.item(), names=list(more), shape=tuple(more["logits"].shape))


@script()
def bert_classifier(parallel, log):
    """A model of transformers, a schedule with warmup, and an evaluation by argmax."""
    from transformers import BertConfig, BertForSequenceClassification, get_linear_schedule_with_warmup

    config = BertConfig(vocab_size=32, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, num_labels=3,
                        intermediate_size=24, max_position_embeddings=16, hidden_dropout_prob=0.0,
                        attention_probs_dropout_prob=0.0)  # fmt: skip
    batch = {"input_ids": torch.randint(0, 32, (8, 10)), "labels": torch.randint(0, 3, (8,))}
    batch["attention_mask"] = (torch.arange(10) < torch.randint(4, 10, (8, 1))).long()
    model = parallel(BertForSequenceClassification(config), batch)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = get_linear_schedule_with_warmup(optimizer, 1, 4)
    for _ in range(3):
        outputs = model(**batch)
        outputs.loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        log(loss=outputs.loss.item(), rate=schedule.get_last_lr()[0])
    model.eval()
    with torch.no_grad():
        predictions = model(**batch).logits.argmax(dim=-1)
    log(accuracy=(predictions == batch["labels"]).float().mean().item())
