"""torch.linalg, covariances and torch.distributions in a forward."""

from __future__ import annotations

from functools import partial

import pytest
import torch
import torch.distributions as D
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import linalg
from torch.nn import functional as F

from autopar.errors import CaptureError
from autopar.frontend import traced_forms

from ..helpers import gloo
from ..runtime import parity
from .probe import Program, as_loss, everywhere


def definite(y):
    return y @ y.mT + 3 * torch.eye(y.shape[-2], dtype=y.dtype)


def positive(y):
    return F.softplus(y) + 0.1


def of(function, **refused) -> Program:
    return Program(lambda m, y: as_loss(function(y)), refused=refused)


PROGRAMS = {
    "solve": of(lambda y: linalg.solve(definite(y), y)),
    "solve_triangular": of(lambda y: linalg.solve_triangular(linalg.cholesky(definite(y)), y, upper=False)),
    "slogdet": of(lambda y: linalg.slogdet(definite(y))[1]),
    "det": of(lambda y: linalg.det(definite(y) / 4)),
    "logdet": of(lambda y: torch.logdet(definite(y))),
    "svd": of(lambda y: linalg.svd(y, full_matrices=False)[1]),
    "svdvals": of(linalg.svdvals),
    "qr": of(lambda y: linalg.qr(y.mT)[1]),
    "cholesky": of(lambda y: linalg.cholesky(definite(y))),
    "cholesky_solve": of(lambda y: torch.cholesky_solve(y, linalg.cholesky(definite(y)))),
    "inv": of(lambda y: linalg.inv(definite(y))),
    "pinv": of(linalg.pinv),
    "eigh": of(lambda y: linalg.eigh(definite(y))[0]),
    "eigvals": of(lambda y: linalg.eigvals(definite(y)).abs()),
    "lu": of(lambda y: linalg.lu(definite(y))[2]),
    "lu_solve": of(lambda y: linalg.lu_solve(*linalg.lu_factor(definite(y)), y)),
    "lstsq": of(lambda y: linalg.lstsq(y.mT, 2 * y.mT.cos())[0]),
    "lstsq, its residuals": of(
        lambda y: linalg.lstsq(y.mT, y.mT.cos()).residuals, fp32="rank of the matrix", bf16="rank of the"
    ),
    "ldl_factor": of(lambda y: linalg.ldl_factor(definite(y))[0], fp32="derivative", bf16="derivative"),
    "matrix_exp": of(lambda y: torch.matrix_exp(definite(y) / 100)),
    "matrix_norm": of(lambda y: linalg.matrix_norm(y, "nuc")),
    "cond": of(lambda y: linalg.cond(definite(y))),
    "cov": of(lambda y: torch.cov(y[0])),
    "cov of all samples": of(lambda y: torch.cov(y.flatten(1).mT)),
    "cov with weights": of(lambda y: torch.cov(y[0], aweights=torch.arange(1.0, 9.0, dtype=y.dtype))),
    "corrcoef": of(lambda y: torch.corrcoef(y[0])),
}


def log_prob(distribution, value=lambda y, t: t, **refused) -> Program:
    """-log p(value) under `distribution(y)`; t is an input like y."""
    return Program(
        lambda m, y, t: -distribution(y.float()).log_prob(value(y.float(), t.float())).mean(),
        inputs={"t": partial(torch.randn, 6, 5, 8)},
        refused=refused,
    )


def drawn(distribution, **refused) -> Program:
    return Program(lambda m, y: as_loss(distribution(y.float()).rsample()), refused=refused)


def divergence(p, q) -> Program:
    return Program(lambda m, y: D.kl_divergence(p(y.float()), q(y.float())).mean())


def normal(y):
    return D.Normal(y, positive(y))


PROGRAMS |= {
    "Normal": log_prob(normal),
    "Normal, checked": log_prob(lambda y: D.Normal(y, positive(y), validate_args=True)),
    "Normal, drawn": drawn(normal),
    "Normal, entropy": Program(lambda m, y: normal(y.float()).entropy().mean()),
    "Normal, divergence": divergence(normal, lambda y: D.Normal(0.0, 1.0)),
    "Categorical": log_prob(lambda y: D.Categorical(logits=y), lambda y, t: t[..., 0].abs().round()),
    "Categorical of probabilities": log_prob(
        lambda y: D.Categorical(probs=y.softmax(-1)), lambda y, t: t[..., 0].abs().round()
    ),
    "Categorical, divergence": divergence(lambda y: D.Categorical(logits=y), lambda y: D.Categorical(logits=2 * y)),
    "Categorical, drawn": Program(lambda m, y: (c := D.Categorical(logits=y.float())).log_prob(c.sample()).mean()),
    "Bernoulli": log_prob(lambda y: D.Bernoulli(logits=y), lambda y, t: (t > 0).float()),
    "Bernoulli, divergence": divergence(lambda y: D.Bernoulli(logits=y), lambda y: D.Bernoulli(probs=y.sigmoid() / 2)),
    "Laplace, drawn": drawn(lambda y: D.Laplace(y, positive(y))),
    "Beta": log_prob(lambda y: D.Beta(positive(y), positive(-y)), lambda y, t: t.sigmoid()),
    "Dirichlet": log_prob(lambda y: D.Dirichlet(positive(y)), lambda y, t: t.softmax(-1)),
    "Gamma, divergence": divergence(lambda y: D.Gamma(positive(y), positive(-y)), lambda y: D.Gamma(1.0, 1.0)),
    "Gamma, drawn": drawn(lambda y: D.Gamma(positive(y), positive(-y)), fp32="_standard_gamma", bf16="_standard_gamma"),
    "MultivariateNormal": log_prob(lambda y: D.MultivariateNormal(y[..., 0], definite(y)), lambda y, t: t[..., 0]),
    "MultivariateNormal, drawn": drawn(lambda y: D.MultivariateNormal(y[..., 0], definite(y))),
    "Independent": log_prob(lambda y: D.Independent(normal(y), 1)),
    "MixtureSameFamily": log_prob(
        lambda y: D.MixtureSameFamily(D.Categorical(logits=y), normal(y)), lambda y, t: t[..., 0]
    ),
    "RelaxedOneHotCategorical, drawn": drawn(lambda y: D.RelaxedOneHotCategorical(1.0, logits=y)),
}


