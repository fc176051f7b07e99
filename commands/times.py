"""Points in time as options of commands give them.

In: text. Out: a time in UTC. Invariant: a text that is no time, or is out of a calendar's range, is an error that names its option.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime, timedelta

from spangrad.errors import SettingsError

_AGE = re.compile(r"(\d+)([smhdw])")
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parse_time(option: str, text: str) -> datetime:
    """Return a point in time that is given as ISO 8601; in UTC if it has no time zone.

    Raises:
        SettingsError: the text is none.
    """
    try:
        time = datetime.fromisoformat(text)
        return time.astimezone(UTC) if time.tzinfo else time.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        raise SettingsError(f"{option} {text!r} is no time. Write 2026-01-31, or 2026-01-31T12:00+00:00.") from None


def parse_time_or_age(option: str, text: str, now: datetime) -> datetime:
    """Return a point in time that is given as for `parse_time`, or as a duration before `now` such as 7d, 12h or 30m.

    Raises:
        SettingsError: the text is neither, or the duration is longer than the calendar.
    """
    age = _AGE.fullmatch(text)
    if age is None:
        try:
            return parse_time(option, text)
        except SettingsError as error:
            raise SettingsError(f"{error} Or 7d, 12h or 30m for how long ago (s, m, h, d or w).") from None
    try:
        return now - timedelta(**{_UNITS[age[2]]: int(age[1])})
    except (ValueError, OverflowError):  # ValueError: more digits than Python reads
        raise SettingsError(f"{option} {text!r:.40} is before the year 1. Write 7d, 12h or 30m for how long ago.") from None
