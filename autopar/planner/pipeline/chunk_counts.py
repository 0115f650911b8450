"""Say into how many chunks the rows of a batch may be cut, where there are too few rows for the ranks of a pipeline,
and what a search of such pipelines needs to know of them.

A long sequence leaves a replica one row or a few, fewer micro-batches than stages, which then wait most of a step. Its
chunks follow one another through the stages instead (passes/pipeline/sequence_chunks.py).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...errors import StrategyError
from ...frontend.export import Captured
from ...ops import ATTENTION
from ...ops.kept_keys import TOKENS
from ...rules.reading import bound
from ..spmd.planned import Planned

FEWEST_TOKENS = 2048  # of a chunk of a sample: attention and products of fewer are slower a token
TIMES = (2, 4)  # micro-batches a rank that are tried, and below which rows are too few


def chunk_counts(captured: Captured, rows: int, ranks: int) -> list[int]:
    """Return numbers of chunks to try for so many micro-batches of whole rows, none if there are enough of those, or
    the sequence is short."""
    tokens = _tokens(captured)
    found = []
    for times in TIMES:
        count = next((c for c in _powers(tokens) if rows * c >= times * ranks), None)
        if count is not None and count > 1 and rows < TIMES[0] * ranks:
            found.append(count)
    if not found and rows < TIMES[0] * ranks:
        found = [count for count in _powers(tokens)[-1:] if count > 1]
    return list(dict.fromkeys(found))


def _powers(tokens: int) -> list[int]:
    """Return the powers of two that cut so many tokens into equal chunks that are long enough."""
    counts = (2**k for k in range(tokens.bit_length()))
    return [count for count in counts if tokens % count == 0 and tokens // count >= FEWEST_TOKENS]


def _tokens(captured: Captured) -> int:
    """Return the tokens of a row: the queries of the first attention, 0 without one."""
    graph = captured.compact.graph if captured.compact is not None else captured.graph
    first = next((node for node in graph.nodes if node.target in ATTENTION), None)
    return int(bound(first)["q"].meta["val"].shape[TOKENS]) if first is not None else 0


def of_chunks(kinds: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    """Return those of some schedules, with their stages a rank, whose orders are known for chunks of rows: all with one
    stage a rank. Raise StrategyError if none of them is one."""
    if able := [(name, v) for name, v in kinds if v == 1]:
        return able
    raise StrategyError(
        f"{kinds[0][0]} has {kinds[0][1]} stages a rank, and chunks of rows need one",
        fix="leave sequence_chunks out, or use schedule='1f1b' or 'zb_h1'",
    )


def attention_share(chunk: Planned) -> float:
    """Return the share of the seconds of a chunk that its attentions take, under a plan of it."""
    problem, e = chunk.problem, chunk.evaluation
    copies = problem.copies(e.first)
    attentions = (v for v in problem.vertices if v.kind == "op" and v.node.target in ATTENTION)
    each = (float(problem.choices(v.index).seconds[e.choice[v.index]]) * copies[v.index] for v in attentions)
    return min(1.0, sum(each) / e.seconds) if e.seconds else 0.0
