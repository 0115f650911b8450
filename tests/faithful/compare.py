"""The first thing in which two runs of a program differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

MISSING = object()
COARSE = 0.1  # the tolerance of what is computed in bf16, whose outputs are in bf16 too
NOISES = 3  # times that the eager run changes with its rounding: so much may the compiled one differ, for each part
SHARE = 0.1  # of the largest gradient, or parameter: what cancels, or follows it, is no more exact than its terms


def difference(
    eager: Sequence[Mapping], mine: Sequence[Mapping], tolerance: float, elsewhere=frozenset(),
    rounded: Sequence[Sequence[Mapping]] = (), parts: int = 1,
) -> str | None:  # fmt: skip
    """Return the first difference in words of the records that both have, in the order in which they were made; None if
    there is none. `elsewhere`: parameters and buffers that are on other ranks of a pipeline; `rounded`: records of
    eager runs with other rounding; `parts`: into so many parts sums are cut, each of which is rounded."""
    birth = eager[0] if eager else {}
    for i, (wanted, found) in enumerate(zip(eager, mine)):
        when = "after compile" if i == 0 else f"record {i}"
        leasts = {kind: SHARE * max((_scale(v) for path, v in wanted.items() if path.startswith(kind)), default=0.0)
                  for kind in ("gradient of ", "parameter ")}  # fmt: skip
        for path in (*wanted, *(p for p in found if p not in wanted and not p.startswith("attribute"))):
            if elsewhere and any(word in elsewhere for word in path.split()):
                continue
            value, got = wanted.get(path, MISSING), found.get(path, MISSING)
            if got is MISSING and path.startswith("attribute") and _same(value, birth.get(path, MISSING), 0.0) is None:
                continue  # the compiled module need not repeat what never changes
            noise = parts * max((_distance(value, run[i].get(path)) for run in rounded if i < len(run)), default=0.0)
            least = next((least for kind, least in leasts.items() if path.startswith(kind)), 0.0)
            reason = _same(value, got, tolerance, least, noise)
            if reason is not None:
                return f"{when}: {path}: {reason}"
    return None


def _distance(one, other) -> float:
    """Return the largest difference of two tensors that is finite; 0.0 of anything else."""
    if not isinstance(one, Tensor) or not isinstance(other, Tensor) or one.shape != other.shape:
        return 0.0
    return _scale(one.double() - other.double()) if one.is_floating_point() and other.is_floating_point() else 0.0


def _scale(value) -> float:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.numel():
        return 0.0
    return value.nan_to_num(0.0, 0.0, 0.0).abs().max().item()


def _same(wanted, got, tolerance: float, least: float = 0.0, noise: float = 0.0) -> str | None:
    """None, or how `got` differs; tensors by more than `tolerance` of their largest element, or of `least` if that is
    more, and NOISES times the `noise` of rounding."""
    if wanted is MISSING or got is MISSING:
        return None if wanted is got else f"{_text(got)} instead of {_text(wanted)}"
    if isinstance(wanted, Tensor) or isinstance(got, Tensor):
        return _same_tensors(wanted, got, tolerance, least, noise)
    if isinstance(wanted, float) and isinstance(got, float):
        close = math.isclose(wanted, got, rel_tol=10 * tolerance, abs_tol=tolerance * 1e-2)
        return None if close or (math.isnan(wanted) and math.isnan(got)) else f"{got} instead of {wanted}"
    if type(wanted) is not type(got):
        return f"a {type(got).__name__} {_text(got)} instead of a {type(wanted).__name__} {_text(wanted)}"
    return None if wanted == got else f"{_text(got)} instead of {_text(wanted)}"


def _same_tensors(wanted, got, tolerance: float, least: float, noise: float) -> str | None:
    if not isinstance(wanted, Tensor) or not isinstance(got, Tensor):
        return f"{_text(got)} instead of {_text(wanted)}"
    narrowed = tolerance >= COARSE and got.dtype == torch.bfloat16
    if wanted.shape != got.shape or (wanted.dtype != got.dtype and not narrowed):
        return f"{got.dtype} {tuple(got.shape)} instead of {wanted.dtype} {tuple(wanted.shape)}"
    if not wanted.numel() or torch.equal(wanted, got):
        return None
    if not (wanted.is_floating_point() or wanted.is_complex()):
        return f"{_text(got)} instead of {_text(wanted)}"
    finite = torch.isfinite(wanted)
    if not torch.equal(finite, torch.isfinite(got)):
        return f"{_text(got)} instead of {_text(wanted)}, not finite in other places"
    wide = torch.complex128 if wanted.is_complex() else torch.float64
    wanted, got = wanted[finite].to(wide), got[finite].to(wide)
    if not wanted.numel():
        return None
    narrow = 1e-3 if tolerance >= COARSE else 1e-7 if tolerance else 0.0  # what cancels is no more exact than its terms
    error, scale = (wanted - got).abs().max().item(), wanted.abs().max().item()
    if error <= tolerance * max(scale, least) + narrow + NOISES * noise:
        return None
    return f"off by {error:.3g} of {scale:.3g}: {_text(got)} instead of {_text(wanted)}"


def _text(value) -> str:
    if value is MISSING:
        return "nothing"
    if isinstance(value, Tensor):
        few = value.flatten()[:3].tolist()
        return f"{tuple(value.shape)} {[round(v, 5) if isinstance(v, float) else v for v in few]}"
    return repr(value)[:80]
