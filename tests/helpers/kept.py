"""Captures that the tests of a process share: a call that several of them plan is traced once.

    kept.plan(model, mesh, inputs, strategy="fsdp")                # as autopar.plan, but that it may know the capture
    verify_model(model, inputs, mesh, cache=kept.captures())

What is the same call is known as for users, by autopar/api/kept_capture.py.
"""

from __future__ import annotations

import atexit
import shutil
import tempfile
from functools import cache

from autopar import Plan
from autopar.api import entry as api
from autopar.storage.compile_cache import CompileCache


@cache
def captures() -> CompileCache:
    """Return a cache in a folder that is gone with the process."""
    folder = tempfile.mkdtemp(prefix="captures-of-tests-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return CompileCache(folder)


def plan(model, mesh, example_inputs, **options) -> Plan:
    """Plan as `autopar.plan` does."""
    return api.search(model, mesh, example_inputs, cache=captures(), **options).plan
