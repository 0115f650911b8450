"""Find the sizes of a call that need no capture of their own: what all ranks decide together about programs that follow
a size.

After captures at two sizes of a dim, or three (see following.py), a new one costs milliseconds. Where no program
follows, each size is captured as any new call is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch.distributed as dist

from .._torch import OpenSize
from ..codegen.follow_size import Differs
from ..errors import AutoparError
from ..frontend.call_signature import CallSignature
from ..processes import agree
from .capture import Capture, Traced
from .following import Dims, Following, differing_dims, following, points_of
from .step import Step

TRIES = 4  # captures after which no program is looked for any more, if none was found

_log = logging.getLogger("autopar")


class Sizes:
    """The programs of one module that follow a size."""

    def __init__(self) -> None:
        self.known: list[Following] = []
        self.failures = 0

    def find(self, example: Callable[[], tuple], state: tuple) -> tuple[Traced, Capture, Step, int] | None:
        """Return what serves a call without a capture: how it is called, a capture of the same program, the program and
        the size; None if nothing does. `example` gives the call on global shapes and the layouts that it fixes;
        `state`: as a Capture has it. All ranks call it together."""
        if not self.known:
            return None
        found: dict[int, tuple[CallSignature, int]] = {}

        def serving() -> list[int]:
            whole, fixed = example()
            signature, _ = CallSignature.of(*whole)
            for at, known in enumerate(self.known):
                capture = known.capture
                if capture.state == state and capture.traced.fixed == fixed and capture.holds():
                    if (size := known.size(signature)) is not None:
                        found[at] = signature, size
            return [*found]

        everyone = agree.from_all(serving)
        common = set(everyone[0]).intersection(*everyone)
        if not common:
            return None
        at = min(common)
        signature, size = found[at]
        known, traced = self.known[at], self.known[at].capture.traced
        captured = replace(traced.captured, signature=signature)
        return replace(traced, captured=captured, content=None), known.capture, known.step, size

    def add(self, captures: Sequence[Capture], opened: Callable[[Capture, Dims], OpenSize]) -> None:
        """Look for a program that follows the size in which the last capture differs from those before it. All ranks
        call it together; rank 0 asks what the user's code says of it (`opened`)."""
        if self.failures == TRIES:
            return
        found = points_of(captures)
        sizes = agree.from_all(lambda: sorted(found[1]) if found is not None else [])
        if found is None or any(others != sizes[0] for others in sizes):
            return
        dims, points = found
        made: list[Following] = []
        alike = [k.opened for k in self.known if k.dims == dims and _same_code(k.capture, captures[-1])]

        def reason() -> str:
            asked = (lambda largest: next(iter(alike), None) or opened(largest, dims)) if dist.get_rank() == 0 else None
            try:
                made.append(following(dims, points, asked))
            except (Differs, AutoparError) as error:
                return str(error)
            return ""

        reasons = [text for text in agree.from_all(reason) if text]
        if not reasons:
            self.known += made
        else:
            self.failures += 1
            if dist.get_rank() == 0:
                _log.info("%s is captured at every size: %s", ", ".join(dims), reasons[0])

    def points(self) -> list[Capture]:
        """Return the captures that the programs are made of."""
        return [capture for known in self.known for capture in known.points.values()]

    def follow_deferred(self) -> list[Step]:
        """Give the programs the graphs for gradients that wait for their reduction, which their points have by now;
        return those that cannot have them, which serve no more. All ranks call it together."""
        lost = []
        for known in [k for k in self.known if k.step.backward is not None and k.step.backward.unreduced is None]:
            backwards = {size: capture.step.backward for size, capture in known.points.items()}

            def follows(known=known, backwards=backwards) -> bool:
                try:
                    return known.step.backward.follow_deferred(backwards) <= known.lines
                except Differs:
                    return False

            if not all(agree.from_all(follows)):
                lost.append(known.step)
                self.known.remove(known)
        return lost


def _same_code(a: Capture, b: Capture) -> bool:
    """Return whether the user's code was traced alike for two captures but for the size of some dims: what one open
    trace says of these is so for both."""
    (one, other) = (c.traced.captured.signature for c in (a, b))
    found = differing_dims(one, other)
    return found is not None and a.state == b.state and a.traced.fixed == b.traced.fixed and a.holds() and b.holds()
