"""A small notation for what a rank does: phases, each a number of times and a row of moves.

    (p - 1, "F0"), (m, "F0 B0")     p-1 forwards of the rank's stage 0, then m times a forward and a backward of it

A move is a letter and the rank's own stage, counted from 0; its micro-batch is the next one of that letter and stage,
where B and I are both backwards and count together. `W` alone is that of the oldest I which still lacks it. A move
whose micro-batches are used up is left out, so phases may go on too long, and a schedule that is written for many
micro-batches also holds for few: an order without deadlock has none either after some micro-batches are taken out of
it, for no micro-batch needs another one.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from .actions import Action

Phase = tuple[int, str]


def actions_of(phases: Iterable[Phase], stages: Sequence[int], micro_batches: int) -> list[Action]:
    """Return the order of the rank that has these stages."""
    used: Counter[tuple[bool, int]] = Counter()
    owed: deque[Action] = deque()  # the W of each I, oldest first
    order = []
    for times, moves in phases:
        for move in moves.split() * times:
            if move == "W":
                order += [owed.popleft()] if owed else []
                continue
            kind, stage = move[0], stages[int(move[1:])]
            i = used[kind == "F", stage]
            used[kind == "F", stage] += 1
            order.append(Action(kind, stage, i))
            owed += [Action("W", stage, i)] if kind == "I" else []
    return [action for action in order if action.micro_batch < micro_batches]


def one_stage(warmup: int, micro_batches: int, backward: str) -> list[Phase]:
    """Return 1F1B: some forwards, then one backward after each forward, then the backwards that remain.

    Source: Narayanan et al., "PipeDream" (arXiv 1806.03377), with a flush at the end: arXiv 2006.09503.
    """
    return [(warmup, "F0"), (micro_batches, f"F0 {backward}0")]


def gpipe(micro_batches: int) -> list[Phase]:
    """Return all forwards, then all backwards: Huang et al., "GPipe" (arXiv 1811.06965)."""
    return [(micro_batches, "F0"), (micro_batches, "B0")]


def round_size(ranks: int, micro_batches: int) -> int:
    """Return how many micro-batches an interleaved schedule takes through one stage before it turns to the rank's next
    stage."""
    return -(-micro_batches // max(1, micro_batches // ranks))


def forwards_first(rank: int, ranks: int, micro_batches: int, chunks: int, backward: str) -> int:
    """Return how many forwards a rank of an interleaved schedule does before its first backward, if it has so many."""
    return (chunks - 1) * round_size(ranks, micro_batches) + (2 if backward == "B" else 1) * (ranks - 1 - rank)


def interleaved(rank: int, ranks: int, micro_batches: int, chunks: int, backward: str, ahead: int = 0) -> list[Phase]:
    """Return 1F1B over several stages a rank: Narayanan et al. (arXiv 2104.04473), section 2.2.

    A round of p micro-batches goes through the first stage of the rank, then through the second, and so on. The paper
    asks for whole rounds; here, as in torch, the rounds are as many as fit and share the micro-batches, and a last
    short one is filled up. Each rank does two forwards more before its first backward than the rank after it, so that
    none waits for that backward. With the backward in two parts it is one more: the gradient of the input comes back
    sooner, and memory is the same on all ranks. `ahead`: forwards more before the first backward of every rank.
    """
    size = round_size(ranks, micro_batches)
    rounds = -(-micro_batches // size)
    warmup = forwards_first(rank, ranks, micro_batches, chunks, backward) + ahead
    up = [f"F{chunk}" for chunk in range(chunks) for _ in range(size)] * rounds
    down = [f"{backward}{chunk}" for chunk in reversed(range(chunks)) for _ in range(size)] * rounds
    warmup = min(len(up), warmup)
    pairs = [move for pair in zip(up[warmup:], down) for move in pair]
    return [(1, " ".join([*up[:warmup], *pairs, *down[len(up) - warmup :]]))]


def zbv(rank: int, ranks: int, micro_batches: int) -> list[Phase]:
    """Return the forwards and input gradients of ZB-V: arXiv 2401.10241, section 6.

    The first stage runs ahead until the second one's first forward is back; then each rank has all p micro-batches in
    flight.
    """
    ahead = ranks - rank
    return [(2 * ahead - 1, "F0"), (rank, "F1 F0"), (ahead, "F1 I1"), (micro_batches + ranks, "F0 I0 F1 I1")]


def dualpipev(rank: int, ranks: int, micro_batches: int) -> list[Phase]:
    """Return DualPipe cut in half: DeepSeek-V3 (arXiv 2412.19437), section 3.2.1, as a V:
    github.com/deepseek-ai/DualPipe.

    The steady phase pairs the forward of one stage with the whole backward of the other, whose communication and
    computation can overlap; the backward is split only at the two ends. Here the two of a pair follow each other.
    """
    ahead = ranks - rank - 1
    steady = max(micro_batches, 2 * ranks) - 2 * ranks + rank + 1
    last = " ".join(
        f"{'B' if n <= rank else 'I'}{(n + 1) % 2}" for n in range(2 * rank + 2)
    )  # B1 B0 ..., from the middle on I
    return [(2 * ahead, "F0"), (rank + 1, "F0 F1"), (ahead, "I1 W F1"), (steady, "F0 B1 F1 B0"), (ahead, "B1 F1 B0"),
            (1, last), (ahead, "W I0"), (rank + 1, "W")]  # fmt: skip
