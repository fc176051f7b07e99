"""Ratings of a league as the store has them, and their picture.

In: the store. Out: ratings by role and version, a PNG. Invariant: ratings are the trainer's, of which none is computed here.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from spangrad.errors import SpangradError
from spangrad.settings import Settings
from spangrad.store.clickhouse import connect, store_errors

WAIT_SECONDS = 60.0
"""Longest wait for the ratings of the last version, in seconds."""
_QUERY = """
SELECT role, Version, argMax(Metrics['validate_rating_' || role], IngestedAt) AS Points
FROM spangrad.policy_versions ARRAY JOIN {roles:Array(String)} AS role
WHERE Policy = {policy:String} AND mapContains(Metrics, 'validate_rating_' || role)
GROUP BY role, Version ORDER BY role, Version
"""


@dataclass(frozen=True, slots=True)
class Rating:
    """Rating of a version in a role."""

    role: str
    version: int
    points: float


def ratings_of(settings: Settings, roles: Sequence[str]) -> list[Rating]:
    """Return the ratings of the trainer's policy."""
    client = connect(settings.store)
    try:
        with store_errors(client):
            rows = client.query(_QUERY, parameters={"policy": settings.trainer.policy, "roles": list(roles)}).result_rows
    finally:
        client.close()
    return [Rating(str(role), int(version), float(points)) for role, version, points in rows]


def wait_for_ratings(settings: Settings, roles: Sequence[str], versions: Sequence[int]) -> list[Rating]:
    """Return the ratings once they have versions in each role.

    Args:
        settings: of the run.
        roles: names of the roles.
        versions: those that were measured.

    Raises:
        SpangradError: they are not rated after WAIT_SECONDS.
    """
    end = time.monotonic() + WAIT_SECONDS
    while True:
        rated = ratings_of(settings, roles)
        if {(role, version) for role in roles for version in versions} <= {(rating.role, rating.version) for rating in rated}:
            return rated
        if time.monotonic() > end:
            raise SpangradError(f"versions {versions} are not rated after {WAIT_SECONDS:g} s: see train.log.")
        time.sleep(0.5)


def draw(path: Path, rated: Sequence[Rating]) -> None:
    """Draw the ratings by version, a line a role."""
    import matplotlib as mpl

    mpl.use("agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for role in sorted({rating.role for rating in rated}):
        own = [rating for rating in rated if rating.role == role]
        axes.plot([rating.version for rating in own], [rating.points for rating in own], "o-", label=role)
    axes.axhline(0, color="black", linestyle="--", linewidth=1, label="script")
    axes.set(xlabel="version", ylabel="rating (Elo points)", title="league")
    axes.grid(alpha=0.25)
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)
    plt.close(figure)
