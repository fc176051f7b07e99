"""Texts of the terminal view: what the page's read models return, as lines and cells.

In: plain values of the read models. Out: texts. Invariant: what agents and models wrote is shown as text: no control character, and none
that reorders or hides others, reaches the terminal.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

COLUMNS = ("Rollout", "Run", "Task", "Outcome", "Return", "Calls", "Drops", "Failed tools", "Versions", "Trained", "Built (UTC)")
"""Columns of the list of rollouts."""
WIDEST = 36
"""Largest width of a cell, in characters."""
_HIDDEN = re.compile(
    "[\x00-\x1f\x7f-\x9f\xad\u061c\u180e\u200b-\u200f\u2028-\u202e\u2060-\u2069\ud800-\udfff\ufeff\ufff9-\ufffb\U000e0000-\U000e007f]"
)


def visible(text: str) -> str:
    """Return a text in which controls, and characters that change the place of others, are their numbers."""
    return _HIDDEN.sub(lambda match: f"⟨U+{ord(match[0]):04X}⟩", text)


def row_cells(row: Mapping[str, Any]) -> list[str]:
    """Return the cells of a rollout, in the order of `COLUMNS`."""
    trained = ", ".join(f"{policy}@{version}" for policy, _, version in row["Trained"])
    built = datetime.fromtimestamp(row["BuiltUs"] / 1e6, UTC).strftime("%m-%d %H:%M:%S")
    counts = (row["Calls"], row["Drops"], f"{row['FailedToolCalls']} of {row['ToolCalls']}")
    names = (row["RolloutId"], row["RunId"], row["TaskId"], row["Outcome"])
    versions = ", ".join(map(str, row["PolicyVersions"]))
    return [_cut(str(value)) for value in (*names, _returned(row), *counts, versions, trained, built)]


def service_lines(overview: Mapping[str, Any]) -> str:
    """Return the services, each with whether it answers."""
    return "\n".join(visible(f"{'●' if row['answers'] else '○'} {row['name']} {row['detail']}".rstrip()) for row in overview["services"])


def rollout_lines(overview: Mapping[str, Any]) -> str:
    """Return counts of the last hour."""
    rollouts = overview["rollouts"]
    built = rollouts["Built"]
    share = _percent(rollouts["Succeeded"], built) if built else "-"
    mean = _number(rollouts["Mean"]) if built else "-"
    age = _seconds((rollouts["NowMs"] - rollouts["LastMs"]) / 1000) if built else "-"
    return f"built {built:,}, {share} succeeded\nmean return {mean}\nlast build {age} ago\n{rollouts['Waiting']:,} ended, not built yet"


def drop_lines(overview: Mapping[str, Any]) -> str:
    """Return the most frequent drop reasons of a day."""
    return "\n".join(f"{drop['Count']:,} {visible(drop['Reason'])}" for drop in overview["drops"][:4]) or "none"


def version_lines(overview: Mapping[str, Any]) -> str:
    """Return the newest version, and the metrics of its step."""
    newest = overview["newest"]
    if newest is None:
        return "none"
    metrics = overview["steps"][-1]["Metrics"] if overview["steps"] else {}
    shown = {"return": "mean_return", "success": "success", "staleness": "staleness_mean", "logprob gap p99": "logprob_gap_p99"}
    lines = [f"{label} {_number(metrics[name])}" for label, name in shown.items() if name in metrics]
    return "\n".join([visible(f"{newest['Policy']}@{newest['Newest']}, branch {newest['Branch']}"), *lines])


def returns(overview: Mapping[str, Any]) -> list[float]:
    """Return the mean returns of the newest steps, oldest first, without those that are no numbers: the curve draws none."""
    means = (step["Metrics"].get("mean_return", math.nan) for step in overview["steps"])
    return [mean for mean in means if math.isfinite(mean)]


def _cut(text: str) -> str:
    shown = visible(text)
    return shown if len(shown) <= WIDEST else f"{shown[: WIDEST - 1]}…"


def _returned(row: Mapping[str, Any]) -> str:
    roles = row["ReturnsByRole"] if row["Return"] is None else {}
    return ", ".join(f"{role} {_number(value)}" for role, value in roles.items()) or _number(row["Return"])


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _percent(part: int, whole: int) -> str:
    """Return a share as the page does: 0 and 100 are none and all, never almost."""
    rounded = round(100 * part / whole)
    if rounded == 0 and part > 0:
        return "< 1 %"
    return "> 99 %" if rounded == 100 and part < whole else f"{rounded} %"


def _seconds(seconds: float) -> str:
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(seconds, 0):.0f} s"
