"""Show the steps of `autopar train`: a line each, and on a terminal a bar below them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Show = Callable[[int, float, float], object]


@contextmanager
def shown_steps(steps: int, done: int, tokens: int, ideal_seconds: float, say: Callable[..., object]) -> Iterator[Show]:
    """Yield a function that shows a step of so many `tokens` by its number, loss and seconds. `ideal_seconds`: what a
    step would take if all devices computed at their peak, 0.0 if that is not known; by the seconds it takes that is the
    model FLOPs utilization (MFU). `say` prints a line, on rank 0."""
    width = len(str(steps))

    def line(step: int, loss: float, seconds: float) -> str:
        return f"step {step:{width}d}  loss {loss:.4f}  {tokens / seconds:,.0f} tokens/s"

    if say is not print or not sys.stdout.isatty():
        yield lambda *figures: say(line(*figures), flush=True)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = TextColumn("steps"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.fields[rate]}")
    with Progress(*columns, TimeRemainingColumn(), refresh_per_second=2) as bar:
        task = bar.add_task("", total=steps, completed=done, rate="")

        def show(step: int, loss: float, seconds: float) -> None:
            bar.console.print(line(step, loss, seconds), highlight=False, markup=False)
            utilization = f"  MFU {ideal_seconds / seconds:.1%}" if ideal_seconds else ""
            bar.update(task, completed=step, rate=f"{tokens / seconds:,.0f} tokens/s{utilization}")

        yield show
