"""The graph of one micro-batch: run on all of them it gives what the whole batch gives, or the model is refused with
the op."""

from __future__ import annotations

import inspect

import pytest
import torch
from torch import nn

from autopar import compiler
from autopar.codegen.split_batch import parts_of
from autopar.errors import MicroBatchError
from autopar.models.output import Output
from autopar.ops.streams import stream_of
from autopar.passes.pipeline.micro_batch import SAME, SUM, micro_batch
from autopar.passes.pipeline.stages import cut
from autopar.simulate.oracle import one_device_step
from tests.helpers import staged
from tests.runtime import tiny
from tests.simulate.test_dropout import convnext

functional = nn.functional
TINY = {
    "gpt": "hidden=16,heads=2,vocab=32",
    "llama": "hidden=16,heads=2,vocab=32",
    "vit": "hidden=16,heads=2,image=16,patch=8",
}


def in_parts(case: staged.Case, micro_batches: int):
    """The step, part by part, and the micro-batch."""
    micro = micro_batch(case.captured, micro_batches)
    return staged.play_stages(micro, cut(micro.captured.graph_module, ()), case.values), micro


def check(case: staged.Case, micro_batches: int, note: object = ""):
    step, micro = in_parts(case, micro_batches)
    case.check(step, f"{note} in {micro_batches} micro-batches")
    return micro


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 1, 4])
@pytest.mark.parametrize("name", ["gpt2", "llama", "t5", "bert", "vit"])
def test_families(name, micro_batches):
    check(staged.family(name), micro_batches, name)


@pytest.mark.slow
@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["gpt", "llama", "vit"])
def test_own_models(kind):
    for batch, counts in ((6, (2, 3, 6, 4)), (5, (5, 2, 3)), (7, (2, 4, 6))):
        case = staged.own(f"{kind}:layers=1,{TINY[kind]}", batch=batch)
        for count in counts:
            check(case, count, kind)


def test_one_micro_batch_is_the_whole_graph():
    captured = staged.family("resnet").captured
    micro = micro_batch(captured, 1)
    assert micro.captured is captured and micro.totals is None and set(micro.joins.values()) == {SAME}


class Loss(nn.Module):
    """Cross-entropy of a linear layer: x (B, I), target (B)."""

    def __init__(self, more=lambda model, x, y: 0.0):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.more = nn.Linear(6, 4), more

    def forward(self, x, target):
        y = self.layer(x)
        return Output(functional.cross_entropy(y, target) + self.more(self, x, y), y)


