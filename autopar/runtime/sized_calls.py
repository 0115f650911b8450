"""The sizes in which calls of one form differ: which dims have them, and which other sizes tell most."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product

from ..codegen.follow_size import Sizes, is_telling_all
from ..frontend.call_signature import CallSignature

Dims = Mapping[str, Mapping[int, int]]  # of inputs, by name: by dim the place of its size among the sizes
RATIOS = ((0.5, 1.5, 0.7), (1.5, 0.5, 0.8), (2.0, 1.5, 3.0), (1.5, 2.0, 3.0), (3.0, 2.0, 1.3))
STEPS = (1, 6, 3, 10, -1, -2)  # that are tried beside these


def differing_dims(a: CallSignature, b: CallSignature) -> tuple[Dims, Sizes, Sizes] | None:
    """Return the dims in which two calls differ, with the sizes that these have in each, dims of one size together;
    None if the calls differ in anything else, or not at all."""
    if (a.spec, a.names, a.dtypes, a.differentiated, a.values) != (
        b.spec,
        b.names,
        b.dtypes,
        b.differentiated,
        b.values,
    ):
        return None
    dims: dict[str, dict[int, int]] = {}
    pairs: dict[tuple[int, int], int] = {}  # the place of each
    for name, one, other in zip(a.names, a.shapes, b.shapes):
        if one is None or other is None or one == other:
            continue
        if len(one) != len(other):
            return None
        dims[name] = {d: pairs.setdefault((x, y), len(pairs)) for d, (x, y) in enumerate(zip(one, other)) if x != y}
    return (dims, tuple(x for x, _ in pairs), tuple(y for _, y in pairs)) if pairs else None


def with_batch(signature: CallSignature, dims: Dims, sizes: Sizes) -> tuple[Dims, Sizes]:
    """Return dims and sizes of a call with the number of samples among them, if all tensors have one in front."""
    shapes = {n: shape for n, shape in zip(signature.names, signature.shapes) if shape is not None}
    first = {shape[0] if shape else 0 for shape in shapes.values()}
    if len(first) > 1 or first <= {0, 1} or any(0 in found for found in dims.values()):
        return dims, sizes
    return {name: {0: len(sizes), **dims.get(name, {})} for name in shapes}, (*sizes, *first)


def batch_place(signature: CallSignature, dims: Dims) -> int | None:
    """Return the place of the number of samples among the sizes."""
    name = next((n for n, shape in zip(signature.names, signature.shapes) if shape), "")
    return dims.get(name, {}).get(0)


def sizes_in(signature: CallSignature, base: CallSignature, dims: Dims) -> Sizes | None:
    """Return the sizes of some dims in a call, None if it differs from the base elsewhere or they disagree."""
    if signature is not base:
        found = differing_dims(base, signature)
        if found is None and signature.shapes != base.shapes:
            return None
        if found is not None and any(d not in dims.get(name, ()) for name, of in found[0].items() for d in of):
            return None
        if found is None and (signature.spec, signature.values) != (base.spec, base.values):
            return None
    sizes: dict[int, int] = {}
    for name, places in dims.items():
        shape = signature.shape_of(name) or ()
        for d, place in places.items():
            if sizes.setdefault(place, shape[d]) != shape[d]:
                return None
    return tuple(sizes[place] for place in sorted(sizes))


def resized(signature: CallSignature, dims: Dims, sizes: Sizes) -> CallSignature:
    """Return the form of a call of other sizes."""
    shapes = tuple(
        shape
        if shape is None
        else tuple(sizes[dims[name][d]] if d in dims.get(name, ()) else n for d, n in enumerate(shape))
        for name, shape in zip(signature.names, signature.shapes)
    )
    return replace(signature, shapes=shapes)


def partners(sizes: Sizes, period: int) -> list[Sizes]:
    """Return other sizes that differ from some by multiples of a period: those first that tell most, of them those that
    differ by much."""
    found = [*_others(sizes, period)]
    return sorted(found, key=lambda other: not is_telling_all(sizes, other))


def _others(sizes: Sizes, period: int) -> Iterator[Sizes]:
    for ratios in RATIOS:
        moves = [round(n * (ratios[i % len(ratios)] - 1) / period) * period for i, n in enumerate(sizes)]
        yield from _larger_than_one(n + (move or period) for n, move in zip(sizes, moves))
    for steps in product(STEPS, repeat=len(sizes)):
        yield from _larger_than_one(n + period * step for n, step in zip(sizes, steps))


def _larger_than_one(sizes: Iterable[int]) -> Iterator[Sizes]:
    found = tuple(sizes)
    if all(size > 1 for size in found):
        yield found
