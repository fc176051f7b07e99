"""Environments of OpenEnv's library, unmodified, as environments with reset and step.

In: an object of a class of OpenEnv's `Environment`. Out: observations as objects, without reward and done. Invariant: OpenEnv's package is
never imported here; what is needed of it comes with the object.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Callable, Mapping
from typing import Any, cast

from spangrad.episode.adapters.schema_actions import UnusableReply, described, fields_of_text, instruction
from spangrad.episode.environment import StepResult
from spangrad.errors import EnvironmentsError

PACKAGE = "openenv"
"""Package that such a class descends from."""


class OpenEnvEnvironment:
    """An environment of OpenEnv's library."""

    def __init__(self, environment: Any) -> None:
        """Store the environment.

        Raises:
            EnvironmentsError: its step names no class of actions.
        """
        self._environment = environment
        self._action_class = action_class_of(type(environment))
        self._schema: dict[str, Any] = self._action_class.model_json_schema()
        self.system_prompt = described(inspect.getdoc(type(environment)) or "", self._schema)
        self.schemas = {"action": self._schema}

    @property
    def state(self) -> Any:
        """State of the environment."""
        return self._environment.state

    def reset(self, task: Any) -> Any:
        """Begin an episode; the fields of the task are the arguments of the environment's reset."""
        values = cast("dict[str, Any]", task) if isinstance(task, dict) else {} if task is None else {"task": task}
        method = self._method("reset")
        observation = method(**_accepted(method, values))
        return _then(observation, lambda value: _fields(value))

    def step(self, action: Any) -> Any:
        """Apply an action."""
        if isinstance(action, UnusableReply):
            return action.result()
        return _then(self._method("step")(action), _result)

    def parse(self, text: str) -> Any:
        """Return the action that a reply means."""
        fields = fields_of_text(self._schema, text)
        try:
            return fields if isinstance(fields, UnusableReply) else self.decode(fields)
        except ValueError:  # of pydantic
            return UnusableReply(instruction(self._schema))

    def decode(self, fields: Mapping[str, Any]) -> Any:
        """Return the action that has these fields."""
        return self._action_class.model_validate(dict(fields))

    def close(self) -> None:
        """Release the environment."""
        if (close := getattr(self._environment, "close", None)) is not None:
            close()

    def _method(self, name: str) -> Callable[..., Any]:
        """Return a method: the async one where the class has its own."""
        kind = type(self._environment)
        own = next((base for base in kind.__mro__ if f"{name}_async" in vars(base)), None)
        is_own = own is not None and own.__module__.split(".")[0] != PACKAGE
        return getattr(self._environment, f"{name}_async" if is_own else name)


def action_class_of(kind: type) -> Any:
    """Return the class of actions of a class of environments: that of its step's argument, or of its generic base.

    Raises:
        EnvironmentsError: neither names one.
    """
    try:
        hints = [hint for name, hint in typing.get_type_hints(kind.step).items() if name != "return"]  # type: ignore[attr-defined]
    except (NameError, TypeError):
        hints = []
    generics = [argument for base in getattr(kind, "__orig_bases__", ()) for argument in typing.get_args(base)]
    for hint in (*hints[:1], *generics):
        for candidate in typing.get_args(hint) or (hint,):
            if hasattr(candidate, "model_validate"):
                return candidate
    raise EnvironmentsError(f"{kind.__name__}.step names no class of actions. Annotate its argument, as OpenEnv's examples do.")


def _accepted(method: Callable[..., Any], values: Mapping[str, Any]) -> dict[str, Any]:
    parameters = inspect.signature(method).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return dict(values)
    return {name: value for name, value in values.items() if name in parameters}


def _fields(observation: Any) -> dict[str, Any]:
    return observation.model_dump(exclude={"reward", "done", "metadata"})


def _result(observation: Any) -> StepResult:
    reward = None if observation.reward is None else float(observation.reward)
    return StepResult(_fields(observation), reward, bool(observation.done), dict(getattr(observation, "metadata", None) or {}))


def _then(value: Any, convert: Callable[[Any], Any]) -> Any:
    """Return a value converted, at once or when it is there."""
    if not inspect.isawaitable(value):
        return convert(value)

    async def later() -> Any:
        return convert(await value)

    return later()
