"""Process groups for the logical names that a local graph uses: "dp", or "dp,tp" for several axes together.

On gloo, graphs run on groups of autopar's own: how long their collectives wait can be chosen (AUTOPAR_TIMEOUT_S) and
they can be given up without touching the caller's. Elsewhere (a communicator of NCCL takes memory) those of the
DeviceMesh serve, and what it has no group for gets one of the same backend. A communicator of NCCL runs one collective
after the other: reductions that run beside the backward have others than the gathers that it waits for.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, cast

import torch.distributed as dist

from .. import _torch
from .._torch import dtensors
from .._torch.loaders import is_of_a_loader
from ..errors import CollectiveTimeout, MeshError
from ..ir.mesh import Mesh
from .calls import Call
from .meeting import MOST_SECONDS_BETWEEN_LOOKS, SECONDS_BETWEEN_LOOKS, lost, meet

REDUCTIONS = "reductions"  # a lane that has communicators of its own on every backend
TIMEOUT_SECONDS = 120.0  # that a collective waits for others, or 20 times the first step if that is longer
FIRST_STEP = 10  # times that in the first step
STEPS = 20

# Weak references, so that the caller's destroy_process_group ends the groups. By backend, lane and ranks; None where
# this rank is no member.
_world: weakref.ref = weakref.ref(Mesh)  # whose they are; none yet
_control: tuple[weakref.ref, weakref.ref] = (_world, _world)  # whose the group of `control_group` is, and the group
_own: dict[tuple[str, str, tuple[int, ...]], weakref.ref | None] = {}
_made = 0  # groups in this world


@contextlib.contextmanager
def _unwatched(what: str) -> Iterator[Callable[[bool], None]]:
    yield lambda in_vain: None


# A context in which this rank waits at `what`. It gives a function that raises the error of a failure that keeps others
# from coming, told or found by asking, also about those who are late if it is `in_vain`. watch.py puts its own here.
waiting: Callable[[str], contextlib.AbstractContextManager[Callable[[bool], None]]] = _unwatched


def check_world(mesh: Mesh, device_mesh) -> int:
    """Return this process's rank in the mesh. Raises MeshError if the mesh is not the whole world in order."""
    world = dist.get_world_size()
    ranks = device_mesh.mesh.flatten().tolist()
    if world != mesh.devices or ranks != list(range(world)):
        raise MeshError(
            f"the mesh has {mesh.devices} devices and the process group {world} ranks",
            mesh=mesh,
            fix=f"start {mesh.devices} processes, or use a mesh of {world} devices",
        )
    return dist.get_rank()


def bind(
    names: Iterable[str], mesh: Mesh, device_mesh, rank: int, lane: str = "", on_host: bool = False
) -> dict[str, str]:
    """Return the name of the process group of this rank for every logical name. Collective: all ranks call it with the
    same names. Two lanes share no group of autopar's own: collectives of one never meet those of the other. `on_host`:
    of gloo, whatever the backend is."""
    backend = "gloo" if on_host else dist.get_backend()
    own = mesh.devices > 1 and (backend == "gloo" or lane == REDUCTIONS)
    bound = {}
    for name in sorted({*names}):
        axes = tuple(name.split(","))
        if not own and name in (device_mesh.mesh_dim_names or ()):
            bound[name] = device_mesh.get_group(axes[0]).group_name
        elif not own and math.prod(map(mesh.size, axes)) == mesh.devices:
            bound[name] = dist.group.WORLD.group_name
        else:
            for ranks in mesh.groups(axes):
                group = _own_group(ranks, lane, backend)
                bound[name] = group.group_name if group is not None else bound.get(name, "")
    return bound


@dataclass(frozen=True)
class ProcessGroups:
    """`bind` for the graphs of one rank and mesh."""

    mesh: Mesh
    device_mesh: object
    rank: int

    @property
    def are_gloo(self) -> bool:
        """Return whether collectives of the graphs run on gloo."""
        return dist.get_backend() == "gloo"

    def bind(self, names: Iterable[str], lane: str = "") -> dict[str, str]:
        """Return the name of the process group for each name of axes in a graph."""
        return bind(names, self.mesh, self.device_mesh, self.rank, lane)


def members(group_name: str) -> list[int] | None:
    """Return the ranks of a process group of this name, None if it is not known any more."""
    try:
        return dist.get_process_group_ranks(_torch.group_of(group_name))
    except (RuntimeError, KeyError, ValueError):
        return None


def _own_group(ranks: tuple[int, ...], lane: str = "", backend: str = "gloo") -> dist.ProcessGroup | None:
    """Return the group of these ranks in a lane, None without this one. Collective: all ranks of the world ask for the
    same ones in order."""
    global _world
    if _world() is not dist.group.WORLD:
        _world = weakref.ref(dist.group.WORLD)
        _own.clear()
    key = (backend, lane, ranks)
    if key not in _own:
        group = _new_group(ranks, lane, backend)
        _own[key] = weakref.ref(group) if dist.get_rank() in ranks else None
    reference = _own[key]
    return reference() if reference is not None else None


