"""Say which block of keys a device works on at each step of ring attention, and where blocks go between steps.

P devices hold a block of the queries and of the keys and values each. In step i device r works on block r - i of the
keys (modulo P), which its neighbour r - 1 had in the step before (Liu et al., Ring Attention, arXiv 2310.01889). Under
a causal mask blocks behind the device's own are closed to it: they are neither computed with nor sent there. Gradients
of a block travel with it, from the first device that is not its owner to the last, and from there home; the owner's own
part never leaves it.

In zigzag a block of a causal attention has two halves, the blocks r and 2 P - 1 - r of 2 P. Of another device's block
either the first half of the keys is open, to all queries, or all keys are, to the second half of the queries. So every
block goes round to all devices, and all have half of a pair of blocks to do in every step but the first.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Ring:
    """`size` devices in the order of their blocks; `causal`: queries attend to keys up to their own place; `zigzag`:
    blocks are two halves, one from each end."""

    size: int
    causal: bool
    zigzag: bool = False

    @property
    def halves(self) -> tuple[int, ...]:
        """Return the parts of a block that are open to different keys."""
        return (0, 1) if self.causal and self.zigzag else (0,)

    def open_halves(self, place: int, step: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Return the halves of a device's queries that have something to do in a step, and those of the keys."""
        block = (place - step) % self.size
        if len(self.halves) == 1 or block == place:
            return self.halves, self.halves
        return (self.halves, (0,)) if block < place else ((1,), self.halves)

    def block(self, place: int, step: int) -> int | None:
        """Return the block of keys of a device in a step; None if it has nothing to do."""
        block = (place - step) % self.size
        return None if self.causal and not self.zigzag and block > place else block

    def keys_to(self, place: int, step: int) -> int | None:
        """Return the device that gets a device's block after a step; None if it goes no further."""
        after = (place + 1) % self.size
        if step + 1 == self.size or self.block(place, step) is None or self.block(after, step + 1) is None:
            return None
        return after

    def keys_from(self, place: int, step: int) -> int | None:
        """Return the device whose block comes to this one after a step; None if none does."""
        before = (place - 1) % self.size
        return before if self.keys_to(before, step) == place else None

    def gradients_to(self, place: int, step: int) -> int | None:
        """Return the device that gets what a device has of a block's gradients after a step: the next that works on the
        block, or its owner; None after the first step, whose block is the device's own."""
        block = self.block(place, step)
        if step == 0 or block is None:
            return None
        after = self.keys_to(place, step)
        return block if after is None else after

    def gradients_from(self, place: int, step: int) -> list[int]:
        """Return the devices that send gradients to this one after a step, in their order: the neighbour those of the
        block of the next step, the last device of the own block those, summed up."""
        return [other for other in range(self.size) if self.gradients_to(other, step) == place]

    @property
    def most_sent(self) -> int:
        """Return the number of blocks of keys that the device sends that sends most, of gradients as well."""
        return self.size - 1
