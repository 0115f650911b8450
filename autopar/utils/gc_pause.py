"""Python's cyclic garbage collector, paused while large graphs are built."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_collector() -> Iterator[None]:
    """Look for no cycles inside, and afterwards not among what was made there before the next full collection.
    A traced graph is millions of objects that all live on; walking them again and again takes a tenth of the time of
    capture and planning, and as much of the first step's, and frees next to nothing."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            if not gc.get_freeze_count():  # what a user has frozen stays frozen
                gc.freeze()
                gc.unfreeze()  # all that there is belongs to the oldest generation now
            gc.enable()