def _new_group(ranks: Sequence[int], lane: str, backend: str = "gloo") -> dist.ProcessGroup | None:
    """Return a new group of these ranks, None without this one. They meet before: those that wait can be told of a
    failure, and say who is missing. Raises CollectiveTimeout about ranks that do not come, or what watch.py knows."""
    global _made
    _made += 1
    limit, what = FIRST_STEP * timeout_seconds(), f"a new process group of {len(ranks)} ranks"
    new = partial(dist.new_group, list(ranks), timeout=timedelta(seconds=limit), backend=backend)
    if dist.get_rank() not in ranks:
        new()
        return None
    key, end = f"autopar/groups/{_made}/{lane}/{ranks[0]}", time.monotonic() + limit
    with waiting(what) as check:

        def patiently(run: Callable[[], Any]) -> Any:
            call, seconds = Call(run), SECONDS_BETWEEN_LOOKS  # the store may be on a machine that is cut off
            while not call.is_over(min(seconds, max(end - time.monotonic(), 0.0))):
                check(False)
                seconds = min(2 * seconds, MOST_SECONDS_BETWEEN_LOOKS)
                if time.monotonic() >= end:
                    check(True)
                    raise _unmet(lost(key, ranks), what, f"within {limit:g} s ({FIRST_STEP} times AUTOPAR_TIMEOUT_S)")
            return call.result

        try:
            patiently(partial(meet, key, ranks, limit))
            return patiently(new)
        except RuntimeError as error:
            if is_of_a_loader(error):
                raise
            check(False)
            raise _unmet(lost(key, ranks), what, f"any more: {str(error).splitlines()[0]}") from error


def all_or_broken(what: str, run: Callable[[], Any]) -> None:
    """Run a collective of all ranks, made before they can ask each other. Raises CollectiveTimeout, on all that live,
    if it fails on one of them: who does not come to the store any more is named."""
    call, key, store = Call(run), f"autopar/broken/{what}", _torch.default_store()
    look = None  # one at a time, apart: the store may be on a machine that is cut off
    try:
        while not call.is_over(SECONDS_BETWEEN_LOOKS):
            look = look or Call(partial(store.check, [key]))
            if look.is_over(0.0):
                if look.result:
                    raise RuntimeError("it failed on another rank")
                look = None
    except RuntimeError as error:
        if is_of_a_loader(error):
            raise
        with contextlib.suppress(RuntimeError):  # a rank whose neighbours live waits on in the collective
            Call(partial(store.set, key, "here")).is_over(SECONDS_BETWEEN_LOOKS)
        missing = lost(key, range(dist.get_world_size()))
        raise _unmet(missing, what, f"any more: {str(error).splitlines()[0]}") from error


def _unmet(missing: list[int], what: str, how: str) -> CollectiveTimeout:
    who = f"rank{'s' if len(missing) > 1 else ''} {', '.join(map(str, missing))}" if missing else "ranks"
    return CollectiveTimeout(
        f"{who} did not come to {what} {how}",
        ranks=tuple(missing),
        collective=what,
        fix="see which processes or links are gone, and start again; AUTOPAR_TIMEOUT_S=seconds waits longer",
    )


def host_group() -> dist.ProcessGroup:
    """Return a group of all ranks for numbers on the host in a step, of gloo. Collective the first time."""
    if dist.get_backend() == "gloo":
        return cast(dist.ProcessGroup, _own_group(tuple(range(dist.get_world_size())), "host"))
    return control_group()


def tensor_group(lane: str = "") -> dist.ProcessGroup:
    """Return a group of all ranks for tensors on the mesh's devices outside of graphs: on gloo one of autopar's own,
    else the caller's. In a `lane` it waits as long as a step's collectives do, and without one as `control_group`.
    Collective the first time."""
    if dist.get_backend() != "gloo":
        return cast(dist.ProcessGroup, dist.group.WORLD)
    return cast(dist.ProcessGroup, _own_group(tuple(range(dist.get_world_size())), lane)) if lane else control_group()


def control_group() -> dist.ProcessGroup:
    """Return a group of all ranks for what they tell each other between steps, of gloo. It waits FIRST_STEP times
    AUTOPAR_TIMEOUT_S, since one may trace, plan or write for all. Collective the first time."""
    global _control, _made
    of_world, group = _control
    if of_world() is not dist.group.WORLD or group() is None:
        _made = 0  # it is the first group of a world
        _control = weakref.ref(dist.group.WORLD), weakref.ref(_new_group(range(dist.get_world_size()), "control"))
    return cast(dist.ProcessGroup, _control[1]())


def timeout_seconds() -> float:
    """Return AUTOPAR_TIMEOUT_S, else TIMEOUT_SECONDS."""
    return float(os.environ.get("AUTOPAR_TIMEOUT_S") or TIMEOUT_SECONDS)


def limit_waits(step_seconds: float) -> None:
    """Let collectives wait no longer than AUTOPAR_TIMEOUT_S or 20 steps, whichever is more, from now on."""
    for group in _living():
        _torch.set_group_timeout(group, max(timeout_seconds(), STEPS * step_seconds))


def release() -> None:
    """Give autopar's groups up after a failure: ranks that wait for this one in a group without the failed one learn of
    it."""
    control = _control[1]()
    for group in (*_living(), *([control] if control is not None else [])):
        dist.destroy_process_group(group)
    _own.clear()


def end() -> None:
    """End all process groups with the threads that serve them, when the model is no longer needed: a thread of gloo
    that lets go of a tensor while the interpreter ends takes the process down."""
    dist.destroy_process_group()
    dtensors.forget_meshes()
    gc.collect()


def _living() -> list:
    groups = [reference() for reference in _own.values() if reference is not None]
    return [group for group in groups if group is not None]
