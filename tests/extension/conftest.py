"""Remove what a test registers after it."""

import pytest

from autopar.cost.memory import OPTIMIZERS
from autopar.planner.problem.recipes import BASELINES, RECIPES
from autopar.rules import lookup
from autopar.schedule import KINDS


@pytest.fixture(autouse=True)
def _forgotten():
    tables = (lookup.TABLE, RECIPES, KINDS, OPTIMIZERS)
    before, names = [dict(table) for table in tables], list(BASELINES)
    yield
    for table, old in zip(tables, before):
        table.clear()
        table.update(old)
    BASELINES[:] = names
    lookup.KNOWN.clear()
