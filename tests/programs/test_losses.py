"""Losses of torch.nn, with every reduction, over devices and in micro-batches."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar.ir.graph import is_op, tensor_arguments
from autopar.rules import rule_of

from ..helpers import gloo
from ..runtime import parity
from .probe import Program, everywhere

WEIGHT = torch.arange(1.0, 9.0)
REDUCTIONS = ("mean", "sum", "none")
PROGRAMS: dict[str, Program] = {}


def one_number(loss: torch.Tensor) -> torch.Tensor:
    return loss if loss.dim() == 0 else loss.square().sum()


def enter(name: str, function, shape=(6, 5, 8), **inputs) -> None:
    """`function(reduction, y, **inputs)`"""
    for reduction in REDUCTIONS:
        body = partial(lambda reduction, m, y, **given: one_number(function(reduction, y, **given)), reduction)
        PROGRAMS[f"{name}, {reduction}"] = Program(body, shape, inputs)


def normal():
    return torch.randn(6, 5, 8)


def zero_or_one():
    return torch.randint(0, 2, (6, 5, 8)).float()


def sign():
    return zero_or_one() * 2 - 1


def classes(*size: int):
    return partial(torch.randint, 0, 8, size)


for name in ("L1Loss", "MSELoss", "SmoothL1Loss", "HuberLoss", "PoissonNLLLoss"):
    enter(name, lambda r, y, t, name=name: getattr(nn, name)(reduction=r)(y, t), t=normal)
enter("KLDivLoss", lambda r, y, t: F.kl_div(y.log_softmax(-1), t.softmax(-1), reduction=r), t=normal)
enter("BCELoss", lambda r, y, t: F.binary_cross_entropy(y.sigmoid(), t, WEIGHT, reduction=r), t=zero_or_one)
enter(
    "BCEWithLogitsLoss",
    lambda r, y, t: F.binary_cross_entropy_with_logits(y, t, reduction=r, pos_weight=WEIGHT),
    t=zero_or_one,
)
enter("SoftMarginLoss", lambda r, y, t: F.soft_margin_loss(y, t, reduction=r), t=sign)
enter("HingeEmbeddingLoss", lambda r, y, t: F.hinge_embedding_loss(y, t, reduction=r), t=sign)
enter("MarginRankingLoss", lambda r, y, t: F.margin_ranking_loss(y, y.flip(1), t, reduction=r), t=sign)
enter("GaussianNLLLoss", lambda r, y, t: F.gaussian_nll_loss(y, t, y.exp(), reduction=r), t=normal)
enter(
    "GaussianNLLLoss of one variance",
    lambda r, y, t: F.gaussian_nll_loss(y, t, y[..., 0].exp(), True, reduction=r),
    t=normal,
)
enter("CosineEmbeddingLoss", lambda r, y, t: F.cosine_embedding_loss(y[:, 0], y[:, 1], t[:, 0, 0], reduction=r), t=sign)
enter("TripletMarginLoss", lambda r, y: F.triplet_margin_loss(y, y.flip(1), y.roll(1, 1), reduction=r))
enter(
    "TripletMarginWithDistanceLoss",
    lambda r, y: F.triplet_margin_with_distance_loss(y, y.flip(1), y.roll(1, 1), swap=True, reduction=r),
)
enter("MultiMarginLoss", lambda r, y, t: F.multi_margin_loss(y, t, reduction=r), (6, 8), t=classes(6))
enter(
    "MultiLabelSoftMarginLoss",
    lambda r, y, t: F.multilabel_soft_margin_loss(y, t[:, 0], reduction=r),
    (6, 8),
    t=zero_or_one,
)
LABELS = torch.tensor([[1, 2, -1, 0, 0, 5, 0, 0], [3, -1, 1, 1, 1, 1, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7]] * 2)
enter("MultiLabelMarginLoss", lambda r, y, t: F.multilabel_margin_loss(y, t, reduction=r), (6, 8), t=lambda: LABELS)
LENGTHS = torch.tensor([5, 5, 4, 3, 5, 2])
enter(
    "CTCLoss",
    lambda r, y, t: F.ctc_loss(y.transpose(0, 1).log_softmax(-1), t, (5,) * 6, (2,) * 6, reduction=r),
    t=classes(6, 2),
)
enter(
    "CTCLoss of lengths",
    lambda r, y, t, n: F.ctc_loss(
        y.transpose(0, 1).log_softmax(-1), t.clamp_min(1), n, n - 2, reduction=r, zero_infinity=True
    ),
    t=classes(6, 3),
    n=lambda: LENGTHS,
)
enter(
    "NLLLoss",
    lambda r, y, t: F.nll_loss(y.log_softmax(-1), t, WEIGHT, ignore_index=2, reduction=r),
    (6, 8),
    t=classes(6),
)
enter(
    "NLLLoss of images",
    lambda r, y, t: F.nll_loss(y.log_softmax(1), t % 4, reduction=r),
    (6, 4, 6, 8),
    t=classes(6, 6, 8),
)

FORMS = {  # of scores (n, c, ...) and targets
    "samples": ((6, 8), (6,)),
    "sequences": ((6, 5, 8), (6, 8)),
    "images": ((6, 4, 3, 8), (6, 3, 8)),
}
OPTIONS = {
    "": {},
    " with weights": {"weight": WEIGHT},
    " smoothed": {"label_smoothing": 0.1},
    " without a class": {"ignore_index": 1},
    " with all": {"weight": WEIGHT, "label_smoothing": 0.2, "ignore_index": 1},
}


def cross_entropy(reduction, y, t, options):
    options = options | ({"weight": options["weight"][: y.shape[1]]} if "weight" in options else {})
    return F.cross_entropy(y, t % y.shape[1], reduction=reduction, **options)


for form, (scores, targets) in FORMS.items():
    for words, options in OPTIONS.items():
        enter(
            f"CrossEntropyLoss of {form}{words}", partial(cross_entropy, options=options), scores, t=classes(*targets)
        )
    enter(
        f"CrossEntropyLoss of {form} of probabilities",
        lambda r, y, t: F.cross_entropy(y, t.reshape(y.shape).softmax(1), label_smoothing=0.1, reduction=r),
        scores,
        t=partial(torch.randn, *scores),
    )
MICRO_BATCHED = [
    name for name in PROGRAMS if name.startswith(("CrossEntropyLoss", "NLLLoss", "CTCLoss", "GaussianNLL"))
]


@pytest.mark.sampled(1)
@everywhere(PROGRAMS)
def test_loss(name, mesh, precision):
    PROGRAMS[name].check(mesh, precision)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "name, mesh",
    [
        pytest.param(n, mesh, marks=[] if (i + j) % 6 == 0 else [pytest.mark.slow])
        for i, n in enumerate(MICRO_BATCHED)
        for j, mesh in enumerate(("pp=2", "pp=2,dp=2"))
    ],
)
def test_micro_batches(name, mesh):
    """Three micro-batches add up to the whole batch, with the whole batch's number of targets that count."""
    PROGRAMS[name].check(mesh, micro_batches=3)


