"""SQL of the policy calls that the gateway forwarded, by backend.

In: conditions. Out: a subquery. Invariant: a call counts once, whatever its choices and deliveries; attributes are read of the rollouts
that a condition over calls finds, which are few, as the table of spans is sorted by rollout.
"""

from __future__ import annotations

from spangrad import semconv


def backend_calls_sql(where: str) -> str:
    """Return a subquery with Timestamp, Duration, Policy and Backend of calls; Backend is empty where the gateway recorded none.

    `where` is a condition over RolloutKey and Timestamp, which calls and spans have alike.
    """
    backend, policy = (f"Attributes['{name}']" for name in (semconv.BACKEND_NAME, semconv.POLICY_NAME))
    return f"""(
        SELECT Timestamp, Duration, {policy} AS Policy, {backend} AS Backend FROM spangrad_internal.rollout_spans FINAL
        WHERE ScopeName = '{semconv.GATEWAY_SCOPE}' AND RowKind = 'span' AND {where}
            AND RolloutKey IN (SELECT RolloutKey FROM spangrad_internal.calls WHERE {where})
    )"""
