"""Masks that keep packed documents apart become their integers, wherever libraries and users write them; what does not
say so keeps its tensor."""

from __future__ import annotations

import pytest
import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

from autopar import compiler
from autopar.ops import autopar
from autopar.passes.canonicalize import constant_values
from autopar.rules.reading import bound
from autopar.simulate.compare import verify_model

LENGTH = 7
POSITIONS = torch.tensor([[0, 1, 2, 3, 0, 1, 2], [0, 1, 0, 1, 2, 3, 4]])
IDS = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [0, 0, 1, 1, 1, 1, 1]])


class Packed(nn.Module):
    """Computes attention under a mask that is written in some way from `ids`, positions or ends of documents."""

    def __init__(self, mask):
        super().__init__()
        torch.manual_seed(0)
        self.mask, self.qkv = mask, nn.Linear(8, 24).double()

    def forward(self, x, ids, positions, ends, keep):
        q, k, v = (t.unflatten(-1, (2, 4)).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, self.mask(ids, positions, ends, keep)).square().mean()


def batch(length: int = LENGTH) -> dict[str, torch.Tensor]:
    x = torch.randn(2, length, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    keep = torch.arange(length) < torch.tensor([[length], [length - 2]])
    ends = torch.tensor([3, 5, 7])
    return dict(x=x, ids=IDS, positions=POSITIONS, ends=ends, keep=keep)


def attention_of(captured) -> tuple:
    """Return the mask's shape, whether it is causal, the shapes of the documents of queries and of keys, and the window
    if there is one."""
    (node,) = captured.graph.find_nodes(op="call_function", target=autopar.attention.default)
    mask, causal = node.args[3:5]
    shape = None if mask is None else tuple(mask.meta["val"].shape)
    window = bound(node)["window"]
    ids = [tuple(n.meta["val"].shape) for n in node.args[9:11] if n is not None]
    return shape, causal, *ids, *([window] if window else [])


def pairs(graph, length: int) -> list:
    """Return the nodes that have a number for every pair of places."""
    shapes = {n: getattr(n.meta.get("val"), "shape", ()) for n in graph.nodes}
    return [n for n, shape in shapes.items() if tuple(shape[-2:]) == (length, length)]


triangle = lambda n: torch.ones(n, n, dtype=torch.bool).tril()  # noqa: E731
place = lambda ids: torch.arange(ids.shape[-1])  # noqa: E731
BOTH = (2, LENGTH), (2, LENGTH)
WAYS = {
    "ids": (lambda ids, *_: (ids[:, :, None] == ids[:, None, :])[:, None], None, False, *BOTH),
    "causal": (lambda ids, *_: ((ids[:, :, None] == ids[:, None]) & triangle(LENGTH))[:, None], None, True, *BOTH),
    "keys first": (lambda ids, *_: ids[:, None, None, :] == ids[:, None, :, None], None, False, *BOTH),
    "causal by arange": (lambda ids, *_: (ids[:, None, :, None] == ids[:, None, None])
                         & (place(ids)[:, None] >= place(ids)), None, True, *BOTH),
    "positions": (lambda ids, p, *_: ((p == 0).cumsum(-1)[:, None, :, None] == (p == 0).cumsum(-1)[:, None, None])
                  .logical_and(triangle(LENGTH)), (2, 1, LENGTH, LENGTH), True),
    "positions once": (lambda ids, p, *_: _equal((p == 0).cumsum(-1)) & triangle(LENGTH), None, True, *BOTH),
    "ends": (lambda ids, p, ends, _: _equal(torch.searchsorted(ends, place(ids), right=True)[None])
             & triangle(LENGTH), None, True, (1, LENGTH), (1, LENGTH)),
    "ends of one row": (lambda ids, p, ends, _: (row := torch.bucketize(place(ids), ends, right=True))[:, None] == row,
                        None, False, (1, LENGTH), (1, LENGTH)),
    "padding": (lambda ids, p, e, keep: _equal(ids) & triangle(LENGTH) & keep[:, None, None], (2, 1, 1, LENGTH), True,
                *BOTH),
    "window": (lambda ids, *_: _equal(ids) & triangle(LENGTH) & triangle(LENGTH).logical_not().tril(-3).logical_not(),
               None, True, *BOTH),
    "window by arange": (lambda ids, *_: _equal(ids) & (place(ids) <= place(ids)[:, None])
                         & (place(ids) > place(ids)[:, None] - 3), None, True, *BOTH, 3),
    "both sides": (lambda ids, *_: _equal(ids) & ((place(ids) - place(ids)[:, None]).abs() < 3), None, False, *BOTH, 3),
    "one side": (lambda ids, *_: _equal(ids) & (place(ids) > place(ids)[:, None] - 3), (LENGTH, LENGTH), False, *BOTH),
    "tril": (lambda ids, *_: (ids[:, :, None] == ids[:, None]).tril()[:, None], None, True, *BOTH),
    "tril of ones": (lambda ids, *_: _equal(ids) & ids.new_ones(LENGTH, LENGTH, dtype=torch.bool).tril(), None, True,
                     *BOTH),
    "tril from below": (lambda ids, *_: _equal(ids).tril(-1), (LENGTH, LENGTH), False, *BOTH),
    "cast": (lambda ids, *_: _equal(ids.int()), None, False, *BOTH),
    "of the whole batch": (lambda ids, *_: _equal(ids[:1].expand(2, -1)), None, False, *BOTH),
    # what says something else
    "other ids of keys": (lambda ids, p, *_: ids[:, None, :, None] == p[:, None, None], (2, 1, LENGTH, LENGTH), False),
    "shifted": (lambda ids, *_: ids[:, None, :, None] == ids.roll(1, -1)[:, None, None], (2, 1, LENGTH, LENGTH), False),
    "turned": (lambda ids, *_: ids[:, None, :, None] == ids.flip(0)[:, None, None], (2, 1, LENGTH, LENGTH), False),
    "numbers": (lambda ids, *_: _equal(ids.double()), (2, 1, LENGTH, LENGTH), False),
    "less": (lambda ids, *_: ids[:, None, :, None] >= ids[:, None, None], (2, 1, LENGTH, LENGTH), False),
    "written later": (lambda ids, *_: _written_later(ids.clone()), (2, 1, LENGTH, LENGTH), False),
    "equality written": (lambda ids, *_: _written(_equal(ids)), (2, 1, LENGTH, LENGTH), False),
    "order written": (lambda ids, *_: _written(place(ids) <= place(ids)[:, None]) & (ids[:, None, None] < 2),
                      (2, 1, LENGTH, LENGTH), False),
    "ones written": (lambda ids, *_: _written(ids.new_ones(LENGTH, LENGTH, dtype=torch.bool)) & _equal(ids),
                     (LENGTH, LENGTH), False, *BOTH),
    "heads": (lambda ids, *_: ids[:, :, None] == ids[:, None, :], (2, LENGTH, LENGTH), False),
}  # fmt: skip


def _equal(ids: torch.Tensor) -> torch.Tensor:
    return ids[:, None, :, None] == ids[:, None, None, :]


def _written(mask: torch.Tensor) -> torch.Tensor:
    mask[..., 0] = True
    mask[..., 3, 1] = False
    return mask


def _written_later(ids: torch.Tensor) -> torch.Tensor:
    mask = _equal(ids)
    ids[:, 0] = 9
    return mask & (ids[:, None, None] < 10)


@pytest.mark.parametrize("way", WAYS)
def test_what_is_found(way):
    mask, *expected = WAYS[way]
    captured = compiler.trace(Packed(mask), batch())
    assert attention_of(captured) == tuple(expected)
    if len(expected) == 4 and (expected[0] or ())[-2:] != (LENGTH, LENGTH):
        assert not pairs(captured.graph, LENGTH)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_same_numbers(way):
    report = verify_model(Packed(WAYS[way][0]), batch(), "tp=2")
    assert report.match and max(report.errors.values()) <= 1e-12, str(report)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("way", ["causal by arange", "tril", "tril of ones", "of positions", "of a library"])
def test_no_length_is_too_long(way, monkeypatch):
    """Causal masks are known from the places of queries and of keys, where all pairs would be too many."""
    monkeypatch.setattr(constant_values, "LARGEST_NUMEL", 2 * LENGTH)
    if way == "of a library":
        inputs = {name: x for name, x in _packed().items() if name != "position_ids"}
        assert attention_of(compiler.trace(_model("Llama"), inputs)) == (None, True)
    elif way == "of positions":
        assert attention_of(compiler.trace(_model("Llama"), _packed())) == (None, True, *BOTH)
    else:
        assert attention_of(compiler.trace(Packed(WAYS[way][0]), batch())) == (None, True, *BOTH)


def _model(name: str, **options) -> nn.Module:
    """Return a small model of transformers'."""
    torch.manual_seed(0)
    sizes = dict(vocab_size=24, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
                 num_key_value_heads=2, max_position_embeddings=32, use_cache=False, head_dim=8)  # fmt: skip
    return getattr(hf, f"{name}ForCausalLM")(getattr(hf, f"{name}Config")(**sizes | options))


def _packed() -> dict[str, torch.Tensor]:
    ids = torch.arange(2 * LENGTH).view(2, LENGTH)
    return dict(input_ids=ids, labels=ids, position_ids=POSITIONS)


@pytest.mark.parametrize("name, options", [
    ("Mistral", {"sliding_window": LENGTH}), pytest.param("Llama", {}, marks=pytest.mark.slow),
    pytest.param("Qwen2", {}, marks=pytest.mark.slow),
    pytest.param("Qwen3", {}, marks=pytest.mark.slow),
])  # fmt: skip
def test_positions_that_start_again(name, options):
    """transformers makes causal documents of positions that start again, and no tensor of all pairs is left."""
    captured = compiler.trace(_model(name, **options), _packed())
    assert not pairs(captured.graph, LENGTH) and attention_of(captured) == (None, True, *BOTH)


def test_windows_of_positions():
    """A window of positions is one of places inside of a document."""
    captured = compiler.trace(_model("Mistral", sliding_window=3), _packed())
    assert not pairs(captured.graph, LENGTH) and attention_of(captured) == (None, True, *BOTH, 3)


def test_positions_that_are_read_otherwise():
    """The beginning of chunks of positions counts, not the distance: the comparison stays."""

    def mask(ids, positions, *_):
        first = positions[:, :1] - 1
        ids = (torch.diff(positions, prepend=first) != 1).cumsum(-1)
        chunks = positions // 3
        return _equal(ids) & _equal(chunks)

    captured = compiler.trace(Packed(mask), batch())
    shape, causal, *documents = attention_of(captured)
    assert (shape, causal, documents) == ((2, 1, LENGTH, LENGTH), False, [*BOTH])
    assert verify_model(Packed(mask), batch(), "dp=2").match
