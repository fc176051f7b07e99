"""Tools of an agent in a sandbox: shell, Python, and files, as methods, as tools of OpenAI's API, and with a span for each action.

In: calls, by name and arguments or by method. Out: text for the model. Invariant: each call is a span `execute_tool`, failed where the
action failed, so that rules on tool errors see it; no action reaches anything outside of the sandbox.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import AsyncGenerator, Awaitable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opentelemetry import trace

from runner.sandboxes.engines import SandboxEngine, prepare
from runner.sandboxes.policy import SandboxPolicy, inner_interpreter
from runner.sandboxes.program_io import MOST_BYTES
from runner.sandboxes.remote import RemoteSandbox
from runner.sandboxes.sandbox import OpenSandbox, open_sandbox
from runner.swe_rex.remote_shell import RemoteShell
from runner.tools import interpreter
from runner.tools.action_spans import ActionSpans
from runner.tools.session import UNKNOWN_CODE, ActionResult, ToolFailedError, ToolSession, text_bytes
from spangrad.errors import JSON_ERRORS, SandboxError, SandboxRequestError
from spangrad.types import SandboxRung

OUTPUT_BYTES = 32_000
"""Largest output of an action that a model gets, in bytes; of a longer one it gets the beginning and the end."""
TIMEOUT_SECONDS = 60.0
"""Time limit of an action unless its call sets one, in seconds."""
_TIMEOUT = {"type": "number", "description": f"Time limit in seconds, {TIMEOUT_SECONDS:g} unless it is given."}
_PATH = {"type": "string", "description": "Absolute path of the file."}
_TOOLS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "shell": (
        "Run a command in a bash that stays: working directory, variables and functions remain. It reads no input.",
        {"command": {"type": "string", "description": "The command, of one or several lines."}, "timeout_seconds": _TIMEOUT},
        ["command"],
    ),
    "python": (
        "Run Python code in an interpreter that stays, as in a notebook: names remain, and the value of a last expression is shown.",
        {"code": {"type": "string", "description": "The code."}, "timeout_seconds": _TIMEOUT},
        ["code"],
    ),
    "read_file": (
        "Read a file, or some lines of it.",
        {
            "path": _PATH,
            "first_line": {"type": "integer", "description": "First line, from 1."},
            "lines": {"type": "integer", "description": "Number of lines; all if it is not given."},
        },
        ["path"],
    ),
    "write_file": (
        "Write a file, and the directories above it.",
        {"path": _PATH, "content": {"type": "string", "description": "The whole content."}},
        ["path", "content"],
    ),
    "replace_in_file": (
        "Replace a text that occurs exactly once in a file.",
        {
            "path": _PATH,
            "old": {"type": "string", "description": "The text, with enough around it to occur once."},
            "new": {"type": "string", "description": "The text in its place."},
        },
        ["path", "old", "new"],
    ),
}
"""Tools by the name of their method: description, properties of the arguments, and the arguments that a call must have."""


@dataclass(frozen=True, slots=True)
class ToolOutcome:
    """Outcome of a call."""

    text: str
    failed: bool


class Toolbox:
    """Tools in one sandbox, each a method; `open_toolbox` makes it.

    A tool whose action fails raises ToolFailedError, with the text for the model; `act` and `call` return that text.
    """

    def __init__(
        self, sandbox: OpenSandbox, shell: ToolSession | RemoteShell, sessions: AsyncExitStack, provider: trace.TracerProvider | None = None
    ) -> None:
        """`sessions` ends the interpreter, which the first call of `python` starts; `provider` takes the spans, None: the process's own."""
        self.sandbox = sandbox
        self._shell = shell
        self._sessions = sessions
        self._starting = asyncio.Lock()
        self._python: ToolSession | None = None
        self._spans = ActionSpans(sandbox.image, provider)

    @staticmethod
    def definitions() -> list[dict[str, Any]]:
        """Return the tools as the chat completions API takes them."""
        return [
            {
                "type": "function",
                "function": {
                    "name": name,
                    "description": description,
                    "parameters": {"type": "object", "properties": properties, "required": required, "additionalProperties": False},
                },
            }
            for name, (description, properties, required) in _TOOLS.items()
        ]

    async def call(self, name: str, arguments: str | Mapping[str, Any], call_id: str | None = None) -> str:
        """Run a tool, and return the text for the model, also where the tool failed; arguments and errors as of `act`."""
        return (await self.act(name, arguments, call_id)).text

    async def act(self, name: str, arguments: str | Mapping[str, Any], call_id: str | None = None) -> ToolOutcome:
        """Run a tool, in a span of its own; the arguments are JSON, or decoded.

        Raises:
            SandboxRequestError: the sandbox has ended.
        """
        text = arguments if isinstance(arguments, str) else json.dumps(arguments)
        failed = False
        with self._spans.action(name, text, call_id) as end:
            try:
                result = await self._dispatch(name, text)
            except ToolFailedError as error:
                result, failed = str(error), True
            result = result.encode(errors="replace").decode()  # no client sends a half of a surrogate pair, which stands for other bytes
            end(result, failed)
        return ToolOutcome(result, failed)

    async def _dispatch(self, name: str, text: str) -> str:
        if name not in _TOOLS:
            raise ToolFailedError(f"there is no tool {name!r}; there are {', '.join(_TOOLS)}")
        try:
            arguments = json.loads(text)
        except JSON_ERRORS as error:
            raise ToolFailedError(f"the arguments are no JSON: {error}") from None
        _, properties, required = _TOOLS[name]
        if not isinstance(arguments, dict) or not set(required) <= arguments.keys() <= properties.keys():
            raise ToolFailedError(f"{name} takes {', '.join(properties)}, and needs {', '.join(required)}")
        for key, value in arguments.items():
            kinds = {"string": str, "integer": int, "number": (int, float)}[properties[key]["type"]]
            if not isinstance(value, kinds) or isinstance(value, bool):
                raise ToolFailedError(f"{key} must be a {properties[key]['type']}, not {json.dumps(value)}")
        return await getattr(self, name)(**arguments)

    async def shell(self, command: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Run a command, and return its output; one that ends with another exit code than 0, or is interrupted, has failed."""
        return _shown("the shell", await self._shell.act(command, timeout_seconds), timeout_seconds)

    async def python(self, code: str, timeout_seconds: float = TIMEOUT_SECONDS) -> str:
        """Run Python code, and return what it printed; a remote sandbox has no interpreter."""
        if isinstance(self.sandbox, RemoteSandbox):
            raise ToolFailedError("a remote sandbox has no interpreter that stays: run python3 by the tool shell")
        async with self._starting:
            if self._python is None:
                image = self.sandbox.image
                program = [str(inner_interpreter(image)), "-P" if image is None else "-I", interpreter.__file__]
                self._python = await self._sessions.enter_async_context(ToolSession(self.sandbox, program, OUTPUT_BYTES))
        return _shown("the interpreter", await self._python.act(code, timeout_seconds), timeout_seconds)

    async def read_file(self, path: str, first_line: int = 1, lines: int | None = None) -> str:
        """Return a file's text, or lines of it; of a file of more than `MOST_BYTES`, what the first hold, and a line about the rest."""
        text, is_whole = await self._text(path)
        if first_line != 1 or lines is not None:
            start = max(0, first_line - 1)
            # By newlines alone, as compilers and editors count: `splitlines` takes form feeds and other characters for ends of lines, too.
            text = "".join(list(io.StringIO(text))[start : None if lines is None else start + lines])
        if len(text) > OUTPUT_BYTES:
            text = f"{text[:OUTPUT_BYTES]}\n[{len(text) - OUTPUT_BYTES} characters left out: read fewer lines]"
        if not is_whole:
            text += f"\n[the file has more than {MOST_BYTES} bytes, and the rest was not read: read it by a command]"
        return text

    async def write_file(self, path: str, content: str) -> str:
        """Write a file."""
        await _of_model(self.sandbox.write(path, text_bytes(content)))
        return f"wrote {path}"

    async def replace_in_file(self, path: str, old: str, new: str) -> str:
        """Replace the one occurrence of a text, in a file of `MOST_BYTES` at most; another number of occurrences is a failure."""
        text, is_whole = await self._text(path)
        if not is_whole:
            raise ToolFailedError(f"{path} has more than {MOST_BYTES} bytes: change it by a command; nothing is changed")
        count = text.count(old) if old else 0
        if count != 1:
            raise ToolFailedError(f"the text occurs {count} times in {path}, and must occur once: nothing is changed")
        await self.write_file(path, text.replace(old, new))
        return f"replaced in {path}"

    async def _text(self, path: str) -> tuple[str, bool]:
        """Return the text of a file's first bytes, and True if these are all."""
        content: bytes = await _of_model(self.sandbox.read(path, MOST_BYTES + 1))
        return content[:MOST_BYTES].decode(errors="surrogateescape"), len(content) <= MOST_BYTES


@asynccontextmanager
async def open_toolbox(policy: SandboxPolicy | SandboxEngine, provider: trace.TracerProvider | None = None) -> AsyncGenerator[Toolbox]:
    """Start a sandbox with a shell, by its rules or an engine that `prepare_tools` returned, for as long as the block.

    Raises:
        SandboxError: they cannot be started.
    """
    prepared = policy if isinstance(policy, SandboxEngine) else await asyncio.to_thread(prepare_tools, policy)
    async with AsyncExitStack() as stack:
        sandbox = await stack.enter_async_context(open_sandbox(prepared))
        try:
            remote = isinstance(sandbox, RemoteSandbox)
            session = RemoteShell(sandbox, OUTPUT_BYTES) if remote else ToolSession.shell(sandbox, OUTPUT_BYTES)
            shell = await stack.enter_async_context(session)
        except SandboxRequestError as error:
            raise SandboxError(f"no shell can be started in a sandbox: {error} It needs bash.") from None
        yield Toolbox(sandbox, shell, stack, provider)


def prepare_tools(policy: SandboxPolicy) -> SandboxEngine:
    """Return the engine for many toolboxes of a policy, as of `prepare`.

    Raises:
        SandboxError: none works here, or a remote one cannot keep the policy.
    """
    if policy.engine is SandboxRung.REMOTE:
        return prepare(policy)
    return prepare(replace(policy, readable=(*policy.readable, Path(interpreter.__file__))))


async def _of_model(request: Awaitable[Any]) -> Any:
    """Wait for a request about a file; its failure is the model's."""
    try:
        return await request
    except SandboxRequestError as error:
        raise ToolFailedError(str(error)) from None


def _shown(program: str, result: ActionResult, timeout_seconds: float) -> str:
    """Return an action's output; of one that failed, ToolFailedError has it, with a last line on the end."""
    if result.timed_out:
        end = f"interrupted after {timeout_seconds:g} s"
    elif result.exit_code == UNKNOWN_CODE:
        end = "exit code unknown"
    elif result.exit_code:
        end = f"exit code {result.exit_code}"
    elif result.exit_code is None:
        end = f"{program} ended"
    else:
        return result.output
    if result.exit_code is None:
        end += f"; {program} was started again"
    raise ToolFailedError(f"{result.output.rstrip()}\n[{end}]".lstrip())
