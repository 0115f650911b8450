"""Functions that ask for values, in a module whose asserts pytest leaves as they are: some questions are checks, some
are not."""

from __future__ import annotations

import torch

# checks ---------------------------------------------------------------------------------------------


def negative(x):
    if (x.abs() < 0).any():
        raise ValueError("negative")
    return x


def nested(x):
    if x.dim() == 2 and not torch.isfinite(x).all():
        message = "not finite"
        if x.shape[0] > 1:
            raise ValueError(message)
        else:
            raise RuntimeError(message)
    return x


def otherwise(x):
    if (x.abs() >= 0).all():
        x = x * 2
    else:
        raise ValueError("negative")
    return x


def either(x):
    if torch.isnan(x).any() or bool(torch.isinf(x).any()) or any(part.isnan().any() for part in x.unbind(1)):
        raise ValueError("no number")
    return x


def asserted(x):
    assert (x.abs() >= 0).all(), "negative"
    assert x.abs().max().item() < 1e9
    return x


def in_a_helper(x):
    try:
        return negative(x)
    finally:
        x = x + 1


# no checks ------------------------------------------------------------------------------------------


def goes_on_both_ways(x):
    if (x > 0).any():
        return x * 2
    return x


def returns_early(x):
    if (x > 0).any():
        if x.shape[0] > 100:
            raise ValueError("many")
        return x * 2
    return x


def is_caught(x):
    try:
        return negative(x)
    except ValueError:
        return -x


def compares(x):
    if x.sum() in [1, 2]:  # asks for the truth of comparisons, which is not that of the test
        raise ValueError("one or two")
    return x


def loops(x):
    while (x > 0).any():
        x = x - 1
    return x


def sorts(x):
    if sorted([x[0, 0], x[0, 1]]) is None:  # values are compared, and the result is no check of that
        raise ValueError("none")
    return x


CHECKS = (negative, nested, otherwise, either, asserted, in_a_helper)
QUESTIONS = (goes_on_both_ways, returns_early, is_caught, compares, loops, sorts)
