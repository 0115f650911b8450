"""Llama: RMSNorm, rotary positions, grouped-query attention, SwiGLU, no biases.

Touvron et al., arXiv 2307.09288 (Llama 2); Grattafiori et al., arXiv 2407.21783 (Llama 3). Llama 3.1's rescaling of low
rotary frequencies, which serves contexts beyond 8192 tokens and has no weights, is left out.
Shapes: B batch, S sequence, H hidden, V vocabulary, D = H / heads.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import ModelError
from .output import Output, next_token_loss
from .sizes import require_divides, require_positive


@dataclass(frozen=True)
class Config:
    """Sizes. `kv_heads` is heads if None; `ffn` if None is 8/3 * hidden rounded up to a multiple of 256, the rule of
    Llama 1 and 2; `seq` is the longest sequence. Raises ModelError on sizes that do not fit together."""

    hidden: int = 1024
    layers: int = 8
    heads: int = 16
    kv_heads: int | None = None
    ffn: int | None = None
    vocab: int = 32000
    seq: int = 2048
    tied: bool = False
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.kv_heads is None:
            object.__setattr__(self, "kv_heads", self.heads)
        if self.ffn is None and isinstance(self.hidden, int):
            object.__setattr__(self, "ffn", -(-8 * self.hidden // (3 * 256)) * 256)
        require_positive(self, "hidden", "layers", "heads", "kv_heads", "ffn", "vocab", "seq")
        require_divides(self, "heads", "hidden")
        require_divides(self, "kv_heads", "heads")
        if self.head_dim % 2:
            raise ModelError(
                f"rotary positions turn pairs of features, but hidden / heads = {self.head_dim} is odd",
                fix=f"set hidden={2 * self.hidden}",
            )

    @property
    def head_dim(self) -> int:
        """Return the features of a head."""
        return self.hidden // self.heads


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dim, the mean in fp32. Written out, so that it traces to the same ops on every
    device (torch's own has a fused kernel on some)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """Scale each position of x (..., H) -> (..., H)."""
        wide = x.float()
        scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return self.weight * scaled.to(x.dtype)


def rotary_tables(seq: int, head_dim: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cos and sin of position * theta**(-2i / D), each (S, D) in fp32; feature i and i + D/2 share an angle.

    Su et al., arXiv 2104.09864. Computed on the fly: a table of the longest sequence would be state to place and
    save."""
    frequencies = theta ** (-torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim)  # (D/2,)
    positions = torch.arange(seq, device=device, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]  # (S, D/2)
    angles = torch.cat((angles, angles), dim=-1)  # (S, D)
    return angles.cos(), angles.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn each feature pair of x (B, heads, S, D) by its position's angle; cos and sin (S, D) in x's dtype."""
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-second, first), dim=-1) * sin


class Attention(nn.Module):
    """Causal attention, (B, S, H) -> (B, S, H); every heads / kv_heads query heads share one key and value head."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = config.heads, config.kv_heads, config.head_dim
        self.q_proj = nn.Linear(config.hidden, config.heads * config.head_dim, bias=False)
        self.k_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.v_proj = nn.Linear(config.hidden, config.kv_heads * config.head_dim, bias=False)
        self.o_proj = nn.Linear(config.heads * config.head_dim, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Mix the positions of x (B, S, H) -> (B, S, H), each with those before it. `cos`, `sin`: (S, D)."""
        batch, seq, _ = x.shape
        q = self.q_proj(x).view(batch, seq, self.heads, self.head_dim).transpose(1, 2)  # (B, heads, S, D)
        k = self.k_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)  # (B, kv_heads, S, D)
        v = self.v_proj(x).view(batch, seq, self.kv_heads, self.head_dim).transpose(1, 2)
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        grouped = self.kv_heads < self.heads
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.o_proj(mixed.transpose(1, 2).reshape(batch, seq, -1))


class FeedForward(nn.Module):
    """SwiGLU (Shazeer, arXiv 2002.05202): down(silu(gate(x)) * up(x)), (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.gate_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.up_proj = nn.Linear(config.hidden, config.ffn, bias=False)
        self.down_proj = nn.Linear(config.ffn, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Compute each position of x (B, S, H) -> (B, S, H)."""
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normalised input and added back."""

    def __init__(self, config: Config, feed_forward: Callable[[Config], nn.Module] = FeedForward):
        super().__init__()
        self.input_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = RMSNorm(config.hidden, config.norm_eps)
        self.mlp = feed_forward(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """Add attention and feed-forward to x (B, S, H) -> (B, S, H)."""
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        return x + self.mlp(self.post_attention_layernorm(x))


class Llama(nn.Module):
    """Embeddings of tokens, blocks with a `feed_forward` each, a norm and a linear layer to the vocabulary."""

    def __init__(self, config: Config, feed_forward: Callable[[Config], nn.Module] = FeedForward):
        super().__init__()
        self.config = config
        self.embed_tokens = nn.Embedding(config.vocab, config.hidden)
        self.layers = nn.ModuleList(Block(config, feed_forward) for _ in range(config.layers))
        self.norm = RMSNorm(config.hidden, config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.embed_tokens.weight
        for parameter in self.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Compute logits (B, S, V), and the loss if there are labels, from input_ids (B, S) below V and labels (B, S),
        -100 to leave a token out of the loss."""
        x = self.embed_tokens(input_ids)  # (B, S, H)
        tables = rotary_tables(input_ids.shape[1], self.config.head_dim, self.config.rope_theta, x.device)
        cos, sin = (table.to(x.dtype) for table in tables)
        for layer in self.layers:
            x = layer(x, cos, sin)
        logits = self.lm_head(self.norm(x))  # (B, S, V)
        return Output(None if labels is None else next_token_loss(logits, labels), logits)


def build(**options) -> Llama:
    """Build a Llama of these options (see Config), freshly initialised."""
    return Llama(Config(**options))
