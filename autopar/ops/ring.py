"""Say which keys a device works on at each step of ring attention, and where they come from and go to.

P devices hold a block of the queries and of the keys and values each. In step i device r works on block r - i of the
keys (modulo P), which its neighbour r - 1 had in the step before (Liu et al., Ring Attention, arXiv 2310.01889). Of a
block it gets the rows that some query of its own reaches, and nothing of a block that a causal mask or a window closes
to it. If the neighbour had the same rows they come from there, else from the owner, who holds all. Gradients go the
same way: on to the next device while that has the same rows, then home; the owner's own part never leaves it. So n
rows that m devices reach are sent m times, and their gradients too. A step in which no device has anything to do is
left out.

In zigzag a block of a causal attention has two halves, the blocks r and 2 P - 1 - r of 2 P. Of another device's block
either the first half of the keys is open, to all queries, or all keys are, to the second half of the queries. So all
devices have half of a pair of blocks to do in every step but the first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

Rows = tuple[int, int]  # from, and up to which
Block = tuple[Rows, ...]  # the places of a device's rows among all: one range, or two in zigzag


@dataclass(frozen=True)
class Ring:
    """`rows[device][block]`: those of a block of keys that queries of the device reach, counted in the block, (0, 0) if
    none; `has_halves`: queries are in zigzag under a causal mask; `is_passed_on`: neighbours pass gradients on, which
    go home at once without that."""

    rows: tuple[tuple[Rows, ...], ...]
    has_halves: bool = False
    is_passed_on: bool = True

    @property
    def size(self) -> int:
        """Return the number of devices."""
        return len(self.rows)

    @property
    def halves(self) -> tuple[int, ...]:
        """Return the parts of a block of queries to which different keys are open."""
        return (0, 1) if self.has_halves else (0,)

    def open_halves(self, place: int, step: int) -> tuple[int, ...]:
        """Return the halves of a device's queries that have something to do in a step."""
        return (1,) if self.has_halves and self.block(place, step) > place else self.halves

    def block(self, place: int, step: int) -> int:
        """Return whose block of keys is a device's in a step."""
        return (place - step) % self.size

    def reached(self, place: int, step: int) -> Rows:
        """Return the rows of its block that a device works on in a step."""
        return self.rows[place][self.block(place, step)]

    def works(self, place: int, step: int) -> bool:
        """Return whether a device has something to do in a step."""
        return count(self.reached(place, step)) > 0

    @cached_property
    def steps(self) -> tuple[int, ...]:
        """Return the steps in which some device has something to do, the first of which is 0."""
        return (0, *(i for i in range(1, self.size) if any(self.works(p, i) for p in range(self.size))))

    def _is_passed_on(self, place: int, step: int) -> bool:
        """Return whether the next device works on the same rows in the next step."""
        after = (place + 1) % self.size
        if step + 1 >= self.size or not self.works(place, step):
            return False
        return self.reached(place, step) == self.reached(after, step + 1)

    def keys_from(self, place: int, step: int) -> int | None:
        """Return the device that sends the rows that a device works on in a step; None if they are its own or none."""
        if step == 0 or not self.works(place, step):
            return None
        before = (place - 1) % self.size
        return before if self._is_passed_on(before, step - 1) else self.block(place, step)

    def keys_to(self, place: int, step: int) -> list[int]:
        """Return the devices that a device sends rows for a step to, in their order: what its neighbour works on next,
        or of its own block."""
        candidates = {(place + 1) % self.size, (place + step) % self.size}
        return sorted(other for other in candidates if self.keys_from(other, step) == place)

    def gradients_to(self, place: int, step: int) -> int | None:
        """Return the device that gets what a device has of a block's gradients after a step: the next one that works on
        the same rows, or the owner; None if it has none, and after the first step, whose block is its own."""
        if step == 0 or not self.works(place, step):
            return None
        is_passed_on = self.is_passed_on and self._is_passed_on(place, step)
        return (place + 1) % self.size if is_passed_on else self.block(place, step)

    def gradients_from(self, place: int, step: int) -> list[int]:
        """Return the devices that send gradients to this one after a step, in their order: the neighbour those of the
        block of the next step, the last device of the own block those, summed up."""
        candidates = {(place - 1) % self.size, (place + step) % self.size}
        return sorted(other for other in candidates if self.gradients_to(other, step) == place)

    def sent_rows(self, keys: bool = True, gradients: bool = False) -> list[int]:
        """Return how many rows every device sends, of keys, of gradients, or of both."""
        sent = [0] * self.size
        for step in self.steps[1:]:
            for place in range(self.size):
                rows, source = count(self.reached(place, step)), self.keys_from(place, step)
                if source is not None:
                    sent[source] += rows * keys
                    sent[place] += rows * gradients
        return sent

    @cached_property
    def longest(self) -> tuple[int, ...]:
        """Return the rows of the longest message of each step but the first."""
        return tuple(max(count(self.reached(place, i)) for place in range(self.size)) for i in self.steps[1:])


def count(rows: Rows) -> int:
    """Return how many rows there are."""
    return rows[1] - rows[0]


@lru_cache(4096)
def ring_of(blocks: tuple[Block, ...], causal: bool, window: int = 0, zigzag: bool = False) -> Ring:
    """Return the way of blocks of keys at these places, to devices that have the queries of the same ones. A window is
    of plain blocks."""
    has_halves = causal and zigzag
    reach = [
        [_rows(blocks, place, block, causal, window, has_halves) for block in range(len(blocks))]
        for place in range(len(blocks))
    ]
    return Ring(tuple(map(tuple, reach)), has_halves)


def _rows(blocks: Sequence[Block], place: int, block: int, causal: bool, window: int, has_halves: bool) -> Rows:
    """Return which rows of a block of keys the queries of a device reach."""
    rows = sum(map(count, blocks[block]))
    if place == block:
        return 0, rows
    if has_halves:
        return 0, rows // 2 if block < place else rows
    if not (causal or window):
        return 0, rows
    ((first, stop),), ((first_key, stop_key),) = blocks[place], blocks[block]
    low = max(first_key, first - window + 1) if window else first_key
    high = min(stop_key, stop if causal else stop + window - 1)
    return (low - first_key, high - first_key) if low < high else (0, 0)
