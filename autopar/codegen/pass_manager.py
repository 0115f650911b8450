"""What the compiler does, pass by pass, for whoever watches.

AUTOPAR_DEBUG=1 prints the plan that `compile` made, 2 also one line a pass, 3 also the graph after every pass; all of
it goes to stderr, of the first rank only. `observe` gives the same stages to a function.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import fx

from .python_code import emit_text, is_collective


@dataclass(frozen=True)
class Stage:
    """A pass that has run. `before` and `after` count nodes ("nodes") and collectives by kind; `before` is None at the
    start. `result` is what the pass returned and may be changed in place by the next one: read it at once."""

    name: str
    result: object
    before: Counter | None
    after: Counter

    def line(self) -> str:
        """Return a line such as `localize: nodes 300 -> 412 (+112) all_reduce +8`."""
        if self.before is None:
            return f"{self.name}: nodes {self.after['nodes']}"
        change = self.after["nodes"] - self.before["nodes"]
        line = f"{self.name}: nodes {self.before['nodes']} -> {self.after['nodes']} ({change:+d})"
        for kind in sorted({*self.before, *self.after} - {"nodes"}):
            if self.after[kind] != self.before[kind]:
                line += f" {kind} {self.after[kind] - self.before[kind]:+d}"
        return line


_observers: list[Callable[[Stage], None]] = []


def level() -> int:
    """Return AUTOPAR_DEBUG as a number, 0 if it is not one."""
    text = os.environ.get("AUTOPAR_DEBUG", "0")
    return int(text) if text.isdigit() else 0


@contextmanager
def observe(observer: Callable[[Stage], None]) -> Iterator[None]:
    """Let `observer` see every pass as it ends, inside of the context."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def run_pass(name: str, run: Callable, subject, *rest):
    """Run `run(subject, *rest)` and show the result to whoever watches."""
    if not _observers and level() < 2:
        return run(subject, *rest)
    before = count(subject)  # now: most passes rewrite in place
    result = run(subject, *rest)
    stage = Stage(name, result, before, count(result))
    for observer in list(_observers):
        observer(stage)
    if level() >= 2 and _is_first_rank(result):
        print(stage.line(), file=sys.stderr)
        if level() >= 3:
            print(stage_text(result), file=sys.stderr)
    return result


def planned(plan) -> None:
    """Print the plan that `compile` made under AUTOPAR_DEBUG=1."""
    if level() >= 1 and _is_first_rank(plan):
        print(plan, file=sys.stderr)


def count(subject) -> Counter | None:
    """Count nodes and collectives of whatever a pass takes or gives; return None if that is no graph yet."""
    modules = graphs_of(subject)
    found = Counter(nodes=sum(len(m.graph.nodes) for m in modules.values()))
    for module in modules.values():
        for node in filter(is_collective, module.graph.nodes):
            found[kind_of(node.target.overloadpacket.__name__)] += 1
    return found if modules else None


def kind_of(op: str) -> str:
    """Return the word for a collective op that is used in plans: `all_gather_into_tensor` -> `all_gather`."""
    return op.removesuffix("_into_tensor").removesuffix("_tensor").removesuffix("_single")


def graphs_of(subject) -> dict[str, fx.GraphModule]:
    """Return graph modules by name: of a capture, of a graph module, the forward and the backward of a partition, or
    the stages of a pipeline."""
    if isinstance(subject, list):
        return {f"stage_{stage.index}": stage.joint for stage in subject}
    subject = getattr(subject, "captured", subject)
    if hasattr(subject, "forward") and hasattr(subject, "backward"):
        parts = {"forward": subject.forward, "backward": subject.backward}
        return {name: part for name, part in parts.items() if part is not None}
    module = getattr(subject, "graph_module", subject)
    return {"joint": module} if isinstance(module, fx.GraphModule) else {}


def stage_text(result) -> str:
    """Return the graphs of a stage as text: code if they are one rank's, else a line a node."""
    from .graph_text import graph_text

    texts = [emit_text(m, name) if "rank" in m.meta else graph_text(m) for name, m in graphs_of(result).items()]
    return "\n".join(texts)


def _is_first_rank(result) -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return all(module.meta.get("rank", 0) == 0 for module in graphs_of(result).values())
