"""MCP server of the tools of one sandbox, on the standard input and output.

In: requests of the Model Context Protocol. Out: the tools of `runner.tools.toolbox`, and a span for each call, in the trace that the
request or this process's environment names. Invariant: a tool that failed answers with its text and `isError`, so that the model reads it.
"""

from __future__ import annotations

import asyncio
import os
from typing import Any

from mcp import types
from mcp.server.lowlevel import Server
from mcp.server.stdio import stdio_server
from opentelemetry import context

from runner.sandboxes.policy import SandboxPolicy
from runner.tools.span_export import SERVICE, action_provider
from runner.tools.toolbox import Toolbox, open_toolbox
from span_processors.context import environment_context
from spangrad.settings import Settings


async def serve(settings: Settings, policy: SandboxPolicy) -> None:
    """Serve tools in a sandbox until the input ends; their spans go to the store of the settings.

    Raises:
        SandboxError: no sandbox can be started.
    """
    provider = action_provider(settings.store)
    context.attach(environment_context(os.environ))
    try:
        async with open_toolbox(policy, provider) as toolbox, stdio_server() as (reading, writing):
            server = mcp_server(toolbox)
            await server.run(reading, writing, server.create_initialization_options())
    finally:
        await asyncio.to_thread(provider.shutdown)


def mcp_server(toolbox: Toolbox) -> Server[Any]:
    """Return a server of a toolbox's tools, for any transport."""

    async def list_tools(request: object, params: object) -> types.ListToolsResult:
        del request, params
        functions = [tool["function"] for tool in toolbox.definitions()]
        return types.ListToolsResult(
            tools=[
                types.Tool(name=function["name"], description=function["description"], input_schema=function["parameters"])
                for function in functions
            ]
        )

    async def call_tool(request: object, params: types.CallToolRequestParams) -> types.CallToolResult:
        del request
        result = await toolbox.act(params.name, params.arguments or {})
        return types.CallToolResult(content=[types.TextContent(type="text", text=result.text)], is_error=result.failed)

    return Server(SERVICE, on_list_tools=list_tools, on_call_tool=call_tool)
