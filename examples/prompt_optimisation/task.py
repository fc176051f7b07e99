"""Questions for a date, and what an answer is worth: half for the ISO form, half for saying nothing else."""

from __future__ import annotations

import random
import re
from datetime import date, timedelta
from typing import Any

FIRST_PROMPT = "You read dates."
_ISO = re.compile(r"\d{4}-\d{2}-\d{2}")


def tasks(seed: int, count: int) -> list[dict[str, Any]]:
    """So many tasks, each of another day."""
    rng = random.Random(seed)
    days = rng.sample(range(10_000), count)
    return [_task(number, date(2000, 1, 1) + timedelta(days=day)) for number, day in enumerate(days)]


def score(given: dict[str, Any], output: object) -> float:
    """The reward of an answer."""
    text = str(output).strip()
    dates = _ISO.findall(text)
    return 0.5 * (dates == [given["date"]]) + 0.5 * (len(text.split()) == 1)


def _task(number: int, day: date) -> dict[str, Any]:
    spelled = f"{day:%B} {day.day}, {day.year}"
    return {"task_id": f"day-{number}", "input": {"question": f"The parcel came on {spelled}. When did it come?", "date": day.isoformat()}}
