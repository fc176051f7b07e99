"""An agent that repairs an issue with one tool, bash in a sandbox, by OpenAI's client: it knows nothing of training.

In: {"problem": text of the issue, "tree": directory of the repository's files, "python": interpreter with its requirements}. Out: {"patch":
what it changed, as `git diff` writes it}. Address and key of the model come from OPENAI_BASE_URL and OPENAI_API_KEY.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from recipes.swe.workspace import COPY_SECONDS, copy_command, policy_of
from runner.sandboxes.sandbox import OpenSandbox
from runner.tools.output import shortened
from runner.tools.session import ToolFailedError
from runner.tools.toolbox import Toolbox, open_toolbox
from spangrad.errors import JSON_ERRORS, SandboxError

SYSTEM = "Repair the repository in the working directory . Run commands with bash . When it is repaired , reply without a command ."
TURNS = 30
LONGEST = 512
"""Most tokens of a reply."""
SHOWN = 4000
"""Most characters of a command's output that the model gets: the beginning and the end."""
BASH = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command in a bash that stays.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}


@cache
def client() -> AsyncOpenAI:
    """Return the model's client."""
    return AsyncOpenAI()


async def agent(given: Mapping[str, Any]) -> dict[str, str]:
    """Repair one issue."""
    async with open_toolbox(policy_of(given)) as toolbox:
        root = f"{toolbox.sandbox.home}/repository"
        try:
            await toolbox.shell(copy_command(given, root), COPY_SECONDS)
            await toolbox.shell(f"export PATH={shlex.quote(str(Path(given['python']).parent))}:$PATH")
        except ToolFailedError as error:
            raise SandboxError(f"{given['tree']} cannot be copied into a sandbox: {error}. It needs git, and room in memory.") from None
        await _converse(toolbox, given["problem"])
        return {"patch": await changes(toolbox.sandbox, root)}


async def _converse(toolbox: Toolbox, problem: str) -> None:
    messages: list[Any] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": problem}]
    options: Any = {"model": "policy", "temperature": 1.0, "max_completion_tokens": LONGEST, "tools": [BASH]}
    for _ in range(TURNS):
        reply = (await client().chat.completions.create(messages=messages, **options)).choices[0].message
        messages.append(reply.model_dump(exclude_none=True))
        if not reply.tool_calls:
            return
        for call in reply.tool_calls:
            messages.append({"role": "tool", "tool_call_id": call.id, "content": await _run(toolbox, call)})


async def _run(toolbox: Toolbox, call: Any) -> str:
    try:
        arguments = json.loads(call.function.arguments)
    except JSON_ERRORS as error:
        return f"the arguments are no JSON: {error}"
    if not isinstance(arguments, dict) or arguments.keys() != {"command"}:
        return "bash takes command"
    return shortened(await toolbox.call("shell", arguments, call.id), SHOWN)


async def changes(sandbox: OpenSandbox, root: str) -> str:
    """Return all changes to the repository as a patch; empty where there are none, or no repository is left."""
    await sandbox.run(["git", "-C", root, "add", "-A"], timeout_seconds=COPY_SECONDS)
    result = await sandbox.run(["git", "-C", root, "diff", "--cached", "--binary", "HEAD"], timeout_seconds=COPY_SECONDS)
    return "" if result.exit_code or result.truncated else result.stdout.decode(errors="surrogateescape")