@settings(deadline=None, max_examples=6)
@given(
    n=st.integers(2, 5),
    c=st.integers(2, 6),
    more=st.lists(st.integers(1, 3), max_size=2),
    mesh=st.sampled_from(["dp=2", "tp=2", "dp=3"]),
    reduction=st.sampled_from(REDUCTIONS),
    weighted=st.booleans(),
    smoothing=st.sampled_from([0.0, 0.3]),
    ignored=st.integers(-1, 1),
)
def test_cross_entropy_of_any_shape(n, c, more, mesh, reduction, weighted, smoothing, ignored):
    def body(m, y, t):
        scores = (y @ y.new_ones(8, c).tril()).movedim(-1, 1)
        return one_number(
            F.cross_entropy(
                scores,
                t,
                torch.arange(1.0, c + 1) if weighted else None,
                reduction=reduction,
                label_smoothing=smoothing,
                ignore_index=ignored,
            )
        )

    target = torch.randint(0, c, (n, *more), generator=torch.Generator().manual_seed(n))
    target[0] = c - 1  # one target counts at least, unless it is the class that does not
    if ignored != c - 1:
        Program(body, (n, *more, 8), {"t": lambda: target}).check(mesh)


def test_the_vocabulary_of_a_smoothed_loss_may_be_sharded():
    class Head(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(16, 40, bias=False)

        def forward(self, x, t):
            return F.cross_entropy(self.head(x), t, label_smoothing=0.1)

    graph = compiler.trace(Head(), dict(x=torch.randn(6, 16), t=torch.randint(0, 40, (6,)))).graph
    over_vocabulary = 0
    for node in filter(is_op, graph.nodes):
        shapes = [tuple(a.meta["val"].shape) for a in tensor_arguments(node)]
        for shape, dims in zip(shapes, rule_of(node).inputs, strict=True):
            if shape[-1:] == (40,):
                over_vocabulary += 1
                assert dims[-1] is not None, node
    assert over_vocabulary >= 4


def rank(number: int):
    names = ("CrossEntropyLoss of images with all, mean", "CTCLoss of lengths, mean", "GaussianNLLLoss, mean")
    parity.check_programs([PROGRAMS[name].made for name in names], "dp=2")


def test_losses_on_processes():
    gloo.run(2, rank)


def stage(number: int):
    from ..runtime.parity import assert_close, device_mesh, full, pair

    for name in ("CrossEntropyLoss of sequences with all, mean", "NLLLoss, mean"):
        model, inputs = PROGRAMS[name].made()
        mine, whole = pair(model, device_mesh("pp=2"), inputs, micro_batches=3)
        losses = [m(**inputs) for m in (mine, whole)]
        assert_close(*losses, what=name)
        for loss in losses:
            loss.backward()
        expected = dict(whole.named_parameters())
        for parameter_name, parameter in mine.named_parameters():
            assert_close(full(parameter.grad), expected[parameter_name].grad, parameter_name)


@pytest.mark.slow
def test_losses_in_micro_batches_on_processes():
    gloo.run(2, stage)
