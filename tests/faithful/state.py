"""Buffers that the forward reads and writes: codebooks, counters, queues, and what users do with them."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Heads, Net
from .program import Topic, one

state = Topic(__name__)


class Codebook(nn.Module):
    """A VQ-VAE's quantizer with a codebook that follows the data (van den Oord et al. 2017, appendix A.1)."""

    def __init__(self, codes: int = 7, width: int = 6, decay: float = 0.9, write: str = "copy"):
        super().__init__()
        self.decay, self.write = decay, write
        codebook = torch.randn(codes, width)
        self.register_buffer("codebook", codebook)
        self.register_buffer("counts", torch.ones(codes))
        self.register_buffer("sums", codebook.clone())

    def forward(self, z):
        nearest = torch.cdist(z, self.codebook).argmin(1)
        quantized = F.embedding(nearest, self.codebook)
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, len(self.codebook)).to(z.dtype)
                self.counts.mul_(self.decay).add_(hot.sum(0), alpha=1 - self.decay)
                self.sums.mul_(self.decay).add_(hot.t() @ z, alpha=1 - self.decay)
                new = self.sums / self.counts.clamp(min=1e-3)[:, None]
                if self.write == "copy":
                    self.codebook.copy_(new)
                elif self.write == "data":
                    self.codebook.data = new
                else:
                    self.codebook = new
        commitment = F.mse_loss(z, quantized.detach())
        return z + (quantized - z).detach(), commitment, nearest


class VQVAE(nn.Module):
    def __init__(self, write: str):
        super().__init__()
        self.encoder, self.quantizer, self.decoder = nn.Linear(5, 6), Codebook(write=write), nn.Linear(6, 5)

    def forward(self, x):
        z, commitment, codes = self.quantizer(self.encoder(x))
        return {"loss": F.mse_loss(self.decoder(z), x) + 0.25 * commitment, "codes": codes}


@state()
def ema_codebook():
    """The codebook is written in place inside of no_grad."""
    return VQVAE("copy"), one(9, 5)


@state()
def ema_codebook_data():
    """The codebook's data is replaced."""
    return VQVAE("data"), one(9, 5)


@state()
def ema_codebook_assigned():
    """The codebook is assigned anew as an attribute."""
    return VQVAE("assign"), one(9, 5)


@state()
def ema_codebook_eval_between():
    """The codebook stands still in eval mode and goes on after it."""

    def script(run):
        run(1)
        run.model.eval()
        run(2)
        run.model.train()
        run(3)

    return VQVAE("copy"), one(9, 5), script


@state()
def call_counter():
    """An integer buffer counts the calls and scales the output."""

    class Counting(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros((), dtype=torch.long))

        def forward(self, x):
            self.calls += 1
            return super().forward(x) / self.calls

    return Counting(), one(4, 6)


@state()
def warmup_buffer():
    """A factor rises with a step buffer until it is clamped."""

    class Warming(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("step", torch.tensor(0.0))

        def forward(self, x):
            factor = torch.clamp(self.step / 2, max=1.0)
            with torch.no_grad():
                self.step.add_(1)
            return super().forward(x) * factor

    def script(run):
        for seed in range(4):
            run(seed)

    return Warming(), one(5, 6), script


class Queue(Net):
    """MoCo's queue of keys (He et al. 2020), and a buffer that points to where new ones are written."""

    def __init__(self):
        super().__init__(outputs=4)
        self.register_buffer("queue", F.normalize(torch.randn(4, 12), dim=0))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, x):
        q = F.normalize(super().forward(x), dim=1)
        logits = q @ self.queue.clone().detach()
        with torch.no_grad():
            self.enqueue(q)
        return logits


@state()
def queue_of_keys():
    """New keys are written where the pointer's tensor says."""

    class ByTensor(Queue):
        def enqueue(self, q):
            at = (self.pointer + torch.arange(q.shape[0])) % self.queue.shape[1]
            self.queue[:, at] = q.t()
            self.pointer[0] = (self.pointer[0] + q.shape[0]) % self.queue.shape[1]

    return ByTensor(), one(4, 6)


@state(refused="value")
def queue_with_int_pointer():
    """New keys are written from `int(self.pointer)` on, as in the published code."""

    class ByNumber(Queue):
        def enqueue(self, q):
            at = int(self.pointer)
            self.queue[:, at : at + len(q)] = q.t()
            self.pointer[0] = (at + len(q)) % 12

    return ByNumber(), one(4, 6)


@state()
def lazily_registered():
    """A buffer is registered by the first forward."""

    class Lazy(Net):
        def forward(self, x):
            if not hasattr(self, "center"):
                self.register_buffer("center", x.detach().mean(0))
            return super().forward(x - self.center)

    return Lazy(), one(4, 6)


@state()
def none_buffer_filled():
    """A buffer that starts as None is filled by the first forward."""

    class Lazy(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("center", None)

        def forward(self, x):
            if self.center is None:
                self.center = x.detach().mean(0)
            return super().forward(x - self.center)

    return Lazy(), one(4, 6)


@state()
def shared_buffer():
    """Two modules hold one buffer, and one of them writes it."""

    class Reader(Net):
        def forward(self, x):
            return super().forward(x) * self.scale

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = Reader(), Reader()
            scale = torch.ones(3)
            self.a.register_buffer("scale", scale)
            self.b.register_buffer("scale", scale)

        def forward(self, x):
            self.a.scale.mul_(1.5)
            return self.a(x) + self.b(x)

    return Pair(), one(4, 6)


@state()
def buffer_set_between_calls():
    """The user writes, fills and replaces a buffer between calls."""

    class Scaled(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("scale", torch.ones(3))

        def forward(self, x):
            return super().forward(x) * self.scale

    def script(run):
        run(1)
        run.model.scale.fill_(2.0)
        run(2)
        run.model.scale = torch.tensor([1.0, 0.5, 3.0])
        run(3)
        run.model.scale.data = torch.zeros(3)
        run(1)

    return Scaled(), one(4, 6), script


@state()
def buffer_returned():
    """A buffer is written and returned; the user then writes into what was returned."""

    class Returning(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("total", torch.zeros(3))

        def forward(self, x):
            y = super().forward(x)
            self.total += y.detach().sum(0)
            return y, self.total

    def script(run):
        run(1)
        _, total = run(2)
        total.zero_()
        run.record()
        run(3)

    return Returning(), one(4, 6), script


@state()
def mask_written_between_attentions():
    """Two attentions read one mask, which the forward writes to in between."""

    class Masked(Heads):
        def forward(self, x):
            q, k, v = self.heads(x)
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).tril()
            first = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            mask[:, 0] = False
            mask[0, 0] = True
            return first, F.scaled_dot_product_attention(q, k, v, attn_mask=mask)

    return Masked(), one(2, 5, 8)
