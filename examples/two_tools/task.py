"""The task of the two tools: which tool is right depends on the city, and nothing says which but trying.

In: an agent's result. Out: tasks and their reward. The user says "say CITY"; the right answer is "TOOL CITY".
"""

from __future__ import annotations

from collections.abc import Mapping

from spangrad.types import Task

CITIES = ("paris", "rome", "oslo", "lima")
TOOLS = ("weather", "clock")

REWARDS = {"right": 1.0, "wrong_city": 0.0, "gave_up": 0.0, "malformed": -1.0}
"""A reply that is no tool call must cost more than all failed tool calls together, or the policy learns to end early."""


def right_tool(city: str) -> str:
    """The only tool that knows the city."""
    return TOOLS[CITIES.index(city) % len(TOOLS)]


def tasks() -> list[Task]:
    """A task a city."""
    return [Task(city, {"city": city}) for city in CITIES]


def evaluate(given: Mapping[str, str], output: Mapping[str, str]) -> float:
    """The final reward of a rollout, by its outcome."""
    del given
    return REWARDS[output["outcome"]]
