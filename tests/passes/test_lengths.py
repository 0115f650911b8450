"""Tests that dims of outputs with an input's length are found for any shapes, and what cannot be followed is known."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn

from autopar.compiler import trace
from autopar.errors import InputError
from autopar.ir.graph import outputs_of
from autopar.passes.pipeline.lengths import dims_in_outputs
from autopar.runtime.lengths import Length, OwnLengths


class Causal(nn.Module):
    """ids (B, S) -> outputs with the tokens in several places: no token depends on a later one."""

    def __init__(self, heads: int, width: int):
        super().__init__()
        self.embed, self.heads = nn.Embedding(11, heads * width), heads
        self.qkv = nn.Linear(heads * width, 3 * heads * width)

    def forward(self, ids):
        x, (batch, length) = self.embed(ids), ids.shape
        q, k, v = self.qkv(x).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length).tril().log()
        weights = (q @ k.transpose(-1, -2) + mask).softmax(-1)  # (B, H, S, S)
        y = (weights @ v).transpose(1, 2)  # (B, S, H, D)
        flat = y.reshape(batch * length, -1)
        return {
            "y": y, "merged": y.flatten(1), "rows": flat, "back": flat.view(batch, length, -1), "weights": weights,
            "turned": y.permute(3, 1, 0, 2), "first": y[:, 0], "best": y.sum(-1).argmax(-1), "count": ids.cumsum(1),
            "shifted": y[:, 1:], "inner": y[:, 1:-1].flatten(2), "end": y[:, -1].sum(-1), "three": y[:, :3],
            "last": y[:, -2:], "turned back": y.flip(1), "doubled": torch.cat([y, y], 1), "loss": y.sum(),
        }  # fmt: skip


LOST = ("three", "last", "turned back")


def _own(whole: dict, ids: torch.Tensor, own: int, side: str) -> dict[str, torch.Tensor | None]:
    """Return outputs of a padded call in the length that the rank has, None for those that cannot be followed."""
    model, length = whole["model"], ids.shape[1]
    captured = trace(model, (ids,))
    lengths, found = OwnLengths({("args[0]", 1): Length.of(own, length, side)}), {}
    places = dims_in_outputs(captured.graph, {"args[0]"})
    for (node, role), of_output in zip(outputs_of(captured.graph), places):
        if role.kind == "output":
            name = captured.returns.names[int(role.name)]
            try:
                found[name] = lengths.shortened(whole[name], of_output, node.meta["val"].shape, name)
            except InputError as error:
                assert (
                    "counted from the end" if name in ("end", "last") and side == "right" else "which places"
                ) in str(error)
                found[name] = None
    return found


@pytest.mark.sampled(1)
@pytest.mark.parametrize("seed", range(6))
def test_places_are_those_of_the_own_length(seed):
    draw = random.Random(seed)
    batch, heads, width, length = (draw.randint(2, 5) for _ in range(4))
    length += 3
    own, side = draw.randint(2, length - 1), draw.choice(["left", "right"])
    torch.manual_seed(seed)
    model, ids = Causal(heads, width), torch.randint(0, 11, (batch, length))
    found = _own({**model(ids), "model": model}, ids, own, side)
    kept = slice(length - own, None) if side == "left" else slice(0, own)
    expected, words = model(ids), f"seed {seed}: batch {batch}, heads {heads}, width {width}, {own} of {length} {side}"
    y = expected["y"][:, kept]
    cut = {
        "y": y, "merged": y.flatten(1), "rows": y.reshape(batch * own, -1), "back": y.reshape(batch, own, -1),
        "shifted": y[:, 1:], "inner": y[:, 1:-1].flatten(2),
        "weights": expected["weights"][:, :, kept, kept], "turned": y.permute(3, 1, 0, 2), "first": expected["first"],
        "best": expected["best"][:, kept], "count": expected["count"][:, kept],
        **({"end": y[:, -1].sum(-1)} if side == "left" else {}), "doubled": torch.cat([y, y], 1),
        "loss": expected["loss"],
    }  # fmt: skip
    lost = {*LOST, "end"} if side == "right" else {*LOST}
    assert {name for name, value in found.items() if value is None} == lost, words
    for name, value in cut.items():
        assert torch.equal(found[name], value), (name, words)
    if side == "right":  # what the rank would have computed of its own samples alone
        alone = model(ids[:, :own])
        assert all(torch.allclose(found[n], alone[n], atol=1e-6) for n in cut if n not in ("loss",)), words
