"""Rewards as agents, evaluators and reward services give them.

In: any value. Out: a number, or numbers by name. Invariant: what comes out is finite; what says nothing comes out as None, never as 0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Mapping
from typing import cast


def rewards_from(value: object) -> Mapping[str, float] | float | None:
    """Read a reward as agents and evaluators give it; None is none.

    Raises:
        ValueError: it is neither a finite number nor a mapping of names to finite numbers.
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        return {_name(name): _finite(one, f"reward {name!r}") for name, one in items} or None
    return None if value is None else _finite(value, "the reward")


def _name(name: object) -> str:
    if not isinstance(name, str) or not name:
        raise ValueError(f"a reward's name is {name!r}, not a text")
    return name


def _finite(value: object, what: str) -> float:
    if not isinstance(value, numbers.Real) or not math.isfinite(value):
        raise ValueError(f"{what} is {value!r:.200}, not a finite number")
    return float(value)
