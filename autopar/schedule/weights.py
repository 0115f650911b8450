"""Puts the weight gradients into the gaps of an order of forwards and input gradients: a list scheduler.

Nobody waits for a W before the optimizer step, so it is the work that fills the time in which a rank would wait
(arXiv 2401.10241, section 2). What limits it is memory: until its W, a micro-batch keeps the inputs of the stage's
matrix products.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Sequence

from ..errors import ScheduleError
from .actions import Action
from .play import needs


def fill_weights(
    orders: Sequence[Sequence[Action]], stages: int, limit: int, seconds: tuple[float, float, float] = (1.0, 1.0, 1.0)
) -> list[list[Action]]:
    """Return orders of F, I and W from `orders` of F and I.

    A rank that is free takes its next F or I if what it needs is there and, for an F, if it holds fewer than `limit`
    micro-batches (counted once for each of its stages); else its oldest W; else it waits. `seconds`: those of F, I and
    W. Raise ScheduleError if the limit is too low for the orders.
    """
    cost = dict(zip("FIW", seconds))
    done: list[list[Action]] = [[] for _ in orders]
    at = [0] * len(orders)  # the next of orders[rank]
    held = [0] * len(orders)
    owed: list[deque[Action]] = [deque() for _ in orders]
    ends: dict[Action, float] = {}
    waiting: dict[Action, int] = {}
    free = [(0.0, rank) for rank in range(len(orders))]  # a heap: ranks to look at, and when
    while free:
        now, rank = heapq.heappop(free)
        action = orders[rank][at[rank]] if at[rank] < len(orders[rank]) else None
        if action is not None and action.kind == "F" and held[rank] >= limit:
            action = None
        before = needs(action, stages) if action is not None else []
        unknown = next((need for need in before if need not in ends), None)
        there = math.inf if unknown is not None else max((ends[need] for need in before), default=0.0)
        if action is not None and there <= now:
            at[rank] += 1
        elif owed[rank]:
            action = owed[rank].popleft()
        else:  # wait, if for anything
            if unknown is not None:
                waiting[unknown] = rank
            elif action is not None:
                heapq.heappush(free, (there, rank))
            continue
        done[rank].append(action)
        held[rank] += {"F": 1, "I": 0, "W": -1}[action.kind]
        ends[action] = now + cost[action.kind]
        heapq.heappush(free, (ends[action], rank))
        if action.kind == "I":
            owed[rank].append(action._replace(kind="W"))
        if action in waiting:
            heapq.heappush(free, (ends[action], waiting.pop(action)))
    if any(at[rank] < len(order) for rank, order in enumerate(orders)):
        raise ScheduleError(f"{limit} micro-batches in flight are too few for these orders", fix="allow more of them")
    return done
