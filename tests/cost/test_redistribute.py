"""Redistributions carried out move by move on the blocks of all ranks, by an executor that knows the collectives only.

It looks at a Move and at local tensors, never at the layouts that the search says come out, so a search that permutes
blocks ends with other numbers than the target's shards.
"""

import functools
import itertools
import math
from random import Random

import pytest
import torch

from autopar.cost.moves import Core, State, Towards
from autopar.cost.redistribute import Move, Redistribution, Redistributor
from autopar.cost.ways import REFERENCE_BYTES
from autopar.hardware.profile import Link
from autopar.ir.layout import ZIGZAG, Layout, chunk, is_even, is_legal, local_part, local_shape
from autopar.ir.mesh import Mesh

from ..helpers.random_layouts import random_layout, random_mesh, random_shape

MEMORY_BYTES_PER_SECOND = 1e12


def redistributor(mesh: Mesh) -> Redistributor:
    """Links that get slower from the last axis to the first, as on a cluster."""
    far = {axis: len(mesh.names) - i for i, axis in enumerate(mesh.names)}
    links = {axis: Link(1e-5 * hops, 4e11 / 4**hops, 2e11 / 4**hops) for axis, hops in far.items()}
    return Redistributor(mesh, links, MEMORY_BYTES_PER_SECOND)


# the executor ---------------------------------------------------------------------------------------------------------


def combine(tensors: list[torch.Tensor], reduction: str) -> torch.Tensor:
    return functools.reduce({"sum": torch.add, "max": torch.maximum}[reduction], tensors)


def cut(tensor: torch.Tensor, dim: int, parts: int, count: int, index: int) -> torch.Tensor:
    """Block `index` of `count` of every part of `dim`."""
    pieces = []
    for i, part in enumerate(tensor.chunk(abs(parts), dim)):
        at = count - 1 - index if parts == ZIGZAG and i else index
        start, stop = chunk(part.shape[dim], count, at)
        pieces.append(part.narrow(dim, start, stop - start))
    return torch.cat(pieces, dim)


def join(blocks: list[torch.Tensor], dim: int, parts: int) -> torch.Tensor:
    """The inverse of `cut` over all indices."""
    by_part = list(zip(*(block.chunk(abs(parts), dim) for block in blocks)))
    if parts == ZIGZAG:
        by_part[1] = by_part[1][::-1]
    return torch.cat([piece for pieces in by_part for piece in pieces], dim)


