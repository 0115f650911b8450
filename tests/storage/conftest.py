"""A process group of one, for all that needs no other process."""

from tests.runtime.conftest import alone  # noqa: F401
