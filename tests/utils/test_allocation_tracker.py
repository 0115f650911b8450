"""The allocation tracker on programs whose bytes are known."""

from __future__ import annotations

import torch

from autopar.utils.allocation_tracker import TRANSIENT, Allocations


def test_a_storage_counts_once_and_until_its_last_view_is_freed():
    with Allocations() as seen:
        a = torch.ones(256)
        view = a.view(16, 16).t()[2:]
        del a
        b = view + 1  # 14 x 16
        del view
        c = b.clone()
        del b, c
    assert seen.total == [1024, 1024 + 896, 896, 1792, 896, 0]
    assert seen.peak_bytes == 1920 and seen.at_peak == {TRANSIENT: 1920}


def test_what_is_there_before_and_what_is_written_in_place():
    weight, unseen = torch.ones(256), torch.ones(512)
    with Allocations() as seen:
        seen.hold("parameters", [weight])
        weight.mul_(2).add_(1)
        (unseen * 2).sum()
    assert seen.at_peak == {"parameters": 1024, TRANSIENT: 2048 + 2048 + 4}
    assert seen.storages_at_peak()[-1].maker == "aten.sum.default"


def test_the_backward_of_a_chain_frees_what_it_has_read():
    """At the peak, in the second of three backward ops: x, the three saved values, of which the caller holds the last,
    the caller's tangent, the gradient that the op reads and the one that it makes."""
    x = torch.ones(256, requires_grad=True)
    with Allocations() as seen:
        y = x.exp().exp().exp()
        seen.hold_rest("activations")
        y.backward(torch.ones(256))
        seen.hold("gradients", [x.grad])
    assert seen.at_peak == {"activations": 4 * 1024, TRANSIENT: 3 * 1024}
    assert seen.total[-1] == 1024 * 3  # x, its gradient, y
