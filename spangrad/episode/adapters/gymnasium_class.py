"""Environments of Gymnasium as environments with reset and step.

In: an object with Gymnasium's reset and step (five values). Out: observations as JSON. Invariant: neither Gymnasium nor numpy is imported
before an environment is made by its id.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from spangrad.episode.adapters.schema_actions import UnusableReply
from spangrad.episode.environment import StepResult
from spangrad.errors import JSON_ERRORS, EnvironmentsError

PACKAGE = "gymnasium"
"""Package that such a class descends from."""
_TASK_ARGUMENTS = ("seed", "options")


class GymnasiumEnvironment:
    """An environment of Gymnasium."""

    def __init__(self, environment: Any) -> None:
        self._environment = environment
        self._space = environment.action_space
        self.system_prompt = f"Each observation is JSON. {self._instruction}"

    @classmethod
    def make(cls, name: str) -> GymnasiumEnvironment:
        """Make an environment by its id.

        Raises:
            EnvironmentsError: Gymnasium is not installed, or knows no such id.
        """
        try:
            import gymnasium  # pyright: ignore[reportMissingImports]  # the user's, not ours
        except ModuleNotFoundError as error:
            raise EnvironmentsError(f"gymnasium:{name} needs Gymnasium ({error}): pip install gymnasium.") from error
        try:
            return cls(gymnasium.make(name))
        except gymnasium.error.Error as error:
            raise EnvironmentsError(f"gymnasium:{name} cannot be made: {error}") from error

    def reset(self, task: Any) -> Any:
        """Begin an episode; a task may have `seed` and `options`, a number is a seed."""
        values = cast("dict[str, Any]", task) if isinstance(task, dict) else {"seed": task} if isinstance(task, int) else {}
        observation, _ = self._environment.reset(**{name: values[name] for name in _TASK_ARGUMENTS if name in values})
        return plain(observation)

    def step(self, action: Any) -> StepResult:
        """Apply an action; `truncated` is among the further facts."""
        if isinstance(action, UnusableReply):
            return action.result()
        observation, reward, terminated, truncated, info = self._environment.step(action)
        facts = {**plain(info), "truncated": bool(truncated)}
        return StepResult(plain(observation), float(reward), bool(terminated or truncated), facts)

    def parse(self, text: str) -> Any:
        """Return the action that a reply means."""
        try:
            value = json.loads(text)
        except JSON_ERRORS:
            value = text
        return self._fitting(value, text)

    def decode(self, fields: Mapping[str, Any]) -> Any:
        """Return the action of a message: `value`, or all fields."""
        value = fields["value"] if set(fields) == {"value"} else dict(fields)
        action = self._fitting(value, "")
        if isinstance(action, UnusableReply):
            raise ValueError(action.remedy)
        return action

    def close(self) -> None:
        """Release the environment."""
        self._environment.close()

    @property
    def _instruction(self) -> str:
        return f"Reply with an action as JSON, of the space {self._space}."

    def _fitting(self, value: Any, text: str) -> Any:
        dtype = getattr(self._space, "dtype", None)
        candidates = [value, text]
        if dtype is not None and isinstance(value, (int, float, list)):
            import numpy  # Gymnasium has it

            try:
                array = numpy.asarray(value, dtype)
            except (OverflowError, TypeError, ValueError):
                array = None
            if array is None or (array.dtype.kind in "iu" and not numpy.array_equal(array, value)):  # 1.9 is not 1
                candidates = [text]  # the space has no such value, and may still contain it as a list, or raise the same
            else:
                candidates.insert(0, array)
                if isinstance(value, int) and getattr(self._space, "shape", None) == ():
                    candidates.insert(0, value)
        for candidate in candidates:
            if self._space.contains(candidate):
                return candidate
        return UnusableReply(self._instruction)


def plain(value: Any) -> Any:
    """Return a value as JSON has it: arrays as lists, tuples as lists, other objects as their text."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if hasattr(value, "tolist"):
        return value.tolist()
    if isinstance(value, Mapping):
        return {str(name): plain(item) for name, item in cast("Mapping[object, Any]", value).items()}
    if isinstance(value, Sequence):
        return [plain(item) for item in cast("Sequence[Any]", value)]
    return str(value)
