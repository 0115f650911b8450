"""Arguments that are no tensors are compared by their values, whoever made them and when."""

from __future__ import annotations

import copy
import enum
import functools
import threading
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from autopar.errors import InputError
from autopar.frontend.call_signature import CallSignature
from autopar.frontend.constants import text_of, value_of

X = torch.ones(2, 3)


class Plain:
    def __init__(self, **attributes):
        self.__dict__.update(attributes)


class Slotted:
    __slots__ = ("one", "other")

    def __init__(self, one):
        self.one = one


@dataclass
class Data:
    scale: float = 1.0
    names: list = field(default_factory=list)


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Mapping(dict):
    pass


def scaled(by):
    return lambda x: x * by


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3) | st.sampled_from([*Color, X.dtype]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=2), inner, max_size=3).map(Mapping)
    | st.builds(lambda a: Plain(a=a), inner) | st.builds(Slotted,
                                                         inner) | st.builds(Data, names=st.lists(inner, max_size=2))
    | st.builds(scaled, inner) | st.builds(lambda a: functools.partial(max, a), inner),
    max_leaves=6,
)  # fmt: skip


@given(values)
def test_a_copy_is_equal(value):
    assert value_of(value, "x") == value_of(copy.deepcopy(value), "x")


@given(values, values)
def test_what_pickle_writes_decides(one, other):
    """Two values are equal as one in a list, in an attribute and in a closure, or in none of them."""
    same = value_of(one, "x") == value_of(other, "x")
    for wrap in (lambda v: [v], lambda v: Plain(a=v), Slotted, scaled, lambda v: functools.partial(max, v)):
        assert (value_of(wrap(one), "x") == value_of(wrap(other), "x")) == same


@pytest.mark.parametrize("one, other", [
    (True, 1), (1, 1.0), (Plain(a=1), Plain(a=2)), (Plain(a=1), Plain(b=1)), (Slotted(1), Slotted(2)),
    (Data(2.0), Data()), (scaled(2), scaled(3)), (lambda x: x, lambda x: x + 1), (Color.RED, Color.BLUE), ([1], (1,)),
    ({"a": 1}, Mapping(a=1)), (functools.partial(max, 1), functools.partial(min, 1)),
    (Plain().__init__, Plain(a=1).__init__), (0.0, -0.0),
])  # fmt: skip
def test_what_differs(one, other):
    assert value_of(one, "x") != value_of(other, "x")


def test_an_object_that_is_changed_is_another_argument():
    config = Data()
    signature, _ = CallSignature.of((X,), dict(config=config))
    assert signature.match((X,), dict(config=Data())) is not None, "an equal one, made anew"
    config.scale = 2.0
    assert signature.match((X,), dict(config=config)) is None
    assert signature.match((X,), dict(config=X)) is None


@pytest.mark.parametrize("value, message", [
    (Plain(mask=X), "tensor inside of an object"), (scaled(X), "tensor inside of an object"),
    (threading.Lock(), "cannot be told"), ((i for i in range(3)), "cannot be told"),
])  # fmt: skip
def test_refused_at_the_first_call(value, message):
    with pytest.raises(InputError, match=message) as caught:
        CallSignature.of((X,), dict(option=value))
    assert "option" in caught.value.message and caught.value.fix


def test_texts_have_no_addresses():
    assert text_of(Plain(a=1, b=Plain(c=[2]))) == "Plain(a=1, b=Plain(c=[2]))" and text_of(3.0) == "3.0"
    assert text_of(Plain()) == "<tests.frontend.test_constants.Plain object>" and " at 0x" not in text_of([scaled(2)])


def test_an_object_that_holds_itself():
    one = Plain()
    one.me = one
    with pytest.raises(InputError, match="holds itself"):
        value_of(one, "x")
