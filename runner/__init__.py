"""The runner: runs an agent on tasks, many rollouts of each, and writes one root span per attempt.

Invariant: every attempt that began has one root span; a failing agent is recorded as data and never stops the run.
"""
