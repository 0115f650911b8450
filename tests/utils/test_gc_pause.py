"""The collector is off inside, and what was made there is old afterwards."""

import gc

import pytest

from autopar.utils.gc_pause import paused_collector


@pytest.fixture(autouse=True)
def enabled():
    """Let the collector be on, and nothing frozen, as in a user's program."""
    gc.unfreeze()
    gc.enable()
    yield
    gc.disable()
    gc.freeze()


def _is_young(made: list) -> bool:
    return any(known is made for generation in (0, 1) for known in gc.get_objects(generation))


def test_what_is_made_inside_is_left_to_full_collections():
    with paused_collector():
        assert not gc.isenabled()
        made: list = [[]]
        assert _is_young(made)
    assert gc.isenabled() and not _is_young(made) and gc.get_freeze_count() == 0


def test_what_is_frozen_stays_frozen():
    gc.freeze()
    frozen = gc.get_freeze_count()
    with paused_collector():
        pass
    assert gc.isenabled() and 0 < gc.get_freeze_count() <= frozen  # some are freed without the collector


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    with paused_collector():
        pass
    assert not gc.isenabled()
