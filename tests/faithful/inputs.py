"""Programs that vary what goes into a call."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from .nets import Net
from .program import Topic, calls, ids, one, randn

inputs = Topic(__name__)


@inputs()
def input_written_in_place():
    """The forward scales its input in place."""

    class Writing(Net):
        def forward(self, x):
            x.mul_(0.5)
            return super().forward(x)

    return Writing(), one(5, 6)


@inputs()
def input_row_zeroed():
    """The forward zeroes a row of its input."""

    class Writing(Net):
        def forward(self, x):
            x[0] = 0
            return super().forward(x)

    return Writing(), one(5, 6)


@inputs()
def input_written_after_use():
    """An input is accumulated into, as a cache that the caller owns."""

    class Accumulating(Net):
        def forward(self, x, total):
            y = super().forward(x)
            total += y.detach().sum(0)
            return y

    return Accumulating(), lambda seed: (randn(seed, 5, 6), randn(seed + 3, 3))


@inputs()
def same_tensor_twice():
    """One tensor is passed for two arguments, and then two are."""

    class Two(Net):
        def forward(self, a, b):
            return super().forward(a + 2 * b)

    def script(run):
        run.call(x := randn(1, 5, 6), x)
        run.call(randn(2, 5, 6), randn(3, 5, 6))

    return Two(), lambda seed: ((x := randn(seed, 5, 6)), x), script


@inputs()
def same_tensor_twice_written():
    """One of two arguments is written, and in a later call both are the same tensor."""

    class Two(Net):
        def forward(self, a, b):
            a.add_(1)
            return super().forward(a + 2 * b)

    def script(run):
        run(1)
        run.call(x := randn(1, 5, 6), x)

    return Two(), lambda seed: (randn(seed, 5, 6), randn(seed + 5, 5, 6)), script


LAYOUTS = {
    "transposed": lambda seed: randn(seed, 6, 5).t(),
    "strided": lambda seed: randn(seed, 10, 6)[::2],
    "offset": lambda seed: randn(seed, 5, 9)[:, 3:],
    "expanded": lambda seed: randn(seed, 1, 6).expand(5, 6),
    "channels_last": lambda seed: randn(seed, 6, 5).as_strided((5, 6), (1, 5)),
}
for name, layout in LAYOUTS.items():

    def _layout_script(run, layout=layout):
        run.call(randn(1, 5, 6))
        run.call(layout(2))

    inputs.add(f"planned_{name}", lambda layout=layout: (Net(), lambda seed: (layout(seed),)))
    inputs.add(f"later_{name}", lambda script=_layout_script: (Net(), one(5, 6), script))


@inputs()
def images_channels_last():
    """Images in channels_last are convolved."""

    def batch(seed):
        return (randn(seed, 4, 3, 5, 7).to(memory_format=torch.channels_last),)

    return nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.ReLU(), nn.Conv2d(6, 2, 1)), batch


class Options(Net):
    """Arguments of all kinds, each of which changes the result."""

    def forward(self, x, scale: float = 1.0, power: int = 1, *, squash: bool = False, reduce: str = "none", extra=None):
        y = super().forward(x) * scale
        y = y**power
        if squash:
            y = y.tanh()
        if extra is not None:
            y = y + extra
        return {"none": lambda: y, "mean": y.mean, "sum": y.sum}[reduce]()


CALLS = {
    "defaults_then_float": [((), {}), ((2.5,), {}), ((), {"scale": 0.5})],
    "int_that_changes": [((1.0, 2), {}), ((), {"power": 3}), ((), {"power": 2})],
    "bool_that_changes": [((), {"squash": True}), ((), {"squash": False})],
    "string_that_changes": [((), {"reduce": "mean"}), ((), {"reduce": "sum"})],
    "none_then_tensor": [((), {}), ((), {"extra": "tensor"}), ((), {"extra": None})],
    "order_of_keywords": [((), {"squash": True, "scale": 2.0}), ((), {"scale": 2.0, "squash": True})],
    "float_for_int": [((1.0, 2.0), {}), ((1, 2), {}), ((True, 1), {})],
    "nan_as_argument": [((float("inf"),), {}), ((0.0,), {}), ((-0.0,), {})],
}
for name, arguments in CALLS.items():

    def _options_script(run, arguments=arguments):
        for seed, (args, kwargs) in enumerate(arguments):
            kwargs = {k: randn(9, 3) if v == "tensor" else v for k, v in kwargs.items()}
            run.call(randn(seed, 5, 6), *args, **kwargs)

    inputs.add(name, lambda script=_options_script: (Options(), one(5, 6), script))


@inputs(raises=True)
def wrong_keyword():
    """A keyword that the forward does not have: eager raises TypeError."""

    def script(run):
        run(1)
        run.call(randn(1, 5, 6), colour=3)

    return Options(), one(5, 6), script


@inputs()
def learning_rate_like_floats():
    """A float argument takes a new value in each of many calls."""

    def script(run):
        for i in range(20):
            run.call(randn(i, 5, 6), 0.1 * i)

    return Options(), one(5, 6), script


@inputs()
def batch_sizes_that_change():
    """Every call has another batch size, a single sample among them."""

    def script(run):
        for seed, size in enumerate((5, 3, 8, 1, 7, 2)):
            run.call(randn(seed, size, 6))

    return Net(), one(4, 6), script


@inputs()
def branch_on_batch_size():
    """The forward branches on the batch size."""

    class Branching(Net):
        def forward(self, x):
            y = super().forward(x)
            return y.mean() if x.shape[0] > 4 else y.sum()

    return Branching(), one(5, 6), calls((3, 6), (6, 6), (4, 6))


@inputs()
def dtypes_that_change():
    """Integer inputs are cast by the forward; a later call passes floats."""

    class Casting(Net):
        def forward(self, x):
            return super().forward(x.float())

    def script(run):
        run.call(ids(1, 9, 5, 6))
        run.call(ids(2, 9, 5, 6).to(torch.int32))
        run.call(randn(3, 5, 6))
        run.call(ids(4, 2, 5, 6).bool())

    return Casting(), lambda seed: (ids(seed, 9, 5, 6),), script


@inputs()
def lists_and_dicts_of_tensors():
    """Inputs in lists and dicts, of lengths that change."""

    class Nested(Net):
        def forward(self, xs, more):
            return sum(super(Nested, self).forward(x) for x in xs) + more["a"] * more.get("b", 1.0)

    def script(run):
        run.call(xs=[randn(1, 5, 6)], more={"a": randn(2, 3)})
        run.call(xs=[randn(1, 5, 6), randn(2, 5, 6), randn(3, 5, 6)], more={"a": randn(2, 3), "b": 2.0})

    return (
        Nested(),
        lambda seed: {"xs": [randn(seed, 5, 6), randn(seed + 1, 5, 6)], "more": {"a": randn(seed, 3)}},
        script,
    )


@inputs()
def masks_and_labels():
    """Boolean masks and labels that are ignored, in other numbers in each call."""

    class Masked(Net):
        def forward(self, x, mask, labels):
            y = super().forward(x.masked_fill(mask, 0.0))
            return F.cross_entropy(y, labels, ignore_index=-100)

    def batch(seed):
        labels = ids(seed, 3, 7)
        labels[: seed + 1] = -100
        return randn(seed, 7, 6), randn(seed, 7, 6) > 1, labels

    return Masked(), batch


@inputs()
def empty_batch():
    """A batch without samples, in a later call."""

    def script(run):
        run(1)
        run.call(randn(1, 0, 6))

    return Net(), one(5, 6), script


@inputs()
def zero_dimensional_inputs():
    """Scalars as tensors beside a batch."""

    class Scalars(Net):
        def forward(self, x, a, n):
            return super().forward(x) * a + n

    return Scalars(), lambda seed: (randn(seed, 5, 6), randn(seed), torch.tensor(seed))
