"""Layers of torch.nn: each is right, or refused in one error that says why."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from .probe import Program, as_loss, everywhere, layer

IMAGES = {1: (6, 4, 8), 2: (6, 4, 6, 8), 3: (6, 4, 3, 4, 8)}
PROGRAMS: dict[str, Program] = {}
VALUES = "data-dependent"


def turned(y):
    return y.transpose(1, 2)


def refused(reason: str, *precisions: str) -> dict[str, str]:
    return dict.fromkeys(precisions or ("fp32", "bf16"), reason)


def enter(name: str, make, *args, **kwargs) -> None:
    PROGRAMS[name] = layer(make, *args, **kwargs)


# norms
enter("RMSNorm", lambda: nn.RMSNorm(8))
enter("RMSNorm of two dims", lambda: nn.RMSNorm((5, 8)))
enter("RMSNorm without a weight", lambda: nn.RMSNorm(8, elementwise_affine=False))
enter("LayerNorm", lambda: nn.LayerNorm(8))
enter("LayerNorm without a bias", lambda: nn.LayerNorm((5, 8), bias=False))
enter("LayerNorm without a weight", lambda: nn.LayerNorm(8, elementwise_affine=False))
enter("GroupNorm", lambda: nn.GroupNorm(2, 8), before=turned)
enter("GroupNorm of one channel each", lambda: nn.GroupNorm(5, 5))
enter("LocalResponseNorm", lambda: nn.LocalResponseNorm(2), IMAGES[2])
enter("CrossMapLRN2d", lambda: nn.CrossMapLRN2d(2), IMAGES[2], refused=refused("support automatic differentiation"))

for d, shape in IMAGES.items():

    def of(name: str, d=d):
        return getattr(nn, f"{name}{d}d")

    enter(f"BatchNorm{d}d", partial(of("BatchNorm"), 4), shape)
    enter(f"BatchNorm{d}d of averages", partial(of("BatchNorm"), 4, momentum=None, affine=False), shape)
    enter(f"BatchNorm{d}d without statistics", partial(of("BatchNorm"), 4, track_running_stats=False), shape)
    enter(f"InstanceNorm{d}d", partial(of("InstanceNorm"), 4), shape)
    enter(
        f"InstanceNorm{d}d with statistics",
        partial(of("InstanceNorm"), 4, affine=True, track_running_stats=True),
        shape,
    )
    enter(f"Conv{d}d", partial(of("Conv"), 4, 6, 3, padding=1), shape)
    enter(f"Conv{d}d in groups", partial(of("Conv"), 4, 6, 3, padding=1, groups=2, padding_mode="circular"), shape)
    enter(f"ConvTranspose{d}d", partial(of("ConvTranspose"), 4, 6, 3, stride=2), shape)
    enter(f"MaxPool{d}d", partial(of("MaxPool"), 2), shape)
    enter(f"AvgPool{d}d", partial(of("AvgPool"), 2), shape)
    enter(f"LPPool{d}d", partial(of("LPPool"), 2, 2), shape, before=lambda y: y.abs() + 0.1)
    enter(f"AdaptiveMaxPool{d}d", partial(of("AdaptiveMaxPool"), 2), shape)
    enter(f"AdaptiveAvgPool{d}d", partial(of("AdaptiveAvgPool"), 2), shape)
    for padding in ("ReflectionPad", "ReplicationPad", "ZeroPad", "CircularPad"):
        enter(f"{padding}{d}d", partial(of(padding), 1), shape)
    enter(f"Upsample{d}d", lambda: nn.Upsample(scale_factor=2), shape)

enter("PixelShuffle", lambda: nn.PixelShuffle(2), IMAGES[2])
enter("PixelUnshuffle", lambda: nn.PixelUnshuffle(2), IMAGES[2])
enter("ChannelShuffle", lambda: nn.ChannelShuffle(2), IMAGES[2])
enter("Unfold and Fold", lambda: nn.Sequential(nn.Unfold(2), nn.Fold((6, 8), 2)), IMAGES[2])
for mode, d in (("linear", 1), ("bilinear", 2), ("bicubic", 2), ("nearest-exact", 2), ("trilinear", 3)):
    enter(f"Upsample {mode}", partial(nn.Upsample, scale_factor=2, mode=mode), IMAGES[d])
PROGRAMS["interpolate against aliasing"] = Program(
    lambda m, y: as_loss(F.interpolate(y, size=(3, 5), mode="bilinear", antialias=True)), IMAGES[2]
)

# activations
for (
    name
) in """ELU Hardshrink Hardsigmoid Hardtanh Hardswish LeakyReLU LogSigmoid ReLU ReLU6 SELU CELU GELU Sigmoid SiLU Mish
    Softplus
    Softshrink Softsign Tanh Tanhshrink GLU PReLU RReLU""".split():
    enter(name, getattr(nn, name))
for name in ("Softmin", "Softmax", "LogSoftmax"):
    enter(name, partial(getattr(nn, name), dim=-1))
enter("PReLU of channels", lambda: nn.PReLU(5))
enter("Threshold", lambda: nn.Threshold(0.1, 0.2))
enter("Softmax2d", nn.Softmax2d, IMAGES[2])
enter("RReLU in evaluation", lambda: nn.RReLU().eval())
for name in ("Dropout", "Dropout1d", "AlphaDropout", "FeatureAlphaDropout"):
    enter(name, partial(getattr(nn, name), 0.3))


# attention
def padding():
    return torch.arange(5)[None] >= torch.tensor([5, 4, 3, 5, 2, 1])[:, None]


def attention(body, make, **inputs) -> Program:
    return Program(body, inputs=inputs, modules={"layer": make})


HEADS = partial(nn.MultiheadAttention, 8, 2, batch_first=True)
PROGRAMS |= {
    "MultiheadAttention": attention(lambda m, y: as_loss(m.layer(y, y, y)[0]), HEADS),
    "MultiheadAttention without weights": attention(
        lambda m, y: as_loss(m.layer(y, y, y, need_weights=False)[0]), partial(nn.MultiheadAttention, 8, 2)
    ),
    "MultiheadAttention of padded keys": attention(
        lambda m, y, mask: as_loss(m.layer(y, y, y, key_padding_mask=mask, need_weights=False)[0]),
        partial(HEADS, add_bias_kv=True, add_zero_attn=True),
        mask=padding,
    ),
    "MultiheadAttention of other widths": attention(
        lambda m, y: as_loss(m.layer(y, y[..., :4], y[..., :6])[0]), partial(HEADS, kdim=4, vdim=6)
    ),
    "TransformerEncoderLayer": attention(
        lambda m, y: as_loss(m.layer(y)), lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    ),
    "TransformerEncoderLayer, causal, dropout": attention(
        lambda m, y: as_loss(m.layer(y, nn.Transformer.generate_square_subsequent_mask(5), is_causal=True)),
        lambda: nn.TransformerEncoderLayer(8, 2, 16, 0.1, "gelu", batch_first=True, norm_first=True),
    ),
    "TransformerEncoder of padded samples": attention(
        lambda m, y, mask: as_loss(m.layer(y, src_key_padding_mask=mask)),
        lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), 1),
        mask=padding,
    ),
    "TransformerDecoderLayer": attention(
        lambda m, y: as_loss(m.layer(y, y * 2)), lambda: nn.TransformerDecoderLayer(8, 2, 16, 0.0, batch_first=True)
    ),
    "Transformer": attention(
        lambda m, y: as_loss(m.layer(y, y * 2)), lambda: nn.Transformer(8, 2, 1, 1, 16, 0.0, batch_first=True)
    ),
}

# recurrent layers
for name in ("RNN", "LSTM", "GRU"):
    made = partial(getattr(nn, name), 8, 6, 2, batch_first=True, bidirectional=True)
    enter(name, made, after=lambda output: output[0])
    cell = partial(getattr(nn, name + "Cell"), 8, 6)
    enter(name + "Cell", cell, (6, 8), after=lambda y: y[0] if isinstance(y, tuple) else y)
enter("LSTM with a projection", lambda: nn.LSTM(8, 6, proj_size=3), after=lambda output: output[0])


# tables and pairs
def places(*size: int):
    return partial(torch.randint, 0, 11, size)


def table(body, make, size) -> Program:
    return Program(body, inputs={"index": places(*size)}, modules={"layer": make})


for mode in ("mean", "sum", "max"):
    PROGRAMS[f"EmbeddingBag {mode}"] = table(
        lambda m, y, index: as_loss(m.layer(index) + y.mean(1)), partial(nn.EmbeddingBag, 11, 8, mode=mode), (6, 3)
    )
PROGRAMS |= {
    "EmbeddingBag of offsets": table(
        lambda m, y, index: as_loss(m.layer(index, torch.arange(0, 18, 3)) + y.mean(1)),
        lambda: nn.EmbeddingBag(11, 8, padding_idx=2),
        (18,),
    ),
    "Embedding": table(
        lambda m, y, index: as_loss(m.layer(index) + y), lambda: nn.Embedding(11, 8, padding_idx=1), (6, 5)
    ),
    "Embedding by frequency": table(
        lambda m, y, index: as_loss(m.layer(index) + y),
        lambda: nn.Embedding(11, 8, scale_grad_by_freq=True),
        (6, 5),
    ),
    "one_hot": Program(lambda m, y, index: as_loss(F.one_hot(index, 11)[..., :8] * y), inputs={"index": places(6, 5)}),
    "one_hot in a loss": Program(
        lambda m, y, index: -(F.one_hot(index, 11)[..., :8] * y.log_softmax(-1)).sum(-1).mean(),
        inputs={"index": places(6, 5)},
    ),
    "one_hot of as many classes as there are": Program(
        lambda m, y, index: as_loss(F.one_hot(index).sum() * y),
        inputs={"index": places(6, 5)},
        refused=refused(VALUES),
    ),
    "Bilinear": Program(lambda m, y: as_loss(m.layer(y, y * 2)), modules={"layer": lambda: nn.Bilinear(8, 8, 6)}),
    "CosineSimilarity": Program(lambda m, y: nn.CosineSimilarity(-1)(y, y.flip(0)).mean()),
    "PairwiseDistance": Program(lambda m, y: nn.PairwiseDistance()(y, y.flip(1)).mean()),
    "cdist": Program(lambda m, y: torch.cdist(y, y.flip(0) + 0.1).mean()),
    "pdist": Program(lambda m, y: F.pdist(y.flatten(1)).mean()),
}


@pytest.mark.sampled(1)
@everywhere(PROGRAMS)
def test_layer(name, mesh, precision):
    PROGRAMS[name].check(mesh, precision)
