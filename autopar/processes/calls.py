"""Calls that wait for other ranks in a thread of their own, so that the program's can give them up."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any


class Call:
    """A call in a thread of its own, which begins now. `result`: what it returned, once it is over."""

    def __init__(self, run: Callable[[], object]):
        self._run, self._over = run, threading.Event()
        self._error: BaseException | None = None
        self.result: Any = None
        threading.Thread(target=self._main, name="autopar call", daemon=True).start()

    def is_over(self, seconds: float) -> bool:
        """Return whether it has ended, after so long at the most. Raises what it raised."""
        if not self._over.wait(seconds):
            return False
        if self._error is not None:
            raise self._error
        return True

    def _main(self) -> None:
        try:
            self.result = self._run()
        except BaseException as error:
            self._error = error
        self._over.set()
