"""Places of ledgers, by name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

Place = Callable[..., Path | str]
"""Function of a name that returns the directory or database of a ledger: the same one at each call."""
