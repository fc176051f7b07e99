"""SQL of rollouts for readers who go through them page by page or look again and again: revisions, the newest of some, what waits.

In: conditions. Out: subqueries. Invariant: the newest revision of a rollout is the row that `spangrad.rollouts` has of it; unlike
that view, these read only what a condition names.
"""

from __future__ import annotations

from spangrad.store.datasets import KEY

_OF_ROLLOUT = ", ".join(KEY)


def revisions_sql(*, once: bool = False) -> str:
    """Return a subquery with every revision of every rollout: the columns of the builder's row, BuildId, Outcome, Return, ReturnsByRole.

    With `once` a revision that was written twice is one row, which costs more.
    """
    outcome = "if(Failure = '', 'succeeded', Failure) AS Outcome"
    return f"(SELECT *, BuildId, Return, ReturnsByRole, {outcome} FROM spangrad_internal.builds{' FINAL' if once else ''})"


def last_built_sql() -> str:
    """Return a subquery with BuiltAt of the revision that was built last; without a row where none was."""
    # Not max(): in this form the index of times is used.
    return "(SELECT IngestedAt AS BuiltAt FROM spangrad_internal.builds ORDER BY IngestedAt DESC LIMIT 1)"


def newest_revisions_sql(where: str = "true") -> str:
    """Return a subquery with BuildId and BuiltAt of each rollout's newest revision.

    `where` is a condition over KEY or Mode, to read less; over IngestedAt, for the newest of a time.
    """
    newest = "argMax((BuildId, IngestedAt), Precedence) AS newest"
    grouped = f"SELECT {newest} FROM spangrad_internal.builds WHERE {where} GROUP BY {_OF_ROLLOUT}"
    return f"(SELECT newest.1 AS BuildId, newest.2 AS BuiltAt FROM ({grouped}))"


def trained_versions_sql(where: str) -> str:
    """Return a subquery with KEY and Trained: (Policy, Branch, Version) of the versions that a rollout trained, by a condition over KEY."""
    trained = "groupUniqArray((Policy, Branch, Version)) AS Trained"
    return f"(SELECT {_OF_ROLLOUT}, {trained} FROM spangrad_internal.batches WHERE {where} GROUP BY {_OF_ROLLOUT})"


def arrived_drops_sql(where: str) -> str:
    """Return a subquery with the drops of every revision, by a condition over their columns: how many arrived, not how many count."""
    return f"(SELECT * FROM spangrad_internal.drops WHERE {where})"


def untrained_sql() -> str:
    """Return a query of the number of rollouts of mode train of {run:String} that were built within a day, and are not trained.

    It looks at first revisions, so that those which were trained were trained since.
    """
    recent = "RunId = {run:String} AND IngestedAt > now64(6) - INTERVAL 1 DAY"
    trained = f"SELECT RolloutId FROM spangrad_internal.batches WHERE {recent}"
    built = f"{recent} AND Mode = 'train' AND Revision = 0 AND RolloutId NOT IN ({trained})"
    return f"SELECT uniqExact(RolloutId) FROM spangrad_internal.builds WHERE {built}"


def ended_rollouts_sql(where: str) -> str:
    """Return a subquery with RolloutId and Timestamp of final root spans, by a condition over their columns; one may be there twice."""
    return f"(SELECT RolloutId, Timestamp FROM spangrad_internal.attempts WHERE Final AND {where})"
