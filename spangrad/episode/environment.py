"""Environments with reset and step: the protocol that users implement, and calls of it, plain or async.

In: an object with `reset(task)` and `step(action)`. Out: observations, and results of steps whose fields are checked. Invariant: a plain
method runs in one thread of its own, the same for every call; an object without an optional member behaves as if it had the default.

Only the standard library: agents' processes import this.
"""

from __future__ import annotations

import asyncio
import inspect
import json
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Protocol, Self, TypeGuard, cast

from spangrad.agent.reward_values import is_finite
from spangrad.episode.user_calls import thread_call, user_call
from spangrad.errors import EnvironmentsError

Content = str | list[dict[str, Any]]
"""Content of a message: text, or parts as OpenAI's API has them."""


@dataclass(frozen=True, slots=True)
class StepResult:
    """Result of an action."""

    observation: Any
    """Observation that follows: text, a list of content parts, or any JSON."""
    reward: float | None = None
    """Reward of the action. None: it has none."""
    done: bool = False
    """True if the episode has ended."""
    info: Mapping[str, Any] = field(default_factory=dict[str, Any])
    """Further facts, as JSON; the model does not see them."""


@dataclass(frozen=True, slots=True)
class ToolAction:
    """Action of a model that calls a tool, in environments with `tools`."""

    name: str
    arguments: Mapping[str, Any]


class Environment(Protocol):
    """World in which a model acts, a step at a time; each method may be async.

    Optional members: `system_prompt` (text), `tools` (a list of tools as OpenAI's API has them; actions are then `ToolAction`),
    `parse(text)` (the action that a reply means; default: the text), `render(observation)` (content of the message that shows an
    observation; default: text as it is, else JSON) and `close()`. With `roles` there are several players:
    `acting()` returns whose turn it is, `reset` and `step` take and return values by role, `system_prompt(role)` may be a role's own, and
    an optional `forfeit(role)` returns what `step` does, where a player gave no reply in time.
    """

    def reset(self, task: Any) -> Any:
        """Begin an episode; return the first observation."""
        ...

    def step(self, action: Any) -> Any:
        """Apply an action; return a `StepResult`."""
        ...


def is_environment(value: object) -> TypeGuard[Environment]:
    """Return whether a value has reset and step."""
    return callable(getattr(value, "reset", None)) and callable(getattr(value, "step", None))


def is_environment_class(value: object) -> TypeGuard[Callable[[], Environment]]:
    """Return whether a value is a class whose objects are environments."""
    return isinstance(value, type) and is_environment(value)


class EnvironmentCalls:
    """Calls of one environment.

    Each raises EnvironmentsError where the environment returned what the protocol does not allow, such as an infinite reward.
    """

    def __init__(self, environment: Environment, thread: ThreadPoolExecutor | None = None) -> None:
        """Store an environment; `thread` is the pool of one thread in which it was created, None: any thread.

        Raises:
            EnvironmentsError: it lacks a method.
        """
        self.name = type(environment).__name__
        if not is_environment(environment):
            lacking = " and ".join(name for name in ("reset", "step") if not callable(getattr(environment, name, None)))
            raise EnvironmentsError(f"{self.name} is no environment: it lacks {lacking}. Write reset(task) and step(action).")
        self._environment = environment
        self._thread = thread or ThreadPoolExecutor(1, "environment")

    @classmethod
    async def create(cls, factory: Callable[[], Environment]) -> Self:
        """Create an environment in the thread in which its methods run.

        Raises:
            EnvironmentsError: what the factory returns lacks a method.
        """
        thread = ThreadPoolExecutor(1, "environment")
        created = thread.submit(thread_call(factory))
        try:
            return cls(await asyncio.wrap_future(created), thread)
        except BaseException:
            created.add_done_callback(_close_unused)  # a factory that waits for a server cannot be stopped
            thread.shutdown(wait=False)
            raise

    @property
    def tools(self) -> Sequence[Mapping[str, Any]]:
        """Tools as OpenAI's API has them; empty: actions are text."""
        return checked_list(f"{self.name}.tools", member(self._environment, "tools"))

    @property
    def roles(self) -> Sequence[str]:
        """Roles of the players; empty: there is one player, without a role."""
        return checked_list(f"{self.name}.roles", member(self._environment, "roles"))

    @property
    def system_prompt(self) -> str | None:
        """Text of the system message. None: there is none."""
        return member(self._environment, "system_prompt")

    async def system_prompt_of(self, role: str) -> str | None:
        """Return the text of a role's system message. None: there is none."""
        return await prompt_of(self._environment, role, self._call)

    async def acting(self) -> Sequence[str]:
        """Return the roles whose turn it is."""
        return checked_turn(self.name, await self._call(acting_of(self._environment)), self.roles)

    async def step_together(self, actions: Mapping[str, object]) -> Mapping[str, StepResult]:
        """Apply the actions of several roles at once; return the results by role."""
        return checked_by_role(f"{self.name}.step", await self._call(self._environment.step, actions), self.roles)

    async def forfeit(self, role: str) -> Mapping[str, StepResult] | None:
        """Have a role forfeit; return the results by role. None: the environment has no rule for that."""
        forfeit = getattr(self._environment, "forfeit", None)
        return None if forfeit is None else checked_by_role(f"{self.name}.forfeit", await self._call(forfeit, role), self.roles)

    async def reset(self, task: object) -> Any:
        """Begin an episode; return the first observation."""
        return await self._call(self._environment.reset, task)

    async def step(self, action: object) -> StepResult:
        """Apply an action."""
        return checked_result(f"{self.name}.step", await self._call(self._environment.step, action))

    async def parse(self, text: str) -> Any:
        """Return the action that a reply means."""
        parse = getattr(self._environment, "parse", None)
        return text if parse is None else await self._call(parse, text)

    async def render(self, observation: object) -> Content:
        """Return the content of the message that shows an observation."""
        render = getattr(self._environment, "render", None)
        return rendered(observation) if render is None else await self._call(render, observation)

    async def aclose(self) -> None:
        """Release the environment; `close()` is called where it has one."""
        close = getattr(self._environment, "close", None)
        try:
            if close is not None:
                await self._call(close)
        finally:
            self._thread.shutdown(wait=False)

    async def _call(self, method: Callable[..., Any], *arguments: object) -> Any:
        return await user_call(self._thread, method, *arguments)


