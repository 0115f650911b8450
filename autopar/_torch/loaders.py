"""DataLoaders: which errors are of their workers."""

from __future__ import annotations

import traceback


def is_of_a_loader(error: BaseException) -> bool:
    """Return whether torch's handler of signals raised an error: it says that a worker of a DataLoader was killed, in
    the middle of whatever runs."""
    from torch.utils.data._utils import signal_handling

    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return bool(frames) and frames[-1].f_code.co_filename == signal_handling.__file__
