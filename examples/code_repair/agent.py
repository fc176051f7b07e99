"""An agent that repairs a repository with a shell and an editor in a sandbox, with OpenAI's client and the tools of `runner.tools`.

In: {"text": "repair shop.py bank.py farm.py", "files": {...}}. Out: {"shop.py": text, ...}, the modules as the model left them. The model
may call tools six times; a reply without a call ends the attempt. Its address and key come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from examples.code_repair.task import LIMITS
from runner.sandboxes.engines import SandboxEngine
from runner.sandboxes.policy import SandboxPolicy
from runner.tools.session import ToolFailedError
from runner.tools.toolbox import Toolbox, open_toolbox, prepare_tools

CALLS = 6
"""Most replies of the model."""
SHOWN = 60
"""Most words of a tool's result that the model gets."""
TOKENS = 12
"""Most tokens of a reply."""


def _tool(name: str, description: str, argument: str) -> dict[str, Any]:
    schema = {"type": "object", "properties": {argument: {"type": "string"}}, "required": [argument], "additionalProperties": False}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


TOOLS = (
    _tool("shell", "Run a command in the repository.", "command"),
    _tool("edit", "Replace a line of a file, with the indentation that it had: FILE NUMBER CODE.", "change"),
)


@cache
def engine() -> SandboxEngine:
    """Return what starts the agent's sandboxes."""
    return prepare_tools(SandboxPolicy(Path("/usr"), (), {}, False, LIMITS))


@cache
def client() -> AsyncOpenAI:
    """Return the model's client."""
    return AsyncOpenAI()


async def edit(toolbox: Toolbox, root: str, change: str, call_id: str) -> str:
    """Replace a line of a file."""
    name, _, rest = change.partition(" ")
    number, _, code = rest.partition(" ")
    try:
        lines = (await toolbox.read_file(f"{root}/{name}")).splitlines(keepends=True)
        line = lines[int(number) - 1]
    except (ToolFailedError, ValueError, IndexError):
        return "error"
    indentation = line[: len(line) - len(line.lstrip())]
    lines[int(number) - 1] = f"{indentation}{code}\n"
    outcome = await toolbox.act("write_file", {"path": f"{root}/{name}", "content": "".join(lines)}, call_id)
    return "error" if outcome.failed else "ok"


async def act(toolbox: Toolbox, root: str, call: Any) -> str:
    """Return the result of a model's call."""
    argument = next(iter(json.loads(call.function.arguments).values()))
    if call.function.name == "edit":
        return await edit(toolbox, root, argument, call.id)
    text = await toolbox.call("shell", {"command": argument, "timeout_seconds": 10}, call.id)
    return " ".join(text.split()[:SHOWN]) or "ok"


async def agent(given: Mapping[str, Any]) -> dict[str, str]:
    """Repair one repository."""
    async with open_toolbox(await asyncio.to_thread(engine)) as toolbox:
        root = f"{toolbox.sandbox.home}/repository"
        for name, text in given["files"].items():
            await toolbox.write_file(f"{root}/{name}", text)
        await toolbox.shell(f"cd {root} && chmod +x check")
        messages: list[Any] = [{"role": "user", "content": given["text"]}]
        options: Any = {"model": "policy", "temperature": 1.0, "max_completion_tokens": TOKENS, "tools": TOOLS}
        for _ in range(CALLS):
            reply = (await client().chat.completions.create(messages=messages, **options)).choices[0].message
            messages.append(reply.model_dump(exclude_none=True))
            if not reply.tool_calls:
                break
            for call in reply.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": await act(toolbox, root, call)})
        return {name: await left(toolbox, f"{root}/{name}") for name in given["files"] if name.endswith(".py")}


async def left(toolbox: Toolbox, path: str) -> str:
    """Return a file's text; empty where it is no more."""
    try:
        return await toolbox.read_file(path)
    except ToolFailedError:
        return ""