def checked_result(method: str, result: object) -> StepResult:
    """Return what a step returned; `method` is its name, after that of its class.

    Raises:
        EnvironmentsError: it is no `StepResult`, or its reward is not finite, or its end a text.
    """
    if not isinstance(result, StepResult):
        kind = type(result).__name__
        raise EnvironmentsError(f"{method} returned {kind}, not a StepResult. Return StepResult(observation, reward, done).")
    if result.reward is not None and not is_finite(result.reward):
        raise EnvironmentsError(f"{method} returned the reward {result.reward!r:.200}. Return a finite number, or None.")
    done = cast("object", result.done)
    if isinstance(done, str):  # "false" is true
        raise EnvironmentsError(f"{method} returned done={done!r:.200}. Return True or False.")
    return result


def checked_by_role(method: str, results: object, roles: Sequence[str]) -> Mapping[str, StepResult]:
    """Return what a step of several players returned, by role; arguments and errors as of `checked_result`."""
    by_role = _checked_roles(method, results, roles, "a StepResult by role")
    return {role: checked_result(method, result) for role, result in by_role.items()}


def checked_observations(name: str, observations: object, roles: Sequence[str]) -> Mapping[str, object]:
    """Return what a reset of several players returned, by role; `name` is that of the environment's class.

    Raises:
        EnvironmentsError: it is not by role.
    """
    return _checked_roles(f"{name}.reset", observations, roles, "what each role observes, by role")


def _checked_roles(method: str, value: object, roles: Sequence[str], form: str) -> Mapping[str, object]:
    by_role = cast("Mapping[str, object]", value) if isinstance(value, Mapping) else {}
    if not isinstance(value, Mapping) or not by_role.keys() <= set(roles):
        returned = f"values of {', '.join(map(str, by_role))}" if by_role else type(value).__name__
        raise EnvironmentsError(f"{method} returned {returned}. Return {form}, of {', '.join(roles)}.")
    return by_role


def checked_list(name: str, value: Any) -> Sequence[Any]:
    """Return an optional member that is a list; empty where it is None.

    Raises:
        EnvironmentsError: it is a text, an object by name, or no collection.
    """
    if value is None:
        return ()
    if isinstance(value, str | Mapping) or not isinstance(value, Iterable):
        raise EnvironmentsError(f"{name} is {value!r:.200}, not a list. Write {name.rpartition('.')[2]} = [...].")
    return tuple(cast("Iterable[Any]", value))


def checked_turn(name: str, acting: Any, roles: Sequence[str]) -> Sequence[str]:
    """Return the roles whose turn it is; `acting` is what the method of that name returned, a role or several, `name` that of its class.

    Raises:
        EnvironmentsError: they are no roles of it.
    """
    turn = (acting,) if isinstance(acting, str) else tuple(acting) if isinstance(acting, Iterable) else ()
    if not turn or not set(turn) <= set(roles):
        raise EnvironmentsError(f"{name}.acting returned {acting!r}. Return one or several of {', '.join(roles)}.")
    return turn


def member(environment: Environment, name: str) -> Any:
    """Return an optional member of an environment, called where it is a method; None: it has none."""
    value = getattr(environment, name, None)
    return value() if callable(value) else value


def acting_of(environment: Environment) -> Callable[[], Any]:
    """Return the method of an environment with roles that names whose turn it is.

    Raises:
        EnvironmentsError: it has none.
    """
    acting = getattr(environment, "acting", None)
    if not callable(acting):
        raise EnvironmentsError(f"{type(environment).__name__} has roles, but no method acting. Write acting().")
    return acting


async def prompt_of(environment: Environment, role: str, call: Callable[..., Awaitable[Any]]) -> Any:
    """Return the text of a role's system message; a method that gives it is called by `call`. None: there is none."""
    prompt: Any = getattr(environment, "system_prompt", None)
    return await call(prompt, role) if callable(prompt) else prompt


def rendered(observation: object) -> Content:
    """Return an observation as the content of a message: text and content parts as they are, anything else as JSON.

    Raises:
        EnvironmentsError: it is neither.
    """
    if isinstance(observation, str) or _are_parts(observation):
        return observation
    try:
        return json.dumps(observation, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise EnvironmentsError(f"an observation is no JSON ({error}). Return text or JSON, or write render(observation).") from error


def as_text(content: Content) -> str:
    """Return the text that a span holds of a message's content: a span with half of a surrogate pair could not be exported."""
    text = content if isinstance(content, str) else json.dumps(content, ensure_ascii=False)
    return text.encode(errors="replace").decode()


def _close_unused(created: Future[Environment]) -> None:
    """Release an environment whose user has not waited for it."""
    if created.cancelled() or created.exception() is not None:
        return
    close = getattr(created.result(), "close", None)
    if close is not None and not inspect.iscoroutinefunction(close):
        close()


def _are_parts(value: object) -> TypeGuard[list[dict[str, Any]]]:
    parts = cast("list[object]", value) if isinstance(value, list) else []
    return bool(parts) and all(isinstance(part, dict) and isinstance(cast("dict[str, Any]", part).get("type"), str) for part in parts)
