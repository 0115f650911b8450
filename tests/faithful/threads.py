"""Wrong numbers that users of other frameworks reported, each as a program: the same computation must be equal here.

Every docstring begins with the thread and says what went wrong there.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net, Tokens
from .program import Topic, ids, randn

threads = Topic(__name__)
VOCAB = 13


def _ragged(seed: int, batch: int = 4, length: int = 6) -> dict:
    """Tokens and labels, of which each sample ignores another number."""
    labels = ids(seed + 9, VOCAB, batch, length)
    for i in range(batch):
        labels[i, 1 + (i + seed) % length :] = -100
    return {"tokens": ids(seed, VOCAB, batch, length), "labels": labels}


def clip(model: nn.Module, most: float) -> torch.Tensor:
    """The norm over the whole model; under a pipeline the compiled model has a method for it."""
    if hasattr(model, "clip_grad_norm_"):
        return model.clip_grad_norm_(most)
    return nn.utils.clip_grad_norm_(model.parameters(), most)


class Language(Tokens):
    """Loss and logits; `loss_of(self, logits, labels)`."""

    def __init__(self, loss_of, **sizes):
        super().__init__(VOCAB, **sizes)
        self._loss_of = loss_of

    def forward(self, tokens, labels, count=None):
        logits = super().forward(tokens)
        loss = self._loss_of(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss if count is None else loss / count, "logits": logits}


def _mean(logits, labels):
    return F.cross_entropy(logits, labels, ignore_index=-100)


def _sum(logits, labels):
    return F.cross_entropy(logits, labels, ignore_index=-100, reduction="sum")


def _clipped_steps(run):
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.5)
    for seed in (1, 2):
        optimizer.zero_grad()
        run.model(**run.batch(seed))["loss"].backward()
        norm = clip(run.model, 0.2)
        optimizer.step()
        run.record(norm=norm)


@threads()
def smoothed_labels_over_a_cut_vocabulary():
    """Megatron-LM#7452, item 1: label smoothing with a vocabulary cut over ranks gave another loss on each of them."""
    return Language(lambda y, l: F.cross_entropy(y, l, label_smoothing=0.2)), _ragged


@threads()
def loss_beside_gathered_logits():
    """Megatron-LM#7452, item 2: labels with logits that are gathered first gave a loss that is off by the log of the
    ranks."""

    def script(run):
        run.loss = lambda out: out["loss"] + 0.1 * out["logits"].logsumexp(-1).mean()
        run(1)
        run(2)

    return Language(_mean), _ragged, script


