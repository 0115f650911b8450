"""Plans of few long rows: their chunks follow one another where that is faster by the played clock, and only there."""

from __future__ import annotations

import pytest

import autopar
from autopar import compiler
from autopar.models import build
from autopar.planner.pipeline.chunk_counts import FEWEST_TOKENS, chunk_counts

MODEL = "llama:layers=4,hidden=256,heads=4,kv_heads=2,ffn=512,vocab=512,seq={tokens}"


def planned(rows: int, tokens: int, mesh: str = "pp=4", **options) -> autopar.Plan:
    model, inputs = build(MODEL.format(tokens=tokens), batch=rows, seq=tokens)
    return autopar.plan(model, mesh, inputs, hardware="h100", baselines=False, **options)


@pytest.mark.slow
def test_one_long_row_is_cut_where_that_is_faster():
    whole, best = planned(1, 32_768, sequence_chunks=1), planned(1, 32_768)
    assert best.pipeline.row_chunks > 1 and best.step_seconds < 0.75 * whole.step_seconds
    assert best.flops.model == pytest.approx(whole.flops.model)
    others = {planned(1, 32_768, sequence_chunks=count).step_seconds for count in (8, 16)}
    assert best.step_seconds <= min(others) * (1 + 1e-9)
    assert best.step_seconds == pytest.approx(best.pipeline.played().seconds, rel=0.1)


@pytest.mark.slow
def test_many_rows_and_short_ones_stay_whole():
    assert planned(16, 8_192).pipeline.row_chunks == 1
    assert planned(1, FEWEST_TOKENS).pipeline.row_chunks == 1


def test_the_last_chunk_takes_longest():
    """Seconds of chunks follow their keys and add up to those of as many mean ones."""
    pipeline = planned(1, 32_768, sequence_chunks=8).pipeline
    assert 0 < pipeline.attention_share < 1
    assert list(pipeline.shares) == sorted(pipeline.shares) and sum(pipeline.shares) == pytest.approx(8)
    assert pipeline.shares[-1] - pipeline.shares[0] == pytest.approx(pipeline.attention_share * 14 / 8)


@pytest.mark.parametrize("rows, ranks, wanted", [(1, 4, [8, 16]), (4, 4, [2, 4]), (8, 4, []), (1, 64, [16])])
def test_numbers_that_are_tried(rows, ranks, wanted):
    model, inputs = build(MODEL.format(tokens=32_768), batch=rows, seq=32_768)
    assert chunk_counts(compiler.trace(model, inputs), rows, ranks) == wanted
