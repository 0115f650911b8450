"""`autopar train --elastic`: when processes are lost, the run goes on with as many as remain.

Those that remain leave what they hold behind the last step that all of them took, and the copies that they have of each
other's shares. The run goes on from the newest step of which that is all, or from the newest checkpoint if that is
newer. The mesh shrinks, its axis of data first, and the model is planned for it. The global batch and the place in the
data stay, and random numbers do not depend on the mesh, so that losses are those of a run without the accident but for
the order of sums.
"""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

from ..errors import AutoparError, CheckpointError, RankFailure
from ..ir.mesh import Mesh

LEFT = ".left"  # a folder beside the checkpoints


class LostRanks(RankFailure):
    """Processes were ended by a signal that nobody sent on purpose. `ranks`: those."""

    def __init__(self, ranks: list[int], reason: AutoparError | None):
        self.ranks = ranks
        said = reason.message if reason is not None else "no other process said why"
        super().__init__(said, rank=ranks[0], fix=reason.fix if reason is not None else "see the output above")


def train(settings: dict, devices: int, spawn: Callable[[dict, int], int]) -> int:
    """Call `spawn` with the settings of a run and its number of processes, on fewer as long as some are lost, and
    return its exit code. Raises LostRanks when none is left."""
    from ..storage.checkpoint import latest_checkpoint

    root = Path(settings["checkpoint"]).expanduser()
    left, of_others = root / LEFT, None if settings["resume"] else latest_checkpoint(root)
    while True:
        shutil.rmtree(left, ignore_errors=True)
        try:
            return spawn(settings | {"left": str(left)}, devices)
        except LostRanks as lost:
            if devices == len(lost.ranks):
                raise
            mesh, newest = smaller(Mesh.parse(settings["mesh"]), devices - len(lost.ranks)), latest_checkpoint(root)
            source, resume = _source(left, root, settings["keep"], None if newest == of_others else newest)
            print(
                f"autopar: {len(lost.ranks)} of {devices} processes lost ({lost.message}): going on with mesh {mesh}, "
                f"{source}",
                file=sys.stderr,
                flush=True,
            )
            settings, devices = settings | {"mesh": str(mesh), "resume": resume}, mesh.devices
        finally:
            shutil.rmtree(left, ignore_errors=True)


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
