"""The runner: puts tasks to an agent, many times over, and says in one root span per attempt how each went.

In: tasks and an agent that knows nothing of all this. Out: root spans with rewards, and outcomes for the caller.
Invariant: every attempt that was begun has one root span; a failing agent is data, never a stopped run.
"""