@threads()
def second_head_with_other_token_counts():
    """Megatron-LM#7452, item 3: the loss of a multi-token-prediction head was divided by the counts of the rank's own
    tokens."""

    class TwoHeads(Tokens):
        def __init__(self):
            super().__init__(VOCAB)
            self.second = nn.Linear(12, VOCAB)

        def forward(self, tokens, labels):
            h = self.block(self.embed(tokens))
            first = _mean(self.head(h).flatten(0, 1), labels.flatten())
            return first + 0.3 * _mean(self.second(h)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    return TwoHeads(), _ragged


@threads()
def norm_shared_by_heads():
    """Megatron-LM#7452, item 11: the weight of a norm that all heads share kept the partial gradient of the rank's own
    heads."""

    class Normed(nn.Module):
        def __init__(self, heads: int = 4, width: int = 12):
            super().__init__()
            self.heads, self.qkv, self.proj = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)
            self.q_norm, self.k_norm, self.out_norm = (nn.RMSNorm(width // heads) for _ in range(3))

        def forward(self, x):
            batch, length, width = x.shape
            q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
            mixed = self.out_norm(F.scaled_dot_product_attention(self.q_norm(q), self.k_norm(k), v))
            return self.proj(mixed.transpose(1, 2).reshape(batch, length, width))

    return Normed(), lambda seed: (randn(seed, 4, 6, 12),)


@threads()
def sum_over_global_tokens_in_stages():
    """torchtitan#2972: with a pipeline the backward ran on the sum, and the division by all valid tokens came after
    it."""

    def batch(seed):
        made = _ragged(seed)
        return made | {"count": (made["labels"] != -100).sum()}

    return Language(_sum), batch, _clipped_steps


@threads()
def norm_of_replicated_shards():
    """torchtitan#2318: gradient norms of DDP and HSDP were a multiple of those of FSDP."""
    return Language(_mean), _ragged, _clipped_steps


@threads()
def norm_with_cut_layers():
    """torchtune#2420: clip_grad_norm_ failed or scaled by the wrong number of ranks with tensor parallelism."""
    return Language(_mean), _ragged, _clipped_steps


@threads()
def gradients_scaled_by_all_tokens():
    """torchtune#2172: gradients of summed losses, divided by all tokens of a step, were divided by the number of ranks
    as well."""

    def script(run):
        total = 0
        for part in (1, 2):
            batch = run.batch(part)
            total += (batch["labels"] != -100).sum().item()
            run.model(**batch)["loss"].backward()
        with torch.no_grad():
            for parameter in run.model.parameters():
                parameter.grad.mul_(1 / total)
        run.record()

    return Language(_sum), _ragged, script


@threads()
def count_of_tokens_with_a_cut_sequence():
    """transformers#46775: the count of tokens that the loss is divided by was divided once more by the ranks that cut
    the sequence."""

    def batch(seed):
        made = _ragged(seed, 2, 8)
        return made | {"count": int((made["labels"] != -100).sum())}

    return Language(_sum), batch


class Adapted(nn.Module):
    """Experts that all compute, weighted by a router, with low-rank deltas beside their frozen weights."""

    def __init__(self, experts: int = 3, width: int = 6, hidden: int = 10, rank: int = 2):
        super().__init__()
        self.router = nn.Linear(width, experts)
        self.up = nn.Parameter(torch.randn(experts, width, hidden) / 3, requires_grad=False)
        self.down = nn.Parameter(torch.randn(experts, hidden, width) / 3, requires_grad=False)
        self.up_a, self.up_b = (nn.Parameter(torch.randn(experts, *s) / 3) for s in ((width, rank), (rank, hidden)))
        self.down_a, self.down_b = (nn.Parameter(torch.randn(experts, *s) / 3) for s in ((hidden, rank), (rank, width)))

    def forward(self, x):
        h = torch.einsum("bi,eih->ebh", x, self.up) + torch.einsum("bi,eir,erh->ebh", x, self.up_a, self.up_b)
        h = F.silu(h)
        y = torch.einsum("ebh,eho->ebo", h, self.down) + torch.einsum("ebh,ehr,ero->ebo", h, self.down_a, self.down_b)
        return torch.einsum("ebo,be->bo", y, self.router(x).softmax(-1))


@threads()
def adapters_of_cut_experts():
    """Megatron-Bridge#5634: low-rank deltas of experts whose weights are cut over ranks had wrong outputs and
    gradients."""
    return Adapted(), lambda seed: (randn(seed, 6, 6),), _adapter_steps


def _adapter_steps(run):
    optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
    for seed in (1, 2):
        run(seed)
        optimizer.step()


@threads()
def norm_where_ranks_own_other_parameters():
    """DeepSpeed#8475: the clipping norm was an average over ranks although each owned other parameters."""
    return Language(_mean), _ragged, _clipped_steps


@threads()
def encoder_used_twice():
    """DeepSpeed#8224: with ZeRO-2 the reduced gradient missed one of two uses of a submodule in a step."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.encoder, self.head = Net(6, 9, 5), nn.Linear(5, 3)

        def forward(self, a, b):
            first, second = self.encoder(a), self.encoder(b)
            return {"loss": self.head(first).square().mean(), "aux": F.mse_loss(first, second)}

    def script(run):
        run.loss = lambda out: out["loss"] + 0.5 * out["aux"]
        run.accumulates = True
        run(1)
        run(2)

    return Twice(), lambda seed: (randn(seed, 8, 6), randn(seed + 5, 8, 6)), script


@threads()
def bias_of_a_row_cut_layer():
    """torchtitan#4332: the bias after a product that is summed over ranks had a gradient divided by their number."""
    return Net(6, 8, 5), lambda seed: (randn(seed, 4, 6),)
