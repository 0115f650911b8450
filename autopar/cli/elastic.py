"""`autopar train --elastic`: when processes are lost, the run goes on with as many as remain.

Those that remain leave what they hold behind the last step that all of them took, and the copies that they have of each
other's shares. The run goes on from the newest step of which that is all, or from the newest checkpoint if that is
newer. The mesh shrinks, its axis of data first, and the model is planned for it. The global batch and the place in the
data stay, and random numbers do not depend on the mesh, so that losses are those of a run without the accident but for
the order of sums. A signal takes it to all processes again. Under torchrun, which starts all processes again when a
node is lost or joins, the mesh is that of as many as there are.
"""

from __future__ import annotations

import math
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from tempfile import TemporaryDirectory

from ..errors import AutoparError, CheckpointError, MeshError, RankFailure
from ..ir.mesh import Mesh

LEFT = ".left"  # a folder beside the checkpoints
SETTLE_SECONDS = 16.0  # in which torchrun forgets a node that is gone, for which it would wait in vain
GROWS = signal.SIGUSR2  # by which a run is told that as many processes can run again as it was started with


class LostRanks(RankFailure):
    """Processes were ended by a signal that nobody sent on purpose. `ranks`: those."""

    def __init__(self, ranks: list[int], reason: AutoparError | None):
        self.ranks = ranks
        said = reason.message if reason is not None else "no other process said why"
        super().__init__(said, rank=ranks[0], fix=reason.fix if reason is not None else "see the output above")


def train(
    settings: dict,
    devices: int,
    spawn: Callable[[dict, int], int],
    planning: Callable[[dict, Sequence[Mesh], Path], AbstractContextManager],
) -> int:
    """Call `spawn` with the settings of a run and its number of processes, on fewer as long as some are lost, on all of
    them again if it ends by GROWS, and return its exit code. `planning`: a context in which plans for other meshes are
    made into a folder. Raises LostRanks when none is left."""
    from ..storage.checkpoint import latest_checkpoint

    root, first, whole = Path(settings["checkpoint"]).expanduser(), settings["mesh"], devices
    left, of_others = root / LEFT, None if settings["resume"] else latest_checkpoint(root)
    shutil.rmtree(left, ignore_errors=True)  # of an earlier run
    with TemporaryDirectory(prefix="autopar-plans-") as plans:
        while True:
            here = Mesh.parse(settings["mesh"])
            others = dict.fromkeys([smaller(here, n) for n in range(devices - 1, 0, -1)] + [Mesh.parse(first)])
            try:
                with planning(settings, [*others], Path(plans)):
                    code = spawn(settings | {"left": str(left), "template": template(Path(plans), here)}, devices)
                if code != 128 + GROWS:
                    return code
                settings, devices = settings | {"mesh": first, "resume": latest_checkpoint(root) != of_others}, whole
                _say(f"going on with mesh {first}")
            except LostRanks as lost:
                if devices == len(lost.ranks):
                    raise
                mesh, newest = smaller(here, devices - len(lost.ranks)), latest_checkpoint(root)
                source, resume = _source(left, root, settings["keep"], None if newest == of_others else newest)
                _say(
                    f"{len(lost.ranks)} of {devices} processes lost ({lost.message}): going on with mesh {mesh}, "
                    f"{source}; kill -USR2 {os.getpid()} takes the run to mesh {first} again"
                )
                settings, devices = settings | {"mesh": str(mesh), "resume": resume}, mesh.devices
            finally:
                shutil.rmtree(left, ignore_errors=True)


def under_torchrun(settings: dict, world: int, rank: int) -> dict:
    """Return the settings of a run in processes that torchrun has started, which starts all of them again, fewer or
    more, when some are lost or join: for a mesh of so many, and from what the former ones have left or saved, which
    rank 0 sees to. Raises MeshError where no such mesh takes all."""
    from ..storage.checkpoint import latest_checkpoint

    asked = Mesh.parse(settings["mesh"])
    mesh, root = smaller(asked, world), Path(settings["checkpoint"]).expanduser()
    if mesh.devices != world:
        most = f"the largest such mesh for fewer, {mesh}, takes {mesh.devices}"
        raise MeshError(
            f"torchrun started {world} processes for mesh {asked}, which has {asked.devices} devices; {most}",
            fix="start on each node a multiple of the processes that an index along the axis of data takes",
        )
    left = root / LEFT
    if rank == 0 and left.exists():
        _say(f"going on with mesh {mesh}, {_source(left, root, settings['keep'], latest_checkpoint(root))[0]}")
        shutil.rmtree(left)
    return settings | {"mesh": str(mesh), "resume": True, "left": str(left), "settle_seconds": SETTLE_SECONDS}


def template(plans: Path, mesh: Mesh) -> Path | None:
    """Return the file of the plan for a mesh, if there is one."""
    path = plans / f"{mesh}.json"
    return path if path.exists() else None


def _say(text: str) -> None:
    print(f"autopar: {text}", file=sys.stderr, flush=True)


def _source(left: Path, root: Path, keep: int | None, newest: Path | None) -> tuple[str, bool]:
    """Make a checkpoint of what processes have left, if that is whole and behind the run's `newest` one, and return
    what the run goes on from, and whether that is a checkpoint."""
    from ..storage.remains import put_together

    try:
        step = -1 if newest is None else int(newest.name.partition("-")[2])
        return f"from what those that remain hold, {put_together(left, root, keep, step).name}", True
    except CheckpointError as error:
        there = f"from the newest checkpoint, {newest.name}" if newest is not None else "from the first step"
        return f"{there} ({error.message})", newest is not None


def smaller(mesh: Mesh, devices: int) -> Mesh:
    """Return a mesh of these axes with at most so many devices: the axis of data is cut first, then the others from the
    outermost on, each no more than needed."""
    sizes = dict(zip(mesh.names, mesh.sizes))
    for name in sorted(sizes, key=lambda name: not name.startswith(("dp", "data"))):
        others = math.prod(sizes.values()) // sizes[name]
        sizes[name] = min(sizes[name], max(1, devices // others))
    return Mesh(tuple(sizes), tuple(sizes.values()))
