"""A result that is looked up is the one that torch computes: form, memory that it shares, and values beside tensors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar._torch import fake_mode, storage_key
from autopar.passes.distribute import local_values
from autopar.passes.distribute.local_values import local_value

aten = torch.ops.aten
CALLS = {
    "view": lambda x, y: (aten.view.default, (x, [-1]), {}),
    "reshape that copies": lambda x, y: (aten.reshape.default, (x.t(), [-1]), {}),
    "permute": lambda x, y: (aten.permute.default, (x, [1, 0]), {}),
    "slice": lambda x, y: (aten.slice.Tensor, (x, 1, 1, 3), {}),
    "select": lambda x, y: (aten.select.int, (x, 0, 1), {}),
    "reshape of a slice": lambda x, y: (aten.reshape.default, (x[1:], [-1]), {}),
    "reshape of columns that copies": lambda x, y: (aten.reshape.default, (x[:, 1:], [-1]), {}),
    "slice of a slice": lambda x, y: (aten.slice.Tensor, (x[1:], 0, 1, 2), {}),
    "expand": lambda x, y: (aten.expand.default, (x[:, :1], [-1, 5]), {}),
    "split": lambda x, y: (aten.split.Tensor, (x, 1, 0), {}),
    "add": lambda x, y: (aten.add.Tensor, (x, y), {"alpha": 2}),
    "add of two views": lambda x, y: (aten.add.Tensor, (x[:1], x[1:2]), {}),
    "cat": lambda x, y: (aten.cat.default, ([x, y, x], 1), {}),
    "topk": lambda x, y: (aten.topk.default, (x, 1), {}),
    "cast": lambda x, y: (aten._to_copy.default, (x,), {"dtype": torch.bfloat16}),
    "no tensor": lambda x, y: (aten.full.default, ([2, 3], 1.5), {"device": torch.device("cpu")}),
    "layer norm": lambda x, y: (aten.native_layer_norm.default, (x, [x.shape[-1]], None, None, 1e-5), {}),
    "half of the gradients": lambda x, y: (
        aten.native_layer_norm_backward.default,
        (x, y, [x.shape[-1]], x.sum(-1, keepdim=True), x.sum(-1, keepdim=True), x[0], None, [True, False, False]), {},
    ),
}  # fmt: skip


def described(value: object, known: dict[int, str]):
    if isinstance(value, torch.Tensor):
        where = known.setdefault(storage_key(value), f"new memory {len(known)}")
        size = value.untyped_storage().nbytes()
        return tuple(value.shape), value.stride(), value.storage_offset(), value.dtype, value.device, where, size
    return [described(v, known) for v in value] if isinstance(value, (tuple, list)) else value


@settings(deadline=None)
@given(name=st.sampled_from(sorted(CALLS)), rows=st.integers(2, 5), columns=st.integers(3, 6))
def test_looked_up_is_computed(name, rows, columns):
    texts = []
    for _ in range(3):  # computed by torch, computed and kept, looked up
        mode = fake_mode()
        with mode:
            x, y = torch.empty(rows, columns), torch.empty(rows, columns)
            target, args, kwargs = CALLS[name](x, y)
            plain = target(*args, **kwargs) if not texts else None
        value = plain if not texts else local_value(target, args, kwargs, mode)
        texts.append(described(value, {storage_key(x): "x", storage_key(y): "y"}))
    assert texts[0] == texts[1] == texts[2]


def test_most_are_looked_up(monkeypatch):
    mode = fake_mode()
    with mode:
        x, y = torch.empty(3, 4), torch.empty(3, 4)
        calls = [make(x, y) for make in CALLS.values()]
    local_values._known.clear()
    for target, args, kwargs in calls:
        local_value(target, args, kwargs, mode)
    assert all(known is not None for known in local_values._known.values()) and len(local_values._known) == len(CALLS)


@pytest.mark.parametrize("one, other", [(1, True), (1, 1.0), (2, 3)])
def test_equal_numbers_of_other_types_are_other_calls(one, other):
    mode = fake_mode()
    with mode:
        x = torch.empty(3, dtype=torch.int64)
    types = [local_value(aten.mul.Scalar, (x, number), {}, mode).dtype for number in (one, other, one)]
    assert types == [torch.int64 if isinstance(n, int) else torch.float32 for n in (one, other, one)]


def test_what_changes_its_arguments_is_computed():
    mode = fake_mode()
    with mode:
        x = torch.empty(3)
    before = len(local_values._known)
    assert local_value(aten.add_.Tensor, (x, 1), {}, mode) is x and len(local_values._known) == before


def test_the_table_does_not_grow_without_end(monkeypatch):
    monkeypatch.setattr(local_values, "LIMIT", 10)
    mode = fake_mode()
    for size in range(1, 50):
        assert local_value(aten.full.default, ([size], 0.0), {"device": torch.device("cpu")}, mode).shape == (size,)
        assert len(local_values._known) <= 10
