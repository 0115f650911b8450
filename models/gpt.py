"""GPT-2 and GPT-3: learned positions, pre-LayerNorm, one fused query-key-value Linear, tanh GELU, tied head.

Sizes and initialisation: Radford et al., "Language Models are Unsupervised Multitask Learners", 2019, and Brown et al.,
arXiv 2005.14165. GPT-3's alternating sparse attention is left out: all layers attend densely.
Shapes: B batch, S sequence, H hidden, V vocabulary, D = H / heads.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .output import Output, next_token_loss
from .sizes import require_divides, require_positive


@dataclass(frozen=True)
class Config:
    """Sizes; the defaults are GPT-2's smallest. `seq` is the longest sequence, `ffn` is 4 * hidden if None, and `tied`
    makes the head use the token embedding. Raises ModelError on sizes that do not fit together."""

    hidden: int = 768
    layers: int = 12
    heads: int = 12
    ffn: int | None = None
    vocab: int = 50257
    seq: int = 1024
    tied: bool = True
    norm_eps: float = 1e-5

    def __post_init__(self):
        if self.ffn is None and isinstance(self.hidden, int):
            object.__setattr__(self, "ffn", 4 * self.hidden)
        require_positive(self, "hidden", "layers", "heads", "ffn", "vocab", "seq")
        require_divides(self, "heads", "hidden")


class Attention(nn.Module):
    """Causal self-attention, (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.heads = config.heads
        self.c_attn = nn.Linear(config.hidden, 3 * config.hidden)
        self.c_proj = nn.Linear(config.hidden, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Mix the positions of x (B, S, H) -> (B, S, H), each with those before it."""
        batch, seq, hidden = x.shape
        q, k, v = (
            part.view(batch, seq, self.heads, hidden // self.heads).transpose(1, 2)  # (B, heads, S, D)
            for part in self.c_attn(x).split(hidden, dim=-1)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.c_proj(mixed.transpose(1, 2).reshape(batch, seq, hidden))


class FeedForward(nn.Module):
    """c_proj(gelu(c_fc(x))), (B, S, H) -> (B, S, H)."""

    def __init__(self, config: Config):
        super().__init__()
        self.c_fc = nn.Linear(config.hidden, config.ffn)
        self.c_proj = nn.Linear(config.ffn, config.hidden)

    def forward(self, x: Tensor) -> Tensor:
        """Compute each position of x (B, S, H) -> (B, S, H)."""
        return self.c_proj(F.gelu(self.c_fc(x), approximate="tanh"))


class Block(nn.Module):
    """One layer: attention and feed-forward, each on the normalised input and added back."""

    def __init__(self, config: Config):
        super().__init__()
        self.ln_1 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.attn = Attention(config)
        self.ln_2 = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.mlp = FeedForward(config)

    def forward(self, x: Tensor) -> Tensor:
        """Add attention and feed-forward to x (B, S, H) -> (B, S, H)."""
        x = x + self.attn(self.ln_1(x))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    """Embeddings of tokens and positions, blocks, a norm and a linear layer to the vocabulary."""

    def __init__(self, config: Config):
        super().__init__()
        self.config = config
        self.wte = nn.Embedding(config.vocab, config.hidden)
        self.wpe = nn.Embedding(config.seq, config.hidden)
        self.h = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.ln_f = nn.LayerNorm(config.hidden, eps=config.norm_eps)
        self.lm_head = nn.Linear(config.hidden, config.vocab, bias=False)
        if config.tied:
            self.lm_head.weight = self.wte.weight
        self._initialise()

    def _initialise(self) -> None:
        """Draw weights from Normal(0, 0.02), and 1 / sqrt(2 * layers) of it where a block adds to the residual stream
        (GPT-2, 2.3)."""
        for name, parameter in self.named_parameters():
            if parameter.ndim > 1:
                onto_residual = name.endswith("c_proj.weight")
                nn.init.normal_(parameter, std=0.02 / (2 * self.config.layers) ** 0.5 if onto_residual else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(parameter)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Output:
        """Compute logits (B, S, V), and the loss if there are labels, from input_ids (B, S) below V, S at most
        config.seq, and labels (B, S), -100 to leave a token out of the loss."""
        positions = torch.arange(input_ids.shape[1], device=input_ids.device)
        x = self.wte(input_ids) + self.wpe(positions)  # (B, S, H)
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))  # (B, S, V)
        return Output(None if labels is None else next_token_loss(logits, labels), logits)


def build(**options) -> GPT:
    """Build a GPT of these options (see Config), freshly initialised."""
    return GPT(Config(**options))
