"""Programs that vary what comes out of a call."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch

from .nets import Net
from .program import Topic, one, randn

outputs = Topic(__name__)


Point = namedtuple("Point", "mean std")


@dataclass
class Result:
    loss: torch.Tensor
    logits: torch.Tensor
    note: str = "fine"
    extra: dict | None = None


class Returning(Net):
    """A Net whose result is `form(self, y, x)`."""

    def __init__(self, form):
        super().__init__()
        self._form = form

    def forward(self, x):
        return self._form(self, super().forward(x), x)


def _view_of_another(m, y, x):
    flat = y.reshape(-1)
    return y, flat[:4], y.t()


FORMS = {
    "tuple": lambda m, y, x: (y, y.sum()),
    "list": lambda m, y, x: [y, y * 2],
    "nested": lambda m, y, x: {"a": [y, (y.sum(), None, 3)], "b": {"c": y.mean(), "d": "text"}},
    "ordered_dict": lambda m, y, x: OrderedDict(first=y, second=y.exp()),
    "namedtuple": lambda m, y, x: Point(y.mean(0), y.std(0)),
    "dataclass": lambda m, y, x: Result(y.square().mean(), y, extra={"y": y.abs()}),
    "single_in_list": lambda m, y, x: [y],
    "empty_tuple_inside": lambda m, y, x: (y, ()),
    "with_none": lambda m, y, x: (None, y, None),
    "with_numbers": lambda m, y, x: (y, 1, 2.5, True, "s"),
    "shape_returned": lambda m, y, x: (y, y.shape, y.dtype),
    "size_as_number": lambda m, y, x: (y, x.shape[0], len(x)),
    "integers": lambda m, y, x: (y, y.argmax(-1), y > 0),
    "same_twice": lambda m, y, x: (y, y),
    "loss_twice": lambda m, y, x: {"loss": (loss := y.square().mean()), "total": loss, "y": y},
    "view_of_another": _view_of_another,
    "input_returned": lambda m, y, x: (y, x),
    "input_alone": lambda m, y, x: x,
    "view_of_the_input": lambda m, y, x: (y, x[:, :2], x.t()),
    "parameter_returned": lambda m, y, x: (y, m.up.weight),
    "parameter_alone": lambda m, y, x: m.down.bias,
    "view_of_a_parameter": lambda m, y, x: (y, m.up.weight[1:3], m.down.weight.t()),
    "detached_and_not": lambda m, y, x: (y, y.detach()),
    "constant": lambda m, y, x: (y, torch.arange(4), torch.ones(2, 3)),
    "expanded": lambda m, y, x: (y, y.sum().expand(4, 2)),
    "transposed": lambda m, y, x: y.t(),
    "scalar_tensor": lambda m, y, x: y.sum(),
    "half_output": lambda m, y, x: (y, y.to(torch.bfloat16)),
    "double_output": lambda m, y, x: (y, y.double()),
    "complex_output": lambda m, y, x: (y, torch.fft.rfft(y)),
    "empty_output": lambda m, y, x: (y, y[:0]),
    "nan_output": lambda m, y, x: (y, (y - 10).log()),
    "many": lambda m, y, x: tuple(y[i] for i in range(y.shape[0])),
    "split": lambda m, y, x: y.split([1, 2], dim=1),
    "unbind": lambda m, y, x: y.unbind(0),
}
for name, form in FORMS.items():
    outputs.add(f"returns_{name}", lambda form=form: (Returning(form), one(5, 6)))


@outputs()
def output_written_after_the_call():
    """The user writes into an output, and no later call sees it."""

    def script(run):
        y = run.model(randn(1, 5, 6)).detach()
        y.zero_()
        run.call(randn(1, 5, 6))

    return Net(), one(5, 6), script


@outputs()
def outputs_of_two_calls_apart():
    """The output of the first call is not changed by the second."""

    def script(run):
        with torch.no_grad():
            first = run.model(randn(1, 5, 6))
            second = run.model(randn(2, 5, 6))
        run.record(first=first, second=second)

    return Net(), one(5, 6), script
