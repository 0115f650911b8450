"""Pointwise ops of emitted graphs are one kernel of Inductor."""

from __future__ import annotations

import pytest

from benchmarks.fused import MOST, OPS, kernels_of


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)
def test_one_kernel_forward_and_two_backward(name):
    assert all(0 < found <= most for found, most in zip(kernels_of(name), MOST))
