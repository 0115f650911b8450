"""Taking calls and outputs apart, and putting them together again."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from dataclasses import dataclass

import pytest
import torch

from autopar.errors import CaptureError, InputError
from autopar.frontend.call_signature import CallSignature, Returns, describe_call, split_example

X, Y = torch.zeros(2, 3), torch.ones(2, dtype=torch.int64)


@pytest.mark.parametrize(
    "example, expected",
    [
        ({"x": X}, ((), {"x": X})),
        ((X, Y), ((X, Y), {})),
        ([X], ((X,), {})),
        (((X,), {"y": Y}), ((X,), {"y": Y})),
        (X, ((X,), {})),
        ((X, {"y": Y}), ((X, {"y": Y}), {})),  # a dict as second argument, not a pair of (args, kwargs)
    ],
)
def test_split_example(example, expected):
    assert str(split_example(example)) == str(expected)


def test_a_signature_takes_calls_of_its_form():
    signature, tensors = CallSignature.of((X, 2, "text"), {"y": [Y, None], "flag": True})
    assert signature.names == ("args[0]", "args[1]", "args[2]", "y.0", "y.1", "flag")
    assert signature.tensor_names == ["args[0]", "y.0"] and tensors[0] is X and tensors[1] is Y
    args, kwargs = signature.rebuild(["first", "second"])
    assert args == ("first", 2, "text") and kwargs == {"y": ["second", None], "flag": True}
    assert signature.shape_of("y.0") == (2,)
    again = signature.match((X + 1, 2, "text"), {"flag": True, "y": [Y, None]})  # keywords in another order
    assert torch.equal(again[0], X + 1) and again[1] is Y


def test_a_signature_knows_other_calls():
    signature, _ = CallSignature.of((X,), {"flag": True})
    for args, kwargs in [
        ((X, X), {"flag": True}), ((X,), {}), ((), {"flag": True}), ((X,), {"flag": 1}), ((X,), {"flag": X}),
        ((3,), {"flag": True}), ((X.T,), {"flag": True}), ((X.double(),), {"flag": True}), (([X],), {"flag": True}),
    ]:  # fmt: skip
        assert signature.match(args, kwargs) is None
    assert signature.match((X[:1],), {"flag": True}, parts=((1, 3), None))
    assert (
        describe_call((X,), {"y": [Y, X.half()], "flag": True})
        == "args[0] (2, 3), flag=True, y.0 (2,), y.1 (2, 3) float16"
    )
    assert describe_call((), {}) == "nothing"
    with pytest.raises(InputError, match=r"args\[0\] is empty"):
        CallSignature.of((X[:0],), {})


def test_an_input_with_a_gradient_is_another_form():
    """Unless nothing is recorded for autograd."""
    wanted, plain = X.clone().requires_grad_(), CallSignature.of((X,), {})[0]
    with_gradient, _ = CallSignature.of((wanted,), {})
    assert plain.match((wanted,), {}) is None and with_gradient.match((X,), {}) is None
    assert with_gradient.differentiated_names == ["args[0]"] and with_gradient.match((wanted,), {})[0] is wanted
    assert describe_call((wanted, X), {}) == "args[0] (2, 3) with gradient, args[1] (2, 3)"
    with torch.no_grad():
        assert plain.match((wanted,), {}) and with_gradient.match((wanted,), {}) is None


@dataclass
class Result:
    loss: torch.Tensor
    parts: dict
    hidden: object = None


@pytest.mark.parametrize(
    "output, names, loss",
    [
        (X, ["output"], None),
        (X.sum(), ["output"], 0),
        ((X, [Y, None]), ["[0]", "[1][0]"], None),
        ({"y": X, "loss": X.sum()}, ["y", "loss"], 1),
        ({"y": Y, "loss": X}, ["y", "loss"], None),  # not a number
        (OrderedDict(a={"b": X}), ["a.b"], None),
        (Result(X.sum(), {"y": X}, "text"), ["loss", "parts.y"], 0),
    ],
)
def test_returns_are_rebuilt(output, names, loss):
    returns = Returns()
    tensors = returns.take_apart(output)
    assert returns.names == names and returns.loss == loss and returns.count == len(tensors)
    assert str(returns.rebuild(tensors)) == str(output)


def test_returns_refuse_what_they_cannot_see_into():
    for output, message in [
        ({"y": object(), "x": X}, "returns a object as y"),
        (None, "returns no tensor"),
        ([1.0], "no tensor"),
    ]:
        with pytest.raises(CaptureError, match=message):
            Returns().take_apart(output)


def test_a_rebuilt_output_is_freed_with_its_last_reference():
    """Without waiting for garbage collection: the logits are the largest tensor of many steps."""
    returns = Returns()
    returns.take_apart({"loss": torch.zeros(()), "logits": torch.zeros(8)})
    output = returns.rebuild([torch.zeros(()), torch.zeros(8)])
    logits = weakref.ref(output["logits"])
    del output  # the collector is off in tests
    assert logits() is None
