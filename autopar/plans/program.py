"""The integer program that had the last word on a plan (autopar/planner/solver/last_word.py), as the plan says it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class DecidedProgram:
    """The outcome for all `choices`, the options of classes of ops: the bounds excluded so many, OR-tools decided
    so many of the others, in a program of so many `variables`. It is `proved` if no plan in which equal blocks decide
    alike is faster by more than the program's gap."""

    choices: int = 0
    excluded: int = 0
    decided: int = 0
    variables: int = 0
    proved: bool = False

    def __str__(self) -> str:
        left = self.choices - self.excluded
        start = f"integer program: {self.excluded:,} of {self.choices:,} choices excluded by bounds"
        if not self.decided and not self.proved and left:
            return f"{start}, too many left for a program ({left:,} could be better)"
        if not self.decided:
            return f"{start}, none left to decide"
        how = "proved best where equal blocks decide alike" if self.proved else f"not proved ({left:,} could be better)"
        return f"{start}, {self.decided:,} decided with {self.variables:,} variables, {how}"