@pytest.mark.sampled(1)
@everywhere(PROGRAMS)
def test_program(name, mesh, precision):
    PROGRAMS[name].check(mesh, precision)


@settings(deadline=None, max_examples=40)
@given(st.integers(1, 5), st.integers(2, 7), st.booleans(), st.booleans(), st.integers(0, 2), st.booleans())
def test_the_form_of_cov(rows, columns, has_counts, has_weights, correction, is_complex):
    generator = torch.Generator().manual_seed(rows * 10 + columns)
    x = torch.randn(rows, columns, generator=generator, dtype=torch.complex128 if is_complex else torch.float64)
    counts = torch.randint(1, 4, (columns,), generator=generator) if has_counts else None
    weights = torch.rand(columns, generator=generator, dtype=torch.float64) if has_weights else None
    arguments = dict(correction=correction, fweights=counts, aweights=weights)
    for mine, torchs in (
        (traced_forms.cov(x, **arguments), torch.cov(x, **arguments)), (traced_forms.corrcoef(x), torch.corrcoef(x)),
        (traced_forms.cov(x[0], **arguments), torch.cov(x[0], **arguments)),
    ):  # fmt: skip
        finite = torchs.isfinite()  # a division by zero gives one complex infinity or another
        torch.testing.assert_close(mine[finite], torchs[finite])
        assert not mine[~finite].isfinite().any()


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3))
def test_the_form_of_lstsq(rows, columns, right):
    generator = torch.Generator().manual_seed(rows * 10 + columns)
    a = torch.randn(2, rows, columns, generator=generator, dtype=torch.float64)
    b = (
        torch.randn(2, rows, right, generator=generator, dtype=torch.float64)
        if right
        else torch.randn(2, rows, dtype=torch.float64)
    )
    torch.testing.assert_close(traced_forms.lstsq(a, b).solution, linalg.lstsq(a, b).solution)
    with pytest.raises(CaptureError, match="rank of the matrix"):
        _, _, _, _ = traced_forms.lstsq(a, b)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(2, 6), st.integers(0, 9), st.sampled_from(["none", "mean", "sum"]))
def test_the_form_of_multilabel_margin_loss(n, c, seed, reduction):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(n, c, generator=generator, dtype=torch.float64)
    target = torch.randint(-1, c, (n, c), generator=generator)
    for given_, wanted in ((x, target), (x[0], target[0])):
        expected = F.multilabel_margin_loss(given_, wanted, reduction=reduction)
        torch.testing.assert_close(traced_forms.multilabel_margin_loss(given_, wanted, reduction=reduction), expected)


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 4), st.integers(0, 9), st.sampled_from(["none", "mean", "sum"]), st.booleans(), st.booleans())
def test_the_form_of_ctc_loss(n, seed, reduction, in_a_row, zero_infinity):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(7, n, 5, generator=generator, dtype=torch.float64, requires_grad=True)
    given_, sizes = torch.randint(4, 8, (n,), generator=generator), torch.randint(1, 4, (n,), generator=generator)
    targets = torch.randint(1, 5, (int(sizes.sum()),) if in_a_row else (n, 3), generator=generator)
    results = []
    for function in (traced_forms.ctc_loss, F.ctc_loss):
        loss = function(x.log_softmax(-1), targets, given_, sizes, reduction=reduction, zero_infinity=zero_infinity)
        results.append((loss, *torch.autograd.grad(loss.sum(), x)))
    torch.testing.assert_close(*results, equal_nan=True)


def rank(number: int):
    names = ("solve", "cov of all samples", "Normal, checked")
    parity.check_programs([PROGRAMS[name].made for name in names], "dp=2", tolerance=1e-4)


def test_programs_on_processes():
    gloo.run(2, rank)


def narrow_rank(number: int):
    from torch import nn

    from ..runtime.parity import assert_close, device_mesh, full, pair

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.RMSNorm(8), nn.Linear(8, 1))
    x = torch.randn(6, 8, generator=torch.Generator().manual_seed(1))
    mine, whole = pair(model, device_mesh("dp=2"), (x,), precision="bf16")
    losses = [m(x).float().square().mean() for m in (mine, whole)]
    for loss in losses:
        loss.backward()
    assert_close(*losses, what="loss", tolerance=3e-2)
    for (name, a), b in zip(mine.named_parameters(), whole.parameters(), strict=True):
        assert_close(full(a.grad), b.grad, name, tolerance=5e-2)


def test_rms_norm_in_mixed_precision_on_processes():
    gloo.run(2, narrow_rank)
