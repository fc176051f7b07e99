"""The agent's side: loaded by OpenTelemetry's entry points, so that an agent's code stays as it is.

In: an agent's own spans. Out: the same spans with their rollout, their process and their order, sent without loss.
Invariant: whatever fails in here, the agent runs on.
"""
