"""Callables by name: what other processes can import has one, files are imported once, decorated agents are found."""

from __future__ import annotations

import functools
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import spangrad
from spangrad.agent.decorator import Mark, mark_of
from spangrad.callables import load, load_agent, reference_of
from spangrad.errors import AgentError

FILE = """
    import spangrad
    {before}

    def score(given, output):
        return given == output

    @spangrad.rollout{options}
    def agent(given):
        return helper(given)

    def helper(given):
        return given

    {after}
"""


@pytest.fixture(autouse=True)
def _forgotten(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Restore sys.path and remove the modules that a test imported."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        del sys.modules[name]


def write(file: Path, *, options: str = "", before: str = "", after: str = "") -> Path:
    file.write_text(textwrap.dedent(FILE).format(options=options, before=before, after=after))
    return file


def test_load_agent_decorated_function_is_found_and_unchanged(tmp_path: Path) -> None:
    file = write(tmp_path / "solver.py", options='(name="solver", evaluator=score)')
    agent, evaluator = load_agent(str(file))
    assert (agent(3), agent.__name__, agent.__module__) == (3, "agent", "solver")
    assert mark_of(agent) == Mark("solver", evaluator)
    assert evaluator is load(f"{file}:score")  # the file was imported once
    assert [load_agent(f"{file}{name}")[0] for name in (":solver", ":agent")] == [agent, agent]
    assert [load_agent(name) for name in ("solver", "solver:agent")] == [(agent, evaluator)] * 2
    assert load_agent("solver:helper") == (sys.modules["solver"].helper, None)


async def test_rollout_decorator_accepts_async_functions_and_evaluator_references() -> None:
    @spangrad.rollout(evaluator="my_task:score")
    async def agent(given: int) -> int:
        return given + 1

    assert await agent(1) == 2
    assert mark_of(agent) == Mark("agent", "my_task:score")
    with pytest.raises(TypeError, match="decorates a function, not int"):
        spangrad.rollout(3)  # type: ignore[call-overload]


def test_load_agent_with_several_decorated_functions_needs_a_name(tmp_path: Path) -> None:
    write(tmp_path / "one.py")
    two = write(tmp_path / "two.py", before="from one import agent as other", after="spangrad.rollout(name='second')(helper)")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(AgentError, match=r"two\.py' has several agents: agent, second\. Name one, as .*two\.py:agent\."):
        load_agent(str(two))
    assert load_agent(f"{two}:second")[0] is sys.modules["two"].helper
    (tmp_path / "three.py").write_text("from one import agent as imported\n")
    assert load_agent("three")[0] is sys.modules["one"].agent


def test_load_agent_from_file_with_name_of_stdlib_module(tmp_path: Path) -> None:
    agent, _ = load_agent(str(write(tmp_path / "json.py")))
    assert agent(1) == 1
    assert Path(sys.modules["json"].__file__ or "").parent != tmp_path


@pytest.mark.parametrize("entry", [None, object()])
def test_load_file_beside_an_entry_of_sys_modules_that_is_no_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, entry: object) -> None:
    monkeypatch.setitem(sys.modules, "blocked", entry)  # None: its import is blocked
    assert load(f"{write(tmp_path / 'solver.py')}:helper")(3) == 3


@pytest.mark.parametrize(
    ("reference", "message", "place"),
    [
        ("{0}/no.py", "'{0}/no.py' cannot be loaded from {0}: FileNotFoundError", ""),
        ("no_module:agent", "'no_module:agent' cannot be loaded from ", ""),
        ("{0}/plain.py:nothing", "'{0}/plain.py:nothing' cannot be loaded from {0}: AttributeError", ""),
        ("{0}/broken.py:agent", "'{0}/broken.py:agent' cannot be loaded from {0}: ZeroDivisionError", 'broken.py", line 1'),
        ("{0}/unread.py:agent", "'{0}/unread.py:agent' cannot be loaded from {0}: SyntaxError", 'unread.py", line 1\n    return return'),
        ("{0}/plain.py", "'{0}/plain.py' has no function that is decorated with @spangrad.rollout. Decorate the ", ""),
        ("{0}/plain.py:", "'{0}/plain.py:' does not name a callable", ""),
        ("", "'' does not name a callable", ""),
    ],
)  # fmt: skip
def test_load_agent_with_invalid_reference_raises(
    tmp_path: Path, reference: str, message: str, place: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "broken.py").write_text("1 / 0\n")
    (tmp_path / "unread.py").write_text("return return\n")
    (tmp_path / "plain.py").write_text("def agent(given): return given\n")
    with pytest.raises(AgentError) as raised:
        load_agent(reference.format(tmp_path))
    assert str(raised.value).startswith(message.format(tmp_path))
    shown = capsys.readouterr().err
    assert place in shown if place else shown == "", "a traceback helps where the module's own code failed"


def test_reference_of_module_function_gives_name_and_directory(tmp_path: Path) -> None:
    (tmp_path / "parts" / "deep").mkdir(parents=True)
    write(tmp_path / "parts" / "deep" / "agents.py")
    (tmp_path / "parts" / "__init__.py").write_text("def top(given): ...\nclass Team:\n    def lead(given): ...\n")
    sys.path.insert(0, str(tmp_path))
    functions = [load("parts.deep.agents:agent"), load("parts:top"), load("parts:Team.lead")]
    assert [reference_of(function, "the agent") for function in functions] == [
        ("parts.deep.agents:agent", tmp_path),
        ("parts:top", tmp_path),
        ("parts:Team.lead", tmp_path),
    ]


class Solver:
    def __call__(self, given: object) -> object:
        return given

    def method(self, given: object) -> object:
        return given


def closure() -> Any:
    def inner(given: object) -> object:
        return given

    return inner


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda given: given, "is a lambda, and the worker processes cannot import it. Define it with `def`"),
        (closure(), "'closure.<locals>.inner' of .* is defined inside another function"),
        (functools.partial(closure), "is functools.partial.* which the worker processes cannot import"),
        (Solver(), "which the worker processes cannot import. Give a function that stands at the top level of a file"),
        (Solver().method, "which the worker processes cannot import"),
        (len, "'?len'? is of builtins, which is no file|which the worker processes cannot import"),
    ],
)
def test_reference_of_unimportable_function_raises(function: Any, message: str) -> None:
    with pytest.raises(AgentError, match=message):
        reference_of(function, "the agent")


def test_reference_of_shadowed_function_raises(tmp_path: Path) -> None:
    (tmp_path / "hidden.py").write_text("def agent(given): return 1\nfirst = agent\ndef agent(given): return 2\n")
    sys.path.insert(0, str(tmp_path))
    with pytest.raises(AgentError, match="'agent' is not what hidden has under that name"):
        reference_of(load("hidden:first"), "the agent")
