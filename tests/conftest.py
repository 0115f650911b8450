"""`golden(text)` compares a text with tests/golden/FILE/TEST.txt; `pytest --update-golden` writes the files anew."""

from __future__ import annotations

import gc
import logging
import re
from pathlib import Path

import pytest

logging.getLogger("torch.__trace").propagate = False  # thousands of lines about graphs in the report of a failed test
gc.set_threshold(
    20_000, 20, 20
)  # graphs are many small objects that stay: looking for garbage in them took a tenth of the time
FOLDER = Path(__file__).parent / "golden"


def pytest_addoption(parser):
    parser.addoption(
        "--update-golden", action="store_true", help="write the expected texts instead of comparing with them"
    )


@pytest.fixture
def golden(request):
    """A function that fails with a diff if a text is not the one on file."""
    name = re.sub(r"[^\w.-]+", "_", request.node.name).strip("_")
    file = FOLDER / Path(request.node.fspath).stem / f"{name}.txt"

    def check(text: str) -> None:
        if request.config.getoption("--update-golden"):
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text)
            return
        if not file.exists():
            pytest.fail(f"there is no {file.relative_to(FOLDER.parent)}: run pytest --update-golden and look at it")
        assert text.splitlines() == file.read_text().splitlines(), "pytest --update-golden accepts the new text"

    return check
