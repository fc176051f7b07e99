"""Messages of OpenEnv's protocol, version 0.10: JSON objects over a WebSocket.

In: requests of clients. Out: responses. Invariant: clients of OpenEnv read each response; what is ours beyond it (`reset`, `step` and
`traceparent` of a request, keys of metadata) is optional.

Source: https://github.com/huggingface/OpenEnv, src/openenv/core/env_server.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Generic, TypeVar

import msgspec
from msgspec import Meta

from spangrad.episode.environment import StepResult
from spangrad.episode.openenv_fields import observation_fields
from spangrad.errors import JSON_ERRORS

_Response = TypeVar("_Response")


class ErrorCode(StrEnum):
    """Code of an error response."""

    INVALID_JSON = "INVALID_JSON"
    UNKNOWN_TYPE = "UNKNOWN_TYPE"
    VALIDATION_ERROR = "VALIDATION_ERROR"
    """The message is not as its type must be, or comes at the wrong time."""
    EXECUTION_ERROR = "EXECUTION_ERROR"
    """The environment raised an exception, or did not return in time."""
    CAPACITY_REACHED = "CAPACITY_REACHED"
    """No further session fits; the client may try again."""
    FACTORY_ERROR = "FACTORY_ERROR"
    """No environment could be created."""
    SESSION_ERROR = "SESSION_ERROR"
    """The session does not exist, or has ended with its state."""


class SessionRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Request of a client, of any type."""

    type: str
    data: dict[str, Any] | None = None
    """Data of a reset: seed, episode_id, and the task's own fields; of a step: the action."""
    reset: Annotated[int, Meta(ge=1)] | None = None
    """Number of the reset in its session, above that of the one before: the last number again is answered as before, and resets nothing.
    None: the next one."""
    step: Annotated[int, Meta(ge=1)] | None = None
    """Number of the step in its episode, from 1: a number that was played already is answered as before, and not played again. None: the
    next one."""
    request_id: str | None = None
    """Name of the reset or the step, for the same purpose."""
    traceparent: str | None = None
    """Span that the step belongs to. None: that of the session's first request."""


class SessionOpening(msgspec.Struct, frozen=True, kw_only=True):
    """Request for a session's environment."""

    carrier: dict[str, str] = {}
    """`traceparent` and `baggage` of the session's first request."""
    client_rewards: bool = False
    """True if the client records the rewards in its own spans."""


_decode = msgspec.json.Decoder(SessionRequest).decode


class SessionError(Exception):
    """Refusal of a request, with its code."""

    def __init__(self, code: ErrorCode, message: str, **facts: object) -> None:
        """Keep the code and the facts that the response repeats."""
        super().__init__(message)
        self.code = code
        self.facts = facts

    def encode(self) -> bytes:
        """Return the response."""
        return encode("error", {"message": str(self), "code": self.code, **self.facts})


class LastReset(Generic[_Response]):
    """Last reset of a session or a player, and its response."""

    def __init__(self) -> None:
        self._number = 0
        self._name: str | None = None
        self._response: _Response | None = None

    def response_to(self, request: SessionRequest) -> _Response | None:
        """Return the response of before, if a request is the last reset again. None: it is another one.

        Raises:
            SessionError: a later reset has followed it.
        """
        if request.reset == self._number or (request.request_id is not None and request.request_id == self._name):
            return self._response
        if request.reset is not None and request.reset < self._number:
            sentence = f"reset {request.reset} was followed by reset {self._number}, and cannot be repeated. Send a higher number"
            raise SessionError(ErrorCode.VALIDATION_ERROR, sentence)
        return None

    def note(self, request: SessionRequest, response: _Response) -> None:
        """Keep a response."""
        self._number = request.reset or self._number + 1
        self._name, self._response = request.request_id, response


def decoded(payload: bytes) -> SessionRequest:
    """Return the request that a client sent.

    Raises:
        SessionError: it is no JSON, or not as a request must be.
    """
    try:
        return _decode(payload)
    except msgspec.ValidationError as error:
        raise SessionError(ErrorCode.VALIDATION_ERROR, f"Invalid message: {error}") from None
    except JSON_ERRORS as error:
        raise SessionError(ErrorCode.INVALID_JSON, f"Invalid JSON: {error}") from None


def encode(kind: str, data: object) -> bytes:
    """Encode a response.

    Raises:
        TypeError: the data hold an object that is not JSON.
    """
    return msgspec.json.encode({"type": kind, "data": data}, enc_hook=_plain)


def observation_message(result: StepResult, metadata: dict[str, Any]) -> bytes:
    """Encode what follows a reset or a step."""
    data: dict[str, Any] = {"observation": observation_fields(result.observation), "reward": result.reward, "done": result.done}
    if metadata:
        data["metadata"] = metadata
    return encode("observation", data)


def _plain(value: Any) -> Any:
    """Return an object of another library as JSON has it: arrays and scalars of numpy, models of pydantic."""
    for method in ("tolist", "model_dump"):
        if (convert := getattr(value, method, None)) is not None:
            return convert()
    raise TypeError(f"{type(value).__name__} is not JSON")
