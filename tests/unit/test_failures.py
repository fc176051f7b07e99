"""Failures of the policy: the reason of each exception."""

from __future__ import annotations

import httpx
import openai
import pytest
from agents.exceptions import MaxTurnsExceeded
from langgraph.errors import GraphRecursionError

import spangrad
from spangrad.agent.failures import failure_of
from spangrad.errors import PromptError, SandboxError, SandboxRequestError, SettingsError
from spangrad.types import AttemptFailure

TOO_LONG = "This model's maximum context length is 64 tokens. However, your prompt contains 65 input tokens."


def bad_request(message: str, code: object) -> openai.BadRequestError:
    response = httpx.Response(400, request=httpx.Request("POST", "http://engine/v1/chat/completions"))
    return openai.BadRequestError(message, response=response, body={"message": message, "code": code})


class MyMaxTurnsExceeded(MaxTurnsExceeded):
    """Exception that an agent derives from a framework's exception."""


class UnprintableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


def caused(error: Exception, cause: Exception | None) -> Exception:
    error.__cause__ = cause
    return error


def hidden(error: Exception, before: Exception) -> Exception:
    error.__context__, error.__suppress_context__ = before, True
    return error


@pytest.mark.parametrize(
    ("error", "failure"),
    [
        (ValueError("no"), "exception"),
        (RecursionError("maximum recursion depth exceeded"), "exception"),
        (spangrad.MaxTurnsError("5 turns"), "max_turns"),
        (PromptError("the queue's server does not answer"), "environment"),
        (SettingsError("runner.episode.players has 'white', and the environment's roles are first, second"), "environment"),
        (SandboxError("no sandbox can be started here"), "sandbox"),
        (SandboxRequestError("the sandbox has ended"), "exception"),
        (MaxTurnsExceeded("Max turns (3) exceeded"), "max_turns"),
        (MyMaxTurnsExceeded("3"), "max_turns"),
        (GraphRecursionError("Recursion limit of 25 reached"), "max_turns"),
        (caused(RuntimeError("gave up"), GraphRecursionError("25")), "max_turns"),
        (ExceptionGroup("tasks", [ValueError("x"), spangrad.MaxTurnsError("5")]), "max_turns"),
        (hidden(ValueError("a new start"), spangrad.MaxTurnsError("5")), "exception"),
        (bad_request(TOO_LONG, 400), "context_overflow"),
        (bad_request("too many tokens", "context_length_exceeded"), "context_overflow"),
        (bad_request("temperature must be non-negative", 400), "exception"),
        (caused(RuntimeError("gave up"), bad_request(TOO_LONG, 400)), "context_overflow"),
        (caused(spangrad.MaxTurnsError("5"), bad_request(TOO_LONG, 400)), "max_turns"),
        (UnprintableError(), "exception"),
    ],
    ids=repr,
)
def test_failure_of_exception_of_agent_names_policy_failure(error: Exception, failure: str) -> None:
    assert failure_of(error) is AttemptFailure(failure)


def test_failure_of_cyclic_causes_terminates() -> None:
    first, second = ValueError("a"), ValueError("b")
    first.__cause__, second.__cause__ = second, first
    assert failure_of(first) is AttemptFailure.EXCEPTION
