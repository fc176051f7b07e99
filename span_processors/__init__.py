"""Span processors for agents: loaded by OpenTelemetry's entry points, so that an agent's code needs no change.

In: an agent's own spans. Out: the same spans with their rollout, their process and their order, sent without loss.
Invariant: the agent keeps running, whatever fails in here.
"""
