"""Parsing of the rewards that agents, evaluators and reward services return.

In: any value. Out: a number, or by name a number or numbers by role. Invariant: every number is finite; a missing reward is None, never
0.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterator, Mapping
from typing import cast

Rewards = Mapping[str, float | Mapping[str, float]]
"""Rewards by name: a number for every role, or numbers by role."""


def rewards_from(value: object) -> Rewards | float | None:
    """Parse a reward as agents and evaluators return it; None: there is none.

    Raises:
        ValueError: it is neither a finite number nor a mapping of names to finite numbers, or to finite numbers by role.
    """
    if isinstance(value, Mapping):
        items = cast("Mapping[object, object]", value).items()
        rewards = {_text(name, "name"): _value(name, given) for name, given in items}
        return {name: given for name, given in rewards.items() if given != {}} or None
    return None if value is None else _finite(value, "the reward")


def entries(rewards: Rewards) -> Iterator[tuple[str, str, float]]:
    """Yield the name, the role (empty: every role) and the number of each reward."""
    for name, given in rewards.items():
        for role, number in given.items() if isinstance(given, Mapping) else [("", given)]:
            yield name, role, number


def total(rewards: Rewards) -> float:
    """Return the sum of all rewards, of every role."""
    return sum(number for _, _, number in entries(rewards))


def _value(name: object, given: object) -> float | Mapping[str, float]:
    if isinstance(given, Mapping):
        by_role = cast("Mapping[object, object]", given).items()
        return {_text(role, "role"): _finite(number, f"reward {name!r} of role {role!r}") for role, number in by_role}
    return _finite(given, f"reward {name!r}")


def _text(text: object, what: str) -> str:
    if not isinstance(text, str) or not text:
        raise ValueError(f"a reward's {what} is {text!r}, not a text")
    return text


def is_finite(value: float) -> bool:
    """Return whether a value is a number that is finite as a float: an integer or a fraction may be beyond every float."""
    try:
        return math.isfinite(value)
    except (OverflowError, TypeError):
        return False


def _finite(value: object, what: str) -> float:
    if isinstance(value, numbers.Real) and is_finite(cast("float", value)):
        return float(value)
    raise ValueError(f"{what} is {value!r:.200}, not a finite number")
