"""Reads the entries of one table of a profile, and says what is wrong with those that cannot be."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ..errors import HardwareError


@dataclass(frozen=True)
class Table:
    """One table of a profile; its methods return an entry or raise HardwareError naming the file and the key."""

    file: Path
    entries: Mapping[str, object]
    path: str = ""

    def _get(self, key: str, kind: type | tuple[type, ...], wanted: str, fits=lambda value: True):
        value = self.entries.get(key)
        if not isinstance(value, kind) or isinstance(value, bool) or not fits(value):
            shown = "missing" if value is None else repr(value)
            raise HardwareError(f"{self.file}: {self.path}{key} is {shown}", fix=f"set {self.path}{key} to {wanted}")
        return value

    def text(self, key: str) -> str:
        """Return a text that is not blank. Raises HardwareError, as all of these do."""
        return self._get(key, str, "a text", fits=str.strip)

    def positive(self, key: str) -> float:
        """Return a number above 0."""
        return float(self._get(key, (int, float), "a positive number", fits=lambda value: 0 < value < math.inf))

    def zero_or_more(self, key: str) -> float:
        """Return a number from 0 on."""
        return float(self._get(key, (int, float), "0 or a positive number", fits=lambda value: 0 <= value < math.inf))

    def at_least_one(self, key: str) -> float:
        """Return a number from 1 on."""
        return float(self._get(key, (int, float), "a number of 1 or more", fits=lambda value: 1 <= value < math.inf))

    def one_of(self, key: str, known: tuple[str, ...]) -> str:
        """Return one of the known words."""
        return self._get(key, str, " or ".join(known), fits=known.__contains__)

    def numbers(self, key: str, length: int | None = None, rising: bool = False) -> tuple[float, ...]:
        """Return a list of positive numbers, `length` of them if given, each larger than the last if `rising`."""

        def fits(values: list) -> bool:
            positive = all(isinstance(v, (int, float)) and not isinstance(v, bool) and 0 < v < math.inf for v in values)
            right = len(values) == (length or len(values) or 1)
            return positive and right and (not rising or all(a < b for a, b in zip(values, values[1:])))

        wanted = f"a list of {length or ''} positive numbers".replace("  ", " ") + (
            ", each larger than the last" if rising else ""
        )
        return tuple(float(v) for v in self._get(key, list, wanted, fits))

    def share(self, key: str) -> float:
        """Return a number above 0 and up to 1."""
        return float(self._get(key, (int, float), "a share above 0 and up to 1", fits=lambda value: 0 < value <= 1))

    def whole(self, key: str) -> int:
        """Return an integer above 0, which may be written as 8e3."""
        return int(
            self._get(key, (int, float), "a whole number above 0", fits=lambda v: 1 <= v < math.inf and v == int(v))
        )

    def inner(self, key: str) -> Table:
        """Return a table inside of this one."""
        return Table(self.file, self._get(key, dict, "a table", fits=len), f"{self.path}{key}.")

    def inners(self) -> list[tuple[str, Table]]:
        """Return the tables inside this one, by name."""
        return [(key, self.inner(key)) for key, value in sorted(self.entries.items()) if isinstance(value, dict)]

    def only(self, known: Iterable[str]) -> None:
        """Raise HardwareError for an entry that is not `known`, such as one of an older form."""
        wanted = {"source", *known}
        for key in sorted(self.entries.keys() - wanted):
            raise HardwareError(
                f"{self.file}: {self.path}{key} is not known",
                fix=f"leave it out; known are {', '.join(sorted(wanted))}",
            )

    def rows(self, key: str) -> list[Table]:
        """Return the tables of a list that is not empty."""
        rows = self._get(key, list, "a list of tables", fits=lambda v: v and all(isinstance(row, dict) for row in v))
        return [Table(self.file, row, f"{self.path}{key}[{i}].") for i, row in enumerate(rows)]
