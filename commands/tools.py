"""`spangrad tools`: shell, Python and file tools in a sandbox, as an MCP server or by SWE-ReX's routes."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

from commands.options import ConfigFile, Overrides, log_to_stderr, require_directory, resolve


def tools(*, directory: Path = Path(), swe_rex: bool = False, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Serve the tools shell, python, read_file, write_file and replace_in_file by MCP on the standard input and output.

    They always act in a sandbox: that of runner.sandbox, and the strongest of this machine where its engine is none.

    Args:
        directory: working directory of the tools, which they can read.
        swe_rex: serve the sandbox at tools.host and tools.port by SWE-ReX's routes instead, for clients such as SWE-agent.
    """
    require_directory("--directory", directory, "the working directory of the tools")
    settings = resolve(config, set_)
    log_to_stderr()
    from runner.sandboxes.agent_sandbox import policy_from

    policy = policy_from(settings.runner, directory.resolve())
    if swe_rex:
        from runner.swe_rex.server import serve as serve_by_routes

        serve_by_routes(settings, policy, os.environ)
        return
    from runner.tools.mcp_server import serve

    asyncio.run(serve(settings, policy))
