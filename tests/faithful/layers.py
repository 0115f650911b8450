"""Layers with a life of their own: reparametrized, tied, renormalized, recurrent; and teachers that follow students."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

from .nets import Net
from .program import Topic, ids, one, randn

layers = Topic(__name__)


def _steps(run):
    """Two steps of SGD with recorded calls."""
    optimizer = torch.optim.SGD(run.model.parameters(), lr=0.1)
    for seed in (1, 2):
        run(seed)
        optimizer.step()
    run.model.eval()
    run(3)


def _net(change):
    model = Net()
    change(model)
    return model


class Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).transpose(-1, -2)


def _prune(m):
    nn.utils.prune.random_unstructured(m.up, "weight", 0.3)


REPARAMETRIZED = {
    "weight_norm_old": lambda m: weight_norm(m.up),
    "weight_norm_old_dim": lambda m: weight_norm(m.down, dim=1),
    "weight_norm_new": lambda m: parametrizations.weight_norm(m.up),
    "spectral_norm_old": lambda m: spectral_norm(m.up),
    "spectral_norm_new": lambda m: parametrizations.spectral_norm(m.up),
    "orthogonal": lambda m: parametrizations.orthogonal(m.up),
    "symmetric": lambda m: (
        setattr(m, "mid", nn.Linear(10, 10)),
        parametrize.register_parametrization(m.up, "bias", nn.Tanh()),
    ),
}
for name, change in REPARAMETRIZED.items():
    layers.add(name, lambda change=change: (_net(change), one(5, 6), _steps), tolerance=1e-4)


@layers()
def pruned():
    """torch.nn.utils.prune masks a weight in a forward-pre hook."""
    import torch.nn.utils.prune  # noqa: F401

    return _net(_prune), one(5, 6), _steps


@layers()
def tied_embedding():
    """Embedding and head share a weight."""

    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.mid, self.head = nn.Embedding(13, 6), nn.Linear(6, 6), nn.Linear(6, 13, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens):
            return self.head(self.mid(self.embed(tokens)).tanh())

    return Tied(), lambda seed: (ids(seed, 13, 3, 5),), _steps


@layers()
def shared_layer():
    """One layer at three places of a Sequential."""
    layer = nn.Linear(6, 6)
    return nn.Sequential(layer, nn.ReLU(), layer, nn.Tanh(), layer), one(5, 6), _steps


@layers(refused="max_norm")
def embedding_with_max_norm():
    """nn.Embedding(max_norm=) renormalizes rows of its weight in place, in the forward."""

    class Renormed(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(11, 6, max_norm=1.0), nn.Linear(6, 2)

        def forward(self, tokens):
            return self.head(self.embed(tokens))

    return Renormed(), lambda seed: (ids(seed, 11, 3, 4),), _steps


@layers(refused="sparse")
def embedding_with_sparse_gradients():
    """nn.Embedding(sparse=True)."""
    return nn.Sequential(nn.Embedding(11, 6, sparse=True), nn.Linear(6, 2)), lambda seed: (ids(seed, 11, 3, 4),)


@layers()
def embedding_with_padding():
    """The row of the padding index gets no gradient."""
    return (
        nn.Sequential(nn.Embedding(11, 6, padding_idx=0), nn.Linear(6, 2)),
        lambda seed: (ids(seed, 11, 3, 4),),
        _steps,
    )


@layers(refused="")
def embedding_by_frequency():
    """Gradients are divided by how often a token is there."""
    return nn.Sequential(nn.Embedding(5, 6, scale_grad_by_freq=True), nn.Linear(6, 2)), lambda seed: (
        ids(seed, 5, 3, 4),
    )


@layers(refused="")
def embedding_bag():
    """Bags of tokens, their means."""
    return nn.Sequential(nn.EmbeddingBag(11, 6, mode="mean"), nn.Linear(6, 2)), lambda seed: (ids(seed, 11, 3, 4),)


PLAIN = {
    "layer_norm": lambda: (nn.Sequential(nn.Linear(6, 9), nn.LayerNorm(9), nn.GELU(), nn.Linear(9, 3)), one(5, 6)),
    "group_norm": lambda: (nn.Sequential(nn.Conv1d(4, 6, 3), nn.GroupNorm(3, 6), nn.ReLU(), nn.Flatten()),
                           one(3, 4, 7)),
    "instance_norm": lambda: (
        nn.Sequential(nn.Conv1d(4, 6, 3), nn.InstanceNorm1d(6, affine=True, track_running_stats=True)), one(3, 4, 7)
    ),
    "rms_norm": lambda: (nn.Sequential(nn.Linear(6, 9), nn.RMSNorm(9), nn.Linear(9, 3)), one(5, 6)),
    "prelu": lambda: (nn.Sequential(nn.Linear(6, 9), nn.PReLU(9), nn.Linear(9, 3)), one(5, 6)),
    "bilinear": lambda: (nn.Bilinear(4, 5, 3), lambda seed: (randn(seed, 7, 4), randn(seed + 3, 7, 5))),
    "pooled_image": lambda: (
        nn.Sequential(nn.Conv2d(3, 5, 3, stride=2), nn.BatchNorm2d(5), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(),
                      nn.Linear(5, 2)), one(3, 3, 9, 11)
    ),
    "transposed_image": lambda: (nn.Sequential(nn.ConvTranspose2d(3, 4, 3, stride=2), nn.Sigmoid()), one(3, 3, 4, 5)),
    "grouped_image": lambda: (nn.Sequential(nn.Conv2d(6, 6, 3, groups=6), nn.Conv2d(6, 4, 1)), one(3, 6, 5, 7)),
    "upsampled": lambda: (nn.Sequential(nn.Conv2d(3, 4, 1), nn.Upsample(scale_factor=2, mode="bilinear")),
                          one(3, 3, 5, 4)),
    "softmax_attention": lambda: (nn.MultiheadAttention(12, 3, batch_first=True),
                                  lambda seed: {n: randn(seed, 3, 5, 12) for n in ("query", "key", "value")}),
    "encoder_layer": lambda: (nn.TransformerEncoderLayer(12, 3, 20, dropout=0.0, batch_first=True), one(3, 5, 12)),
    "transformer": lambda: (nn.Transformer(12, 3, 1, 1, 20, dropout=0.0, batch_first=True),
                            lambda seed: (randn(seed, 3, 5, 12), randn(seed + 4, 3, 4, 12))),
    "lstm": lambda: (nn.LSTM(6, 5, 2, batch_first=True), one(3, 4, 6)),
    "gru_bidirectional": lambda: (nn.GRU(6, 5, batch_first=True, bidirectional=True), one(3, 4, 6)),
}  # fmt: skip
for name, build in PLAIN.items():
    layers.add(name, lambda build=build: (*build(), _steps), tolerance=1e-4)


@layers()
def encoder_eval_fast_path():
    """nn.TransformerEncoder has a fast path in eval mode without gradients."""

    def script(run):
        run.model.eval()
        with torch.no_grad():
            run(1)
        run.model.train()
        run(2)

    layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2), one(3, 5, 12), script


@layers()
def recurrent_with_hidden():
    """A GRU whose hidden state the user hands in and gets back."""

    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 4)

        def forward(self, x, hidden=None):
            y, hidden = self.rnn(x, hidden)
            return self.head(y), hidden

    def script(run):
        _, hidden = run.call(randn(1, 3, 4, 6))
        run.call(randn(2, 3, 4, 6), hidden.detach())

    return Language(), one(3, 4, 6), script


class Byol(nn.Module):
    """A teacher that follows the student in the forward (Grill et al. 2020), by `follow(teacher, student)`."""

    def __init__(self, follow):
        super().__init__()
        self.student, self.predictor, self._follow = Net(outputs=4), nn.Linear(4, 4), follow
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    def forward(self, a, b):
        if self.training:
            for p_t, p_s in zip(self.teacher.parameters(), self.student.parameters()):
                self._follow(p_t, p_s)
        with torch.no_grad():
            target = F.normalize(self.teacher(b), dim=-1)
        return 2 - 2 * (F.normalize(self.predictor(self.student(a)), dim=-1) * target).sum(-1).mean()


def _by_copy(p_t, p_s):
    with torch.no_grad():
        p_t.copy_(0.9 * p_t + 0.1 * p_s)


def _by_data_assigned(p_t, p_s):
    p_t.data = p_t.data * 0.9 + p_s.data * 0.1


def _by_lerp(p_t, p_s):
    with torch.no_grad():
        p_t.lerp_(p_s, 0.1)


FOLLOWING = {
    "data": lambda p_t, p_s: p_t.data.mul_(0.9).add_(p_s.data, alpha=0.1),
    "detach": lambda p_t, p_s: p_t.detach().mul_(0.9).add_(p_s.detach(), alpha=0.1),
    "copy": _by_copy, "assigned": _by_data_assigned, "lerp": _by_lerp,
}  # fmt: skip
for name, follow in FOLLOWING.items():

    def _views(seed):
        return randn(seed, 5, 6), randn(seed + 40, 5, 6)

    layers.add(f"teacher_by_{name}", lambda follow=follow: (Byol(follow), _views, _steps), refused="teacher")


@layers()
def teacher_followed_outside():
    """The user updates the teacher between steps, parameter by parameter."""

    def script(run):
        optimizer = torch.optim.SGD([p for p in run.model.parameters() if p.requires_grad], lr=0.1)
        for seed in (1, 2, 3):
            run(seed)
            optimizer.step()
            with torch.no_grad():
                for p_t, p_s in zip(run.model.teacher.parameters(), run.model.student.parameters()):
                    p_t.mul_(0.9).add_(p_s, alpha=0.1)

    return Byol(lambda p_t, p_s: None), lambda seed: (randn(seed, 5, 6), randn(seed + 40, 5, 6)), script


@layers(refused="")
def weights_clamped_in_the_forward():
    """The forward clamps its weight's data, as the critic of a Wasserstein GAN."""

    class Clamped(Net):
        def forward(self, x):
            self.up.weight.data.clamp_(-0.1, 0.1)
            return super().forward(x)

    return Clamped(), one(5, 6), _steps


@layers(refused="")
def requires_grad_in_the_forward():
    """The forward freezes a layer at the first call in which a flag is set."""

    class Freezing(Net):
        frozen = False

        def forward(self, x):
            self.up.requires_grad_(not self.frozen)
            return super().forward(x)

    def script(run):
        run(1)
        run.model.frozen = True
        run(2)

    return Freezing(), one(5, 6), script