def batch(samples: int = 8):
    torch.manual_seed(1)
    target = torch.randint(0, 4, (samples,))
    target[1 : samples // 2] = -100  # one valid sample in the first half
    return dict(x=torch.randn(samples, 6), target=target)


def test_a_mean_over_valid_tokens_is_no_mean_of_means():
    model, inputs = Loss(), batch()
    case = staged.Case.of(model, inputs)
    step, micro = in_parts(case, 2)
    case.check(step, "loss")
    assert micro.joins == {"0": SUM, "1": 0} and micro.total_inputs == ("target",)
    halves = [model(inputs["x"][half], inputs["target"][half]).loss for half in (slice(0, 4), slice(4, 8))]
    assert abs(step.outputs["0"] - sum(halves) / 2) > 1e-2, "the test could not tell"


def test_totals_are_computed_from_inputs_alone():
    micro = micro_batch(staged.family("gpt2").captured, 2)
    case = staged.family("gpt2")
    leaves = [
        n.meta["role"] for n in micro.captured.graph.nodes if n.op == "placeholder" and n.meta["role"].kind == "total"
    ]
    totals = [part for part in parts_of(micro, case.values)]
    assert micro.total_inputs == ("labels",) and len(leaves) >= 1
    valid = (case.values["x_labels"][:, 1:] != -100).sum()
    for part in totals:
        assert {float(part[f"s_{r.name}"]) for r in leaves} == {float(valid)}


def norms(model, x, y):
    return 0.01 * sum(p.norm() for p in model.parameters())


@pytest.mark.parametrize("more", [
    norms, lambda model, x, y: norms(model, x, y) * 2 + y.square().mean(), lambda model, x,
    y: model.layer.bias.sum() - y.mean(), lambda model, x, y: 0.5, lambda model, x,
    y: 1 - functional.cosine_similarity(y, x[:, :4]).mean(), lambda model, x, y: y.mean() - 3,
])  # fmt: skip
def test_what_does_not_depend_on_the_batch_counts_once(more):
    case = staged.Case.of(Loss(more), batch())
    for count in (2, 4, 8):
        check(case, count)


def test_a_gradient_that_does_not_depend_on_the_batch_counts_once():
    check(staged.Case.of(staged.Apart(), (torch.randn(4, 6),)), 4)


def test_the_graph_of_the_whole_batch_stays_as_it_is():
    case = staged.Case.of(Loss(norms), batch())
    before = str(case.captured.graph)
    check(case, 4)
    assert str(case.captured.graph) == before


# random numbers
# --------------------------------------------------------------------------------------------------------


class Draws(nn.Module):
    """Everything that draws; its outputs show the numbers."""

    def __init__(self):
        super().__init__()
        self.layer, self.channels = nn.Linear(6, 6), nn.Dropout2d(0.5)

    def forward(self, x):
        y = self.layer(x)  # (B, S, 6)
        mask = functional.dropout(torch.ones_like(x), 0.3)
        noise, uniform = torch.randn_like(x), torch.rand(len(x), 5)
        path = torch.bernoulli(torch.full((len(x), 1, 1), 0.5))
        shared = torch.rand(6)
        channels = self.channels(torch.ones_like(x)[..., None])
        return (
            (y * mask * path * shared + noise).square().mean() + uniform.mean(),
            mask,
            noise,
            uniform,
            path,
            shared,
            channels,
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 3, 6])
def test_a_micro_batch_draws_the_numbers_of_its_samples(micro_batches):
    torch.manual_seed(3)
    case = staged.Case.of(Draws(), (torch.randn(6, 5, 6),))
    step, micro = in_parts(case, micro_batches)
    case.check(step, micro_batches)
    for i, wanted in enumerate(case.wanted.outputs[1:], 1):
        assert torch.equal(step.outputs[str(i)], wanted), f"output {i}"
    steps = {n.args[-1] for n in micro.captured.graph.nodes if stream_of(n) is not None}
    assert {0, 30 * 6 // micro_batches} <= steps, "of the shared number, and of a mask"


@pytest.mark.sampled(1)
@pytest.mark.parametrize("make", [
    lambda: tiny.gpt2(resid_pdrop=0.1, embd_pdrop=0.1, attn_pdrop=0.1, n_layer=1),
    lambda: tiny.bert(dropout=0.1, layers=1), convnext,
])  # fmt: skip
def test_models_with_dropout(make):
    model, inputs = make()
    case = staged.Case.of(model.train(), inputs)
    check(case, case.samples // 2)
    other = one_device_step(case.captured, {**case.values, "r_state": case.values["r_state"] + 1})
    assert abs(other.outputs[0] - case.wanted.outputs[0]) > 1e-12, "the seed changes nothing"


# refusals
# --------------------------------------------------------------------------------------------------------------


def line_of(function, text: str) -> str:
    lines, first = inspect.getsourcelines(function)
    return f"test_micro_batch.py:{first + next(i for i, line in enumerate(lines) if text in line)}"


def refused(model, inputs, micro_batches: int = 2) -> MicroBatchError:
    with pytest.raises(MicroBatchError) as caught:
        micro_batch(compiler.trace(model, inputs), micro_batches)
    return caught.value


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, x):
        return self.norm(self.layer(x)).square().mean()  # the statistics


class NormedInputs(nn.Module):
    """Statistics of the inputs alone, which are known before the first micro-batch."""

    def __init__(self):
        super().__init__()
        self.norm, self.layer = nn.BatchNorm1d(6), nn.Linear(6, 4)

    def forward(self, x):
        return self.layer(self.norm(x)).square().mean()


class Paired(nn.Module):
    """Weights of a layer behind what mixes all samples."""

    def __init__(self):
        super().__init__()
        self.layer, self.last = nn.Linear(6, 4), nn.Linear(6, 4)

    def forward(self, x):
        z = functional.normalize(self.layer(x), dim=1)
        return self.last((z @ z.t()) @ x).square().mean()  # (B, B)


class EverySample(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8))

    def forward(self, x):
        return (x.sum(1) * self.weight).sum()


def test_batch_norm_names_its_op_and_line():
    error = refused(Normed(), (torch.randn(8, 6),))
    assert (
        error.source == line_of(Normed.forward, "the statistics")
        and "sum over all samples" in error.message
        and error.node
    )
    assert "one micro-batch" in error.fix


