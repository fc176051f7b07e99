"""Rules of gomoku on a board of any size: cells, lines, and the moves that complete one.

In: stones, as cell -> role. Out: cells. Invariant: pure functions; a cell's name is a column's letter and a row's number, `a1` in a corner.
"""

from __future__ import annotations

import string
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

Stones = Mapping[str, str]
"""Role by cell."""
_DIRECTIONS = ((0, 1), (1, 0), (1, 1), (1, -1))


@dataclass(frozen=True)
class Rules:
    """Board of `size` x `size` cells, on which `row` stones in a line win."""

    size: int
    row: int

    @cached_property
    def cells(self) -> tuple[str, ...]:
        """Names of all cells, row by row."""
        return tuple(_name(row, column) for row in range(self.size) for column in range(self.size))

    @cached_property
    def lines(self) -> Mapping[str, tuple[tuple[str, ...], ...]]:
        """Lines of `row` cells that each cell is on."""
        known = set(self.cells)
        lines = [
            tuple(_name(row + down * step, column + right * step) for step in range(self.row))
            for row in range(self.size)
            for column in range(self.size)
            for down, right in _DIRECTIONS
            if column + right * (self.row - 1) >= 0
        ]
        whole = [line for line in lines if known.issuperset(line)]
        return {cell: tuple(line for line in whole if cell in line) for cell in self.cells}

    @cached_property
    def _whole(self) -> frozenset[tuple[str, ...]]:
        return frozenset(line for lines in self.lines.values() for line in lines)

    def free(self, stones: Stones) -> list[str]:
        """Return the cells without a stone, row by row."""
        return [cell for cell in self.cells if cell not in stones]

    def has_won(self, stones: Stones, cell: str) -> bool:
        """Return whether the stone on a cell is part of a whole line of its role."""
        return any(all(stones.get(other) == stones[cell] for other in line) for line in self.lines[cell])

    def longest(self, stones: Stones, role: str) -> int:
        """Return the most stones of a role on a line, of the lines without any other; 0: there is no such line."""
        return max((_count_own(stones, line, role) for line in self._whole), default=0)

    def completing(self, stones: Stones, role: str) -> list[str]:
        """Return the free cells on which a stone of a role would complete a line, row by row."""
        return [cell for cell in self.free(stones) if self.has_won({**stones, cell: role}, cell)]


def _count_own(stones: Stones, line: tuple[str, ...], role: str) -> int:
    count = 0
    for cell in line:
        owner = stones.get(cell)
        if owner == role:
            count += 1
        elif owner is not None:
            return 0
    return count


def _name(row: int, column: int) -> str:
    return f"{string.ascii_lowercase[column]}{row + 1}"


SMALL = Rules(5, 4)
LARGE = Rules(9, 5)
