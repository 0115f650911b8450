"""`golden(text)` compares a text with tests/golden/FILE/TEST.txt; `pytest --update-golden` writes the files anew.

`@pytest.mark.sampled(n)`: of the test's cases n run by default, and the others with `pytest -m slow`.
"""

from __future__ import annotations

import gc
import logging
import os
import re
import resource
from collections import defaultdict
from pathlib import Path

import pytest

logging.getLogger("torch.__trace").propagate = False  # thousands of lines about graphs in the report of a failed test
gc.disable()  # graphs are many small objects that stay: looking for garbage in them took a tenth of the time
os.environ.setdefault("AUTOPAR_RECORDS", "off")  # of failures that tests are about
os.environ.setdefault("AUTOPAR_CACHE", "off")  # tests are about what is traced and planned now
MORE_BYTES = 2**30  # that a process may take before it looks for garbage
PEAK_BYTES = [0]  # at each look
FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the expected texts instead of comparing with them"
    )


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """Mark as slow all but n cases, evenly spaced, of every test that is marked `sampled(n)`. The files beside this one
    come first: test_types.py alone takes as long as many others, and would run while no other is left."""
    items.sort(key=lambda item: item.path.parent != FOLDER.parent)
    cases = defaultdict(list)
    for item in items:
        if item.get_closest_marker("sampled") and not item.get_closest_marker("slow"):
            cases[item.path, item.originalname].append(item)
    for found in cases.values():
        count = found[0].get_closest_marker("sampled").args[0]
        kept = {i * len(found) // count for i in range(count)}
        for i, item in enumerate(found):
            if i not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="module")
def garbage():
    """Look for garbage behind files whose tests took another GiB, among what they have made."""
    yield
    peak_bytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    if peak_bytes > PEAK_BYTES[-1] + MORE_BYTES:
        PEAK_BYTES.append(peak_bytes)
        gc.collect()
        gc.freeze()


@pytest.fixture
def new_garbage():
    """Let `gc.collect()` look through what is made from here on, and not through GiB of what other tests have made."""
    gc.freeze()


@pytest.fixture
def golden(request):
    """A function that fails with a diff if a text is not the one on file."""
    name = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    file = FOLDER / request.path.relative_to(FOLDER.parent).with_suffix("") / f"{name}.txt"

    def check(text: str) -> None:
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        if not file.exists():
            pytest.fail(f"there is no {file.relative_to(FOLDER.parent)}: run pytest --update-golden and look at it")
        assert text.splitlines() == file.read_text().splitlines(), "pytest --update-golden accepts the new text"

    return check
