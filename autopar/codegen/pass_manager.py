"""Runs the compiler's passes, with those that a user adds, for whoever watches.

AUTOPAR_DEBUG=1 prints the plan that `compile` made, 2 also one line a pass, 3 also the graph after every pass; all of
it goes to stderr, of the first rank only. `observe` gives the same results to a function.
"""

from __future__ import annotations

import os
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch.distributed as dist
from torch import fx

from ..errors import PassError, said
from ..ir.compiler_pass import GRAPH, Pass
from .python_code import emit_text, is_collective


@dataclass(frozen=True)
class PassResult:
    """A pass that has run. `before` and `after` count nodes ("nodes") and collectives by kind; `before` is None at the
    start. `subject` is what the pass returned and may be changed in place by the next one: read it at once."""

    name: str
    subject: object
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


_observers: list[Callable[[PassResult], None]] = []


def level() -> int:
    """Return AUTOPAR_DEBUG as a number, 0 if it is not one."""
    text = os.environ.get("AUTOPAR_DEBUG", "0")
    return int(text) if text.isdigit() else 0


@contextmanager
def observe(observer: Callable[[PassResult], None]) -> Iterator[None]:
    """Let `observer` see every pass as it ends, inside of the context."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def with_added(passes: Sequence[Pass], added: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return passes of the compiler with those that a user added to them, each after the one that it names."""
    found = list(passes)
    for step in added:
        names = [known.name for known in found]
        if step.after in names:
            found.insert(names.index(step.after) + 1, step)
    return tuple(found)


def check_added(added: object, passes: Sequence[Pass]) -> tuple[Pass, ...]:
    """Return what a user gave as `passes=` as a tuple. Raises PassError for a name that is taken and for a pass that is
    to run after one of the compiler's `passes` that leaves no fx graph, or several."""
    if isinstance(added, Pass) or not isinstance(added, Sequence) or not all(isinstance(p, Pass) for p in added):
        raise PassError(f"passes is {added!r:.80}", fix='a list such as [autopar.Pass("name", run, after="clean")]')
    graph_passes = [p.name for p in passes if p.takes == GRAPH]
    for step in added:
        if not isinstance(step.name, str) or step.name in {p.name for p in passes} or " " in step.name:
            raise PassError(f"a pass cannot have the name {step.name!r}", fix="a word that no pass has yet")
        if step.after not in (*graph_passes, *(p.name for p in added if p is not step)):
            raise PassError(
                f"the pass {step.name!r} runs after {step.after!r}, where no graph is",
                fix=f"one of {', '.join(graph_passes)}",
            )
    return tuple(added)


def run_all(
    passes: Sequence[Pass], subject, context, check: Callable | None = None, every: bool = False, prefix: str = ""
):
    """Return what passes make of a subject, one after the other; those whose `when(context)` is false are left out.
    `check` is called with what a user's pass returned, or with `every` with what each did. `prefix`: of their names,
    where they run a second time for another purpose. Raises PassError for a user's pass that fails, or leaves what
    cannot be run."""
    for step in passes:
        with _named(step):
            options = tuple(step.options(context)) if step.when(context) else None
        if options is None:
            continue
        subject = run(step, subject, *options, prefix=prefix)
        if step.after is not None:
            _check_of_user(step, subject, check)
        elif every:
            check(subject)
    return subject


def _check_of_user(step: Pass, subject, check: Callable) -> None:
    try:
        check(subject)
    except Exception as error:
        raise PassError(
            f"the pass {step.name!r} left a graph that cannot be run: {said(error)}",
            node=getattr(error, "node", None),
            fix="see autopar/ir/graph.py for what nodes say about themselves; add ops before differentiate, where "
            "they need nothing but their arguments",
        ) from error


def is_watched() -> bool:
    """Return whether anyone looks at what passes do."""
    return bool(_observers) or level() >= 2


def run(step: Pass, subject, *options, prefix: str = ""):
    """Return what a pass makes of a subject, and show it to whoever watches."""
    watched = is_watched()
    before = count(subject) if watched else None  # now: most passes rewrite in place
    subject = _applied(step, subject, options)
    if watched:
        _show(PassResult(prefix + step.name, subject, before, count(subject)))
    return subject


def _applied(step: Pass, subject, options: tuple):
    is_inside = step.takes == GRAPH and hasattr(subject, "graph_module")
    taken = subject.graph_module if is_inside else subject
    kind = fx.GraphModule if isinstance(taken, fx.GraphModule) else type(taken)
    with _named(step):
        result = step.run(taken, *options)
        if step.after is not None and not isinstance(result, kind | None):
            raise TypeError(f"it returned a {type(result).__name__}, not a {kind.__name__}")
    if is_inside and result is not None:
        subject.graph_module = result
    return subject if is_inside or result is None else result


@contextmanager
def _named(step: Pass) -> Iterator[None]:
    """Raise what goes wrong in a user's pass as a PassError that names it."""
    try:
        yield
    except Exception as error:
        if step.after is None:
            raise
        raise PassError(
            f"the pass {step.name!r} failed: {said(error)}",
            fix="the error before this one has its line; it may return None or a graph as it was given, and its "
            "options= know plan and rank from localize on",
        ) from error


def _show(result: PassResult) -> None:
    for observer in list(_observers):
        observer(result)
    if level() >= 2 and _is_first_rank(result.subject):
        print(result.line(), file=sys.stderr)
        if level() >= 3:
            print(text_of(result.subject), file=sys.stderr)


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
    """Return graph modules by name: of a capture, of a micro-batch and the tail of its step, of a graph module, the
    forward and the backward of a partition, a forward and the copies that it takes, the parts of a backward, or the
    stages of a pipeline."""
    if isinstance(subject, list):
        return {f"stage_{stage.index}": stage.joint for stage in subject}
    if isinstance(subject, tuple):
        return {name: part for name, part in zip(("forward", "copies"), subject) if part is not None}
    if hasattr(subject, "weight") and hasattr(subject, "stash"):
        return {"backward_input": subject.input, "backward_weight": subject.weight}
    if getattr(subject, "tail", None) is not None:
        return {"joint": subject.captured.graph_module, "tail": subject.tail.graph_module}
    subject = getattr(subject, "captured", subject)
    if hasattr(subject, "forward") and hasattr(subject, "backward"):
        parts = {"forward": subject.forward, "backward": subject.backward}
        return {name: part for name, part in parts.items() if part is not None}
    module = getattr(subject, "graph_module", subject)
    return {"joint": module} if isinstance(module, fx.GraphModule) else {}


def text_of(subject) -> str:
    """Return the graphs that a pass returned as text: code if they are one rank's, else a line a node."""
    from .graph_text import graph_text

    texts = [emit_text(m, name) if "rank" in m.meta else graph_text(m) for name, m in graphs_of(subject).items()]
    return "\n".join(texts)


def _is_first_rank(result) -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return all(module.meta.get("rank", 0) == 0 for module in graphs_of(result).values())
