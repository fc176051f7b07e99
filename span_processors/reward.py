"""Rewards that the agent itself gives: the only module that an agent may import from here.

In: a number. Out: an event `gen_ai.evaluation.result` on the current span, and a note for the process's agent host, if it has one.
"""

from __future__ import annotations

from opentelemetry import trace

from spangrad.agent.attempt import note_reward
from spangrad.agent.reward_values import is_finite
from spangrad.semconv import EVALUATION_EVENT, EVALUATION_NAME, EVALUATION_SCORE, REWARD_NAME, REWARD_ROLE


def reward(value: float, name: str = REWARD_NAME, *, role: str = "") -> None:
    """Reward the agent's last action, on the current span, or on a short span of its own when none is being recorded.

    An agent that is a Python callable, and has no evaluator, may then return None. A program's last line must still be its reward.

    Args:
        value: a finite number.
        name: the reward's dimension.
        role: agent or policy that the reward belongs to, where there are several (`trainer.credit.reward_roles`). Empty: every role.

    Raises:
        ValueError: the value is not a finite number, or the name is empty.
    """
    if not is_finite(value):
        raise ValueError(f"reward {name!r} is {value!r:.200}: give a finite number, or none at all")
    if not name:
        raise ValueError(f"the reward of {value!r} has an empty name: give its dimension")
    attributes = {EVALUATION_NAME: name, EVALUATION_SCORE: float(value), **({REWARD_ROLE: role} if role else {})}
    span = trace.get_current_span()
    if span.is_recording():
        span.add_event(EVALUATION_EVENT, attributes)
        note_reward()
    else:
        with trace.get_tracer(__name__).start_as_current_span("reward") as own:
            own.add_event(EVALUATION_EVENT, attributes)
            if own.is_recording():
                note_reward()
