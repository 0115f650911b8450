"""Pipelines played event by event, and chains of pieces at random, for the tests of the stage cut."""

from __future__ import annotations

import numpy as np

from autopar.planner.stages import Level, Piece, Shared

F, B = "forward", "backward"


def gpipe(stages: int, stage: int, micro_batches: int) -> list[tuple]:
    return [(way, stage, i) for way in (F, B) for i in range(micro_batches)]


def one_f_one_b(stages: int, stage: int, micro_batches: int) -> list[tuple]:
    ahead = min(micro_batches, stages - 1 - stage)
    return _in_turn([(F, stage, i) for i in range(micro_batches)], [(B, stage, i) for i in range(micro_batches)], ahead)


def interleaved(ranks: int, looped: int, rank: int, micro_batches: int) -> list[tuple]:
    """Megatron's order: a group of `ranks` micro-batches through one stage of the rank, then through its next one."""

    def one(way: str, k: int) -> tuple:
        group, k = divmod(k, ranks * looped)
        turn = k // ranks if way == F else looped - 1 - k // ranks
        return way, turn * ranks + rank, group * ranks + k % ranks

    count = micro_batches * looped
    ahead = min(count, 2 * (ranks - rank - 1) + (looped - 1) * ranks)
    return _in_turn([one(F, k) for k in range(count)], [one(B, k) for k in range(count)], ahead)


def _in_turn(forwards: list, backwards: list, ahead: int) -> list[tuple]:
    pairs = [op for pair in zip(forwards[ahead:], backwards) for op in pair]
    return forwards[:ahead] + pairs + backwards[len(forwards) - ahead :]


def play(orders: list[list[tuple]], forward: np.ndarray, backward: np.ndarray) -> tuple[float, list[int]]:
    """(seconds of a step, most micro-batches in flight of each stage) if every rank plays its list in order, each op as soon as
    what it needs is there."""
    last, seconds = len(forward) - 1, {F: forward, B: backward}
    done, clock, turn = {}, [0.0] * len(orders), [0] * len(orders)
    while any(turn[r] < len(order) for r, order in enumerate(orders)):
        before = len(done)
        for r, order in enumerate(orders):
            for way, stage, i in order[turn[r] :]:
                need = (F, stage - 1, i) if way == F else (B, stage + 1, i) if stage < last else (F, stage, i)
                if need[1] >= 0 and need not in done:
                    break
                clock[r] = done[way, stage, i] = max(clock[r], done.get(need, 0.0)) + seconds[way][stage]
                turn[r] += 1
        assert len(done) > before, "deadlock"
    held = []
    for stage in range(last + 1):
        ways = [1 if way == F else -1 for order in orders for way, s, _ in order if s == stage]
        held.append(int(np.cumsum(ways).max()))
    return max(clock), held


def chain(rng: np.random.Generator, length: int, most_levels: int = 3, integer: bool = False) -> list[Piece]:
    """Pieces of up to four kinds with up to `most_levels` levels, slower ones with fewer bytes (not always convex)."""
    kinds = []
    for k in range(int(rng.integers(1, 5))):
        seconds, bytes_, levels = rng.integers(1, 20, 2), int(rng.integers(10, 60)), []
        for _ in range(int(rng.integers(1, most_levels + 1))):
            levels.append(Level(float(seconds[0]), float(seconds[1]), bytes_))
            seconds, bytes_ = seconds + rng.integers(0, 10, 2), max(1, bytes_ - int(rng.integers(5, 25)))
        if not integer:
            levels = [Level(l.forward_seconds * 0.137, l.backward_seconds * 0.211, l.activation_bytes) for l in levels]
        sends = tuple(float(x) for x in rng.integers(0, 4, 2))
        numbers = (int(x) for x in rng.integers(0, 30, 3))
        kinds.append(Piece(f"kind{k}", tuple(levels), *numbers, sends, bool(rng.random() < 0.85)))
    return [kinds[int(k)] for k in rng.integers(0, len(kinds), length)]


def pairs(rng: np.random.Generator, pieces: list[Piece]) -> list[Shared]:
    """None, one or two parameters shared by two pieces each."""
    found = []
    for _ in range(int(rng.integers(0, 3))):
        first, second = sorted(rng.choice(len(pieces), 2, replace=False).tolist())
        most = min(pieces[first].state_bytes, pieces[second].state_bytes) // 2
        found.append(Shared(first, second, int(rng.integers(0, most + 1)), float(rng.integers(0, 40))))
    return found