def result_of(move: Move, held: list[torch.Tensor], index: int, sizes: list[int]) -> torch.Tensor:
    """Return what member `index` of a group has after the move, given what all held before. `sizes` of the axes."""
    count = len(held)
    if move.kind == "slice":
        return cut(held[index], move.dim, move.parts, count, index)
    if move.kind == "all_gather":
        return join(held, move.dim, move.parts)
    if move.kind == "all_reduce":
        return combine(held, move.reduction)
    if move.kind == "reduce_scatter":
        block, members = combine(held, move.reduction), count
        for size in sizes:
            members //= size
            block = cut(block, move.dim, move.parts, size, index // members % size)
        return block
    assert move.kind == "all_to_all"
    received = [cut(block, move.to_dim, move.to_parts, count, index) for block in held]
    return join(received, move.dim, move.parts)


def carry_out(move: Move, local: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    """Local tensors of all ranks after the move."""
    groups = [mesh.group(move.axes, rank) for rank in range(mesh.devices)]
    sizes = [mesh.size(axis) for axis in move.axes]
    return [result_of(move, [local[r] for r in group], group.index(rank), sizes) for rank, group in enumerate(groups)]


def spread(whole: torch.Tensor, layout: Layout, mesh: Mesh, random: Random) -> list[torch.Tensor]:
    """Local tensors of all ranks that have this layout; partial ones are random and combine to `whole`."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    axes = [axis for axis, _ in layout.partial]
    positions = list(itertools.product(*(range(mesh.size(axis)) for axis in axes)))
    terms = {p: torch.randint(-99, 99, whole.shape, generator=generator) for p in positions[1:]}
    if layout.partial and layout.partial[0][1] == "max":
        terms = {p: torch.minimum(term, whole) for p, term in terms.items()}
        terms[positions[0]] = whole
    else:
        terms[positions[0]] = whole - sum(terms.values())
    local = []
    for rank in range(mesh.devices):
        coordinate = mesh.coordinate(rank)
        local.append(local_part(terms[tuple(coordinate[axis] for axis in axes)], layout, mesh, coordinate))
    return local


def assert_has_layout(local: list[torch.Tensor], whole: torch.Tensor, layout: Layout, mesh: Mesh) -> None:
    """Every rank holds its shard of `whole`, after combining what is still partial."""
    axes = tuple(axis for axis, _ in layout.partial)
    for rank in range(mesh.devices):
        coordinate = mesh.coordinate(rank)
        assert tuple(local[rank].shape) == local_shape(whole.shape, layout, mesh, coordinate)
        group = [local[r] for r in mesh.group(axes, rank)]
        total = combine(group, layout.partial[0][1]) if axes else local[rank]
        assert torch.equal(total, local_part(whole, layout, mesh, coordinate)), f"rank {rank}"


def sent_elements(move: Move, held: int, mesh: Mesh) -> float:
    """Elements that a device holding `held` sends, by the closed formulas of the ring algorithms."""
    sent = 0.0
    for axis in reversed(move.axes):
        n = mesh.size(axis)
        sent += {
            "slice": 0,
            "all_gather": (n - 1) * held,
            "all_reduce": 2 * (n - 1) / n * held,
            "reduce_scatter": (n - 1) / n * held,
            "all_to_all": (n - 1) / n * held,
        }[move.kind]
        # an outer axis of an all_reduce gets what the inner one has scattered, of an all_gather what it has gathered
        held = held * n if move.kind == "all_gather" else held / n
    return sent


def check(found: Redistribution, shape, source: Layout, target: Layout, mesh: Mesh, random: Random) -> None:
    whole = torch.randint(-99, 99, shape, generator=torch.Generator().manual_seed(random.randrange(2**31)))
    local, layout = spread(whole, source, mesh, random), source
    assert_has_layout(local, whole, source, mesh)
    for step in found.steps:
        assert step.before == layout
        assert is_legal(shape, step.after, mesh), step
        if is_even(shape, step.before, mesh):
            sent = sent_elements(step.move, local[0].numel(), mesh)
            assert step.wire_fraction * whole.numel() == pytest.approx(sent), step
        local, layout = carry_out(step.move, local, mesh), step.after
        assert_has_layout(local, whole, layout, mesh)
    assert layout == target


# the properties -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("even", [True, False])
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("axes", [1, 2, 3])
def test_random_layouts(axes, seed, even):
    print("seed", seed)
    random = Random(seed)
    for _ in range(40):
        mesh = random_mesh(random, axes)
        shape = random_shape(random, mesh, random.randint(1, 2 if even else 3), even)
        source = random_layout(random, shape, mesh, (random.choice(("sum", "max")),), zigzag=True)
        target = random_layout(random, shape, mesh, zigzag=True)
        found = redistributor(mesh)(source, target)
        print(mesh, shape, source, "->", target, [str(step.move) for step in found.steps])
        check(found, shape, source, target, mesh, random)


def all_layouts(mesh: Mesh, ndim: int) -> list[Layout]:
    """Every layout without parts: each axis free, partial or on a dim, in every order within a dim."""
    layouts = {}
    for choices in itertools.product(range(-1, ndim + 1), repeat=len(mesh.names)):
        for names in itertools.permutations(zip(mesh.names, choices)):
            dims = tuple(tuple(axis for axis, choice in names if choice == d) for d in range(ndim))
            partial = tuple((axis, "sum") for axis, choice in names if choice == ndim)
            layouts[Layout(dims, partial)] = None
    return list(layouts)


@pytest.mark.parametrize("text, shape", [("x=2", (5, 4)), ("x=3", (6, 7)), ("x=2,y=2", (4, 8)), ("x=2,y=2", (7, 4))])
def test_all_pairs_of_layouts(text, shape):
    """Also that a value only ever stays partial: none becomes so."""
    mesh, random = Mesh.parse(text), Random(0)
    search = redistributor(mesh)
    layouts = [layout for layout in all_layouts(mesh, len(shape)) if is_legal(shape, layout, mesh)]
    for source, target in itertools.product(layouts, repeat=2):
        found = search(source, target)
        if set(target.partial) <= set(source.partial):
            check(found, shape, source, target, mesh, random)
        else:
            assert found is None


# by hand --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "source, target, moves, wire_fraction",
    [
        ("R", "R", [], 0),
        ("R", "tp:S(1)", ["slice[tp] S(1)"], 0),
        ("tp:S(0)", "R", ["all_gather[tp] S(0)"], 3 / 4),
        ("tp:S(0)", "tp:S(1)", ["all_to_all[tp] S(0)->S(1)"], 3 / 4 / 4),
        ("tp:P", "tp:S(0)", ["reduce_scatter[tp] S(0)"], 3 / 4),
        ("tp:P", "R", ["all_reduce[tp] sum"], 2 * 3 / 4),
        ("dp:P tp:P", "R", ["all_reduce[dp,tp] sum"], 2 * 3 / 4 + 2 * 1 / 2 / 4),
        ("dp:P tp:P", "dp:S(0) tp:S(0)", ["reduce_scatter[dp,tp] S(0)"], 7 / 8),
        ("dp:P tp:P", "tp:S(1) dp:S(1)", ["reduce_scatter[tp] S(1)", "reduce_scatter[dp] S(1)"], 7 / 8),
        ("dp:P tp:P", "dp:S(0) tp:S(1)", ["reduce_scatter[tp] S(1)", "reduce_scatter[dp] S(0)"], 3 / 4 + 1 / 2 / 4),
        ("dp:P tp:S(0)", "tp:S(0) dp:S(0)", ["reduce_scatter[dp] S(0)"], 1 / 2 / 4),  # the gradient of a ZeRO-3 weight
        ("tp:S(0) dp:S(0)", "tp:S(0)", ["all_gather[dp] S(0)"], 1 / 8),  # and its gather
        ("dp:S(0) tp:P", "dp:S(0) tp:P", [], 0),
        ("tp:P(max)", "R", ["all_reduce[tp] max"], 2 * 3 / 4),
    ],
)
def test_moves_and_bytes_by_hand(source, target, moves, wire_fraction):
    found = redistributor(Mesh.parse("dp=2,tp=4"))(Layout.parse(source, 2), Layout.parse(target, 2))
    assert [str(step.move) for step in found.steps] == moves
    assert found.wire_fraction == pytest.approx(wire_fraction)


def test_an_axis_outside_keeps_the_inner_ones_from_staying():
    """From (dp, tp) to (tp, dp) on one dim no block may stay in place, though both shard it by 8."""
    mesh = Mesh.parse("dp=2,tp=4")
    found = redistributor(mesh)(Layout((("dp", "tp"),)), Layout((("tp", "dp"),)))
    assert [step.move.kind for step in found.steps] == ["all_gather", "slice", "slice"]


def test_other_parts_are_gathered_and_cut_again():
    found = redistributor(Mesh.parse("tp=2"))(Layout.parse("tp:S(0)", 1), Layout.parse("tp:S(0/3)", 1))
    assert [step.move.kind for step in found.steps] == ["all_gather", "slice"]


def test_the_order_of_partial_axes_does_not_matter():
    source = Layout(((),), (("tp", "sum"), ("dp", "sum")))
    target = Layout(((),), (("dp", "sum"), ("tp", "sum")))
    assert redistributor(Mesh.parse("dp=2,tp=4"))(source, target) == Redistribution(())


@pytest.mark.parametrize(
    "source, target", [("R", "tp:P"), ("tp:S(0)", "tp:P"), ("tp:P", "tp:P(max)"), ("tp:P(max)", "tp:P")]
)
def test_nothing_becomes_partial(source, target):
    assert redistributor(Mesh.parse("tp=4"))(Layout.parse(source, 1), Layout.parse(target, 1)) is None


def test_seconds():
    """seconds(B) = latency + B * fraction / speed; a slice costs no latency and reads and writes what is kept."""
    links = {"dp": Link(4e-5, 5e10), "tp": Link(2e-5, 4e11, 1e11)}
    search = Redistributor(Mesh.parse("dp=2,tp=4"), links, 1e12)
    gather = search(Layout.parse("dp:S(0)", 1), Layout.parse("R", 1))
    assert gather.latency_seconds == 4e-5
    assert gather.seconds_per_byte == pytest.approx(1 / 2 / 5e10)
    exchange = search(Layout.parse("tp:S(0)", 2), Layout.parse("tp:S(1)", 2))
    assert exchange.seconds_per_byte == pytest.approx(3 / 4 / 4 / 1e11)
    piece = search(Layout.parse("R", 1), Layout.parse("tp:S(0)", 1))
    assert (piece.latency_seconds, piece.seconds_per_byte) == (0, pytest.approx(2 / 4 / 1e12))
    both = search(Layout.parse("dp:P tp:P", 1), Layout.parse("R", 1))
    assert both.latency_seconds == 4e-5
    assert both.seconds_per_byte == pytest.approx(2 * 3 / 4 / 4e11 + 2 * 1 / 2 / 4 / 5e10)


def test_an_axis_of_one_device_costs_no_collective():
    links = dict.fromkeys(("dp", "tp"), Link(1e-5, 1e10))
    found = Redistributor(Mesh.parse("dp=1,tp=2"), links, 1e12)(Layout.parse("dp:S(0)", 1), Layout.parse("R", 1))
    assert (found.latency_seconds, found.seconds_per_byte) == (0, 0)


def dearest_and_cheapest(search: Redistributor, towards: Towards, state: State, target: State) -> tuple[float, float]:
    """Return the most and the fewest seconds of all sequences of moves, each followed to its end."""
    if state == target:
        return 0.0, 0.0
    held = 1.0 / math.prod([search.mesh.size(axis) for axes in state.dims for axis in axes])
    most, fewest = 0.0, math.inf
    for move, after in towards.moves(state):
        _, latency, per_byte = search.price(move.kind, move.axes, held)
        dear, cheap = dearest_and_cheapest(search, towards, after, target)
        step = latency + per_byte * REFERENCE_BYTES
        most, fewest = max(most, step + dear), min(fewest, step + cheap)
    return most, fewest


def test_no_order_of_moves_is_cheaper():
    print("seed 0")
    random, differ = Random(0), 0
    for _ in range(150):
        mesh = random_mesh(random, 3)
        shape = random_shape(random, mesh, random.randint(1, 3), even=True)
        source = random_layout(random, shape, mesh, ("sum",), zigzag=True)
        search, target = redistributor(mesh), random_layout(random, shape, mesh, zigzag=True)
        core, _ = Core.of(source, target)
        most, fewest = dearest_and_cheapest(search, Towards(core.target), core.source, core.target)
        prices = [search.price(move.kind, move.axes, held) for move, _, held in search.path(core)]
        seconds = sum(latency + per_byte * REFERENCE_BYTES for _, latency, per_byte in prices)
        assert seconds == pytest.approx(fewest, rel=1e-9), (mesh, source, target)
        differ += most > 1.01 * fewest
    assert differ > 50  # many have a choice


def test_never_dearer_than_gathering_everything_first():
    print("seed 0")
    random = Random(0)
    for i in range(100):
        mesh = random_mesh(random, 1 + i % 3)
        shape = random_shape(random, mesh, 2, even=True)
        source, target = (random_layout(random, shape, mesh) for _ in range(2))
        search, whole = redistributor(mesh), Layout.replicated(2)
        direct, there, back = search(source, target), search(source, whole), search(whole, target)
        seconds = [r.latency_seconds + REFERENCE_BYTES * r.seconds_per_byte for r in (direct, there, back)]
        assert seconds[0] <= (seconds[1] + seconds[2]) * (1 + 1e-9), (mesh, source, target)
        assert math.isfinite(seconds[0])
