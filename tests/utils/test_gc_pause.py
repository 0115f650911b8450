"""The collector is off inside, and what was made there is old afterwards."""

import gc

from autopar.utils.gc_pause import paused_collector


def _is_old(made: list) -> bool:
    return any(known is made for known in gc.get_objects(generation=2))


def test_what_is_made_inside_is_left_to_full_collections():
    with paused_collector():
        assert not gc.isenabled()
        made: list = [[]]
        assert not _is_old(made)
    assert gc.isenabled() and _is_old(made)


def test_what_is_frozen_stays_frozen():
    before = gc.get_freeze_count()
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with paused_collector():
            pass
        assert gc.isenabled() and before < gc.get_freeze_count() <= frozen  # some are freed without the collector
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with paused_collector():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