@pytest.mark.sampled(1)
@pytest.mark.parametrize("micro_batches", [2, 3, 8])
def test_batch_norm_of_the_inputs_has_the_statistics_of_the_whole_batch(micro_batches):
    torch.manual_seed(0)
    check(staged.Case.of(NormedInputs(), (torch.randn(8, 6) * torch.arange(1.0, 9.0)[:, None],)), micro_batches)


def test_pairs_of_samples_in_the_middle_of_a_model_name_its_op_and_line():
    error = refused(Paired(), (torch.randn(8, 6),))
    assert error.source == line_of(Paired.forward, "(B, B)") and "all samples of the batch at once" in error.message


def test_a_parameter_for_every_sample():
    assert (
        refused(EverySample(), (torch.randn(8, 6),)).message
        == "the parameter weight has a value for every sample of the batch"
    )


@pytest.mark.parametrize("micro_batches, near", [(9, 8), (16, 8)])
def test_more_micro_batches_than_samples(micro_batches, near):
    error = refused(Loss(), batch(8), micro_batches)
    assert (
        f"8 samples cannot be cut into {micro_batches} micro" in error.message
        and f"use {near} micro-batches" in error.fix
    )


def test_a_sum_that_a_later_op_needs():
    class Whitened(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.last = nn.Linear(6, 4), nn.Linear(4, 4)

        def forward(self, x):
            y = self.layer(x)
            return self.last(y - y.mean(0)).square().mean()

    assert (
        "that is not known before all micro-batches have been computed"
        in refused(Whitened(), (torch.randn(8, 6),)).message
    )


class Counting(nn.Module):
    """Adds to a buffer what `count` makes of x and of the layer's result."""

    def __init__(self, count):
        super().__init__()
        self.layer, self.count = nn.Linear(6, 6), count
        self.register_buffer("total", torch.ones(6))

    def forward(self, x):
        y = self.layer(x)
        self.total.add_(self.count(x, y.detach()))
        return y.square().mean()


def test_a_buffer_that_follows_the_batch():
    count = lambda x, y: y.sum(0)  # noqa: E731
    assert refused(Counting(count), (torch.randn(8, 6),)).message == "the buffer total follows the whole batch"


def test_a_buffer_that_follows_the_inputs():
    """Each micro-batch computes the new value of the old one."""
    check(staged.Case.of(Counting(lambda x, y: x.sum(0)), (torch.randn(8, 6),)), 4)


def test_outputs_with_gradients_of_their_own():
    assert "output 1 has a gradient of its own" in refused(Both(), (torch.randn(8, 6),)).message


class Both(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x):
        y = self.layer(x)
        return y.square().mean(), y


class Counted(nn.Module):
    """A sum over the inputs that divides one term of the loss and is another."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(6, 4)

    def forward(self, x, mask):
        count = mask.sum()
        return (self.layer(x).square().sum(-1) * mask).sum() / count + 0.1 * count


@pytest.mark.parametrize("micro_batches", [2, 3, 4])
def test_a_sum_over_inputs_that_is_read_whole_and_in_parts(micro_batches):
    case = staged.Case.of(Counted(), (torch.randn(4, 6), torch.tensor([1.0, 0.0, 1.0, 1.0])))
    check(case, micro_batches)


class Doubled(nn.Module):
    """The samples twice, one after the other, in an output or in an input."""

    def __init__(self, returns: bool):
        super().__init__()
        self.layer, self.returns = nn.Linear(6, 4), returns

    def forward(self, x, other):
        y = self.layer(x)
        both = torch.cat([y, -y])
        return dict(loss=(both if self.returns else both * other).square().mean(), both=both if self.returns else y)


@pytest.mark.parametrize("returns, what", [(True, "output 1"), (False, "input args[1]")])
def test_samples_twice_in_one_tensor_of_the_call_are_refused(returns, what):
    error = refused(Doubled(returns), (torch.randn(4, 6), torch.randn(4 if returns else 8, 4)))
    assert error.message.startswith(f"{what} has the samples of the batch 2 times in dim 0")
    assert "one tensor for each time" in error.fix


class FromBooleans(nn.Module):
    """A factor of torch's default type, made of booleans."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3))

    def forward(self, x):
        return (((x > 0) + 1.5) * x * self.weight).sum()


def test_floats_of_booleans_are_as_wide_as_the_case():
    case = staged.Case.of(FromBooleans(), (torch.randn(4, 3),))
    micro_batch(case.captured, 2)  # which compares each op with what its graph says
