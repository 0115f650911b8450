"""Tracing without torch's dumps: what goes wrong is said once, in the error that is raised.

Where tracing fails torch writes hundreds of lines about its own state through `logging` and on stderr, and it warns
of what it does to the model for as long as it traces. With TORCH_LOGS set, somebody wants to read them.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from .. import _torch

LOGGERS = ("torch._subclasses.fake_tensor", "torch.fx.experimental.symbolic_shapes", "torch.export", "torch._export",
           "torch._functorch", "torch._dynamo")  # fmt: skip  # those that may not be there yet
WARNINGS = (
    r"(?s)The tensor attributes? .* assigned during export", r"(?s)A model attribute .* requires gradient",
    r"(?s)Error detected in .* Traceback of forward call", r"(?s)Pred is a Python constant",
)  # fmt: skip


@contextmanager
def quiet() -> Iterator[None]:
    """Inside, torch's loggers are disabled, its graphs are not printed and warnings about the tracing are ignored.
    Afterwards all is as it was."""
    if os.environ.get("TORCH_LOGS"):
        yield
        return
    names = {*LOGGERS, *(name for name in logging.root.manager.loggerDict if name.split(".")[0] == "torch")}
    loggers = [logger for logger in map(logging.getLogger, sorted(names)) if not logger.disabled]
    with warnings.catch_warnings(), _torch.without_prints():
        for message in WARNINGS:
            warnings.filterwarnings("ignore", message=message)
        for logger in loggers:
            logger.disabled = True
        try:
            yield
        finally:
            for logger in loggers:
                logger.disabled = False
