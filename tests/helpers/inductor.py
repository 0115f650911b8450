"""Read the programs that Inductor writes for the graphs of a rank."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from unittest.mock import patch

import torch
import torch.distributed as dist

from autopar.codegen.python_code import bind_groups, group_names
from autopar.errors import CompilerError
from autopar.runtime.compiled_graph import compiled_graph
from autopar.simulate import census
from autopar.simulate.census import Census


class Written(Exception):
    """Raised instead of compiling the kernels of a program that is written."""


def program_of(module, options=()) -> list[str]:
    """The lines of the program that Inductor writes for a graph whose groups are bound."""
    from torch._inductor import config
    from torch._inductor.graph import GraphLowering

    programs = []

    def stop(text: str) -> None:
        programs.append(text)
        raise Written

    values = [
        torch.zeros(n.meta["val"].shape, dtype=n.meta["val"].dtype) for n in module.graph.find_nodes(op="placeholder")
    ]
    with patch.object(GraphLowering, "save_output_code", staticmethod(stop)), config.patch(force_disable_caches=True):
        with contextlib.suppress(CompilerError):
            compiled_graph(module, "forward", dict(options), {})(values)
    (text,) = programs
    return text.splitlines()


@contextlib.contextmanager
def absent_ranks(count: int) -> Iterator[str]:
    """Make a process group of so many ranks, of which the others are not there, and give its name."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield dist.group.WORLD.group_name
    finally:
        dist.destroy_process_group()


def compiled_census(program, options=(), hideable=None) -> Census:
    """Count the bytes beside compute in what Inductor makes of a rank's graphs; `hideable` as in census.of_graphs."""
    hideable, total = census.hideable_of(program) if hideable is None else hideable, Census()
    with absent_ranks(program.parts.forward.meta["mesh"].devices) as name:
        for part in (program.parts.forward, program.parts.backward):
            bound = bind_groups(part, dict.fromkeys(group_names(part), name))
            total += census.of_compiled(program_of(bound, options), part, hideable)
    return total
