"""A rank's program: loaded from the cache where an earlier start has lowered the same plan, else lowered now.

Each rank looks for its own, on the disk that it sees; ranks compare what they run however they came by it.
"""

from __future__ import annotations

import logging

import torch

from ..codegen.program_data import program_data, program_of
from ..codegen.rank_program import PipelineProgram, RankProgram
from ..compiler import lower_plan
from ..plans.plan import Plan
from ..runtime.capture import Traced
from ..storage.compile_cache import CompileCache
from ..utils.plain_data import NotPortable
from .cache_keys import program_key

_log = logging.getLogger("autopar")


def kept_or_lowered(
    cache: CompileCache, traced: Traced, plan: Plan, rank: int, device: torch.device
) -> RankProgram | PipelineProgram:
    """Return what a rank runs of a plan on `device`. Stages of a pipeline are lowered at every start."""
    captured = traced.captured
    key = program_key(traced, plan, rank, device) if cache.folder is not None else None
    if (found := cache.get(key)) is not None:
        try:
            return program_of(*found, captured, plan, rank, device)
        except NotPortable as reason:
            _log.info("rank %d lowers: what was kept has %s", rank, reason)
    program = lower_plan(captured, plan, rank)
    if key is not None and isinstance(program, RankProgram):
        try:
            cache.put(key, *program_data(program))
        except NotPortable as reason:
            _log.info("rank %d lowers at each start: its program has %s", rank, reason)
    return program
