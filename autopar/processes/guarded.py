"""Run a rank's graphs such that a collective that fails in one of them is explained by `watch`."""

from __future__ import annotations

import linecache
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import fx

from .._torch.loaders import is_of_a_loader
from ..codegen.python_code import is_collective
from . import process_groups
from .call_log import GroupLog
from .causes import Progress
from .records import MOST

if TYPE_CHECKING:
    from .watch import Watch


FORWARDS = ("forward", "forward without gradients")  # phases, which share their groups
BACKWARD = "backward"  # of a whole model; stages have phases of their own


class Guarded:
    """A graph whose failing collectives are explained."""

    def __init__(self, watch: Watch, module: fx.GraphModule, phase: str, mesh: str, run: Callable):
        self.watch, self.module, self.phase, self.mesh, self.run = watch, module, phase, mesh, run
        kind, of, rest = phase.partition(" ")
        self.doing = f"the {kind} graph{of}{rest}"
        self.is_forward = phase in FORWARDS
        groups = (process_groups.members(n.args[-1]) for n in module.graph.nodes if is_collective(n))
        self.logs = watch.logs.of(mesh, (tuple(ranks) for ranks in groups if ranks), self.is_forward)
        self.name = self.doing.encode()
        self.code = module.forward.__code__ if run == module.forward else None  # None: compiled, lines say nothing

    def __call__(self, *values):
        watch = self.watch
        watch.check_alike(self.doing)
        watch.enter_thread()
        if self.is_forward:
            watch.begin_step()
        watch.count(self.doing)
        logs = watch.logs.of_backward(self.mesh, self.logs) if self.phase == BACKWARD else self.logs
        for log in logs:
            log.add(self.name)
        watch.running = self
        try:
            results = self.run(*values)
            watch.heartbeat.mark(watch.calls, watch.step, self.doing)
            return results
        except torch.OutOfMemoryError as error:  # also where a collective's result was to be allocated
            self._take_back(logs, self.at(_line_in(self.code, error))[0])
            raise
        except RuntimeError as error:
            position, what, node = self.at(_line_in(self.code, error))
            if is_of_a_loader(error) or (node is None and self.code is not None):
                self._take_back(logs, position)
                raise
            raise watch.verdict(error, Progress(watch.calls, position, watch.step, what, self.doing), node) from error
        finally:
            watch.running = None

    def _take_back(self, logs: Sequence[GroupLog], position: int) -> None:
        """Let a call that failed before its first collective be none: it may be made again."""
        if position == 0:
            for log in logs:
                log.take_back()

    def at(self, line: int) -> tuple[int, str, fx.Node | None]:
        """Return (position, text, collective node if there is one) of a line of the graph's code."""
        if self.code is None:
            return 1, f"the compiled {self.phase} graph", None
        nodes = {node.name: node for node in self.module.graph.nodes}
        passed = 0  # collectives
        for number in range(1, line + 1):
            node = nodes.get(linecache.getline(self.code.co_filename, number).split(" = ")[0].strip())
            if number == line:
                started = node if node is None or is_collective(node) else next(iter(node.all_input_nodes), node)
                if started is None or not is_collective(started):
                    return 2 * passed, f"{node.name if node else 'the end'} in the {self.phase}", None
                return 2 * (passed - (started is not node)) + 1, f"the {started.meta['collective']}", started
            passed += node is not None and is_collective(node)
        return 0, self.doing, None

    def passed(self, position: int) -> list[str]:
        """Return the last collectives of the graph up to a position, that one included."""
        if self.code is None:
            return []
        found = [node.meta["collective"] for node in self.module.graph.nodes if is_collective(node)]
        return found[: (position + 1) // 2][-MOST:]


def _line_in(code, error: BaseException) -> int:
    """Return the line of `code` that was running when `error` was raised, 0 if none was."""
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code is not code:
        trace = trace.tb_next
    return trace.tb_lineno if trace is not None else 0
