"""torch's own orders, played by the same simulator: placed alike, and never better than these."""

from types import SimpleNamespace

import pytest
from torch.distributed.pipelining import schedules as torchs

from autopar.schedule import Action, Schedule, make, play

MULTI = {
    "interleaved_1f1b": torchs.ScheduleInterleaved1F1B,
    "interleaved_zero_bubble": torchs.ScheduleInterleavedZeroBubble,
    "zbv": torchs.ScheduleZBVZeroBubble,
    "dualpipev": torchs.ScheduleDualPipeV,
}
SINGLE = {"gpipe": torchs.ScheduleGPipe, "1f1b": torchs.Schedule1F1B}


def stub(ranks, stage, stages):
    return SimpleNamespace(group_size=ranks, group_rank=0, num_stages=stages, stage_index=stage, is_first=stage == 0,
                           is_last=stage == stages - 1, submod=None, has_backward=True)  # fmt: skip


def torch_schedule(name, ranks, micro_batches, chunks, monkeypatch):
    if name in SINGLE:
        made = SINGLE[name](stub(ranks, 0, ranks), micro_batches, loss_fn=len)
        made.pp_group_size, orders = ranks, made._get_pipeline_order()
    else:
        monkeypatch.setattr(MULTI[name], "_prepare_schedule_with_comms", lambda *args, **kwargs: None)
        orders = MULTI[name](
            [stub(ranks, s, ranks * chunks) for s in range(chunks)], micro_batches, loss_fn=len
        ).pipeline_order
    flat = [[a for pair in orders[r] if pair for a in pair.sub_actions or (pair,)] for r in range(ranks)]
    ours = tuple(tuple(Action(a.computation_type.value, a.stage_index, a.microbatch_index) for a in order
                       if a.computation_type.value in "FBIW") for order in flat)  # fmt: skip
    rank_of = {action.stage: rank for rank, order in enumerate(ours) for action in order}
    return Schedule(name, ranks, micro_batches, tuple(rank_of[s] for s in range(ranks * chunks)), ours)


def sizes(name):
    for p in (2, 3, 4, 8):
        for m in (1, p, p + 1, 2 * p, 3 * p, 3 * p + 2, 5 * p):
            for v in (2, 3) if name.startswith("interleaved") else (2,) if name in MULTI else (1,):
                whole = m % max(1, m // p) == 0
                least = {"1f1b": p, "dualpipev": 2 * p}.get(name, 1)
                if m >= least and (whole or not name.startswith("interleaved")):  # what torch accepts
                    yield p, m, v


@pytest.mark.parametrize("name", ["gpipe", *MULTI])
def test_no_worse_than_torch(name, monkeypatch):
    for p, m, v in sizes(name):
        theirs, ours = torch_schedule(name, p, m, v, monkeypatch), make(name, p, m, v)
        assert ours.rank_of_stage == theirs.rank_of_stage
        a, b = play(ours), play(theirs)
        assert a.bubble <= b.bubble + 1e-9 and a.bubble_in_window <= b.bubble_in_window + 1e-9, (p, m, v)
        assert max(a.peaks) <= max(b.peaks), (p, m, v)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "interleaved_1f1b", "dualpipev"])
def test_the_same_orders_as_torch(name, monkeypatch):
    for p, m, v in sizes(name):
        ours, theirs = make(name, p, m, v).orders, torch_schedule(name, p, m, v, monkeypatch).orders
        last = p - (
            name == "1f1b"
        )  # torch's list for the last rank begins with micro-batch 1 (what it runs is not made from it)
        assert ours[:last] == theirs[:last], (p, m, v)
