"""Tools in sandboxes: a shell and an interpreter that stay, files, limits of time and output, spans and failures that a model reads."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import tempfile
from collections.abc import AsyncGenerator, Generator
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import ClientSession, StdioServerParameters
from mcp.client.stdio import stdio_client
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.sandboxes.program_io import MOST_BYTES
from runner.sandboxes.sandbox import Sandbox
from runner.tools import session as tool_session
from runner.tools.session import ToolFailedError
from runner.tools.toolbox import OUTPUT_BYTES, Toolbox, open_toolbox
from spangrad import semconv
from spangrad.errors import SandboxError, SandboxRequestError
from spangrad.processes import MARK
from tests.support.otlp import OtlpSink

LIMITS = SandboxLimits(processes=64, memory_bytes=2**30, disk_bytes=2**24)


@pytest.fixture(scope="module")
def directory() -> Generator[Path]:
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        yield Path(base)


@pytest.fixture
async def tools(directory: Path) -> AsyncGenerator[Toolbox]:
    opened = open_toolbox(SandboxPolicy(directory, (), {}, False, LIMITS))
    try:
        toolbox = await opened.__aenter__()
    except SandboxError as error:
        pytest.skip(str(error))
    yield toolbox
    await opened.__aexit__(None, None, None)


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> InMemorySpanExporter:
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer", lambda name, **_: provider.get_tracer(name))
    return exporter


async def test_shell_keeps_directory_variables_and_functions(tools: Toolbox) -> None:
    assert await tools.shell("cd /usr/share\nX=1; f() { echo f $X; }") == ""
    assert await tools.shell("pwd; f; tty >/dev/null 2>&1 || echo no input; test -t 1 && echo terminal") == (
        "/usr/share\nf 1\nno input\nterminal\n"
    )
    with pytest.raises(ToolFailedError, match=r"^out\n\[exit code 3\]$"):
        await tools.shell("echo out; (exit 3)")
    with pytest.raises(ToolFailedError, match=r"bash: line \d+: nowhere: command not found\n\[exit code 127\]$"):
        await tools.shell("nowhere")
    assert await tools.shell("echo $0 $#") == "bash 0\n"
    quoted = 'it\'s "quoted" $HOME \\ `x`\n' * 500
    assert await tools.shell(f"cat <<'EOF'\n{quoted}EOF") == quoted


async def test_shell_over_time_is_interrupted_and_stays(tools: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    await tools.shell("cd /usr; X=1")
    with monkeypatch.context() as patch:
        patch.setattr(tool_session, "_GRACE_SECONDS", 60.0)
        with pytest.raises(ToolFailedError, match=r"^begun\n\[interrupted after 3 s\]$"):
            await tools.shell("echo begun; sleep 600", timeout_seconds=3)
    assert await tools.shell("pwd; echo $X") == "/usr\n1\n"
    with pytest.raises(ToolFailedError, match=r"interrupted after 0.5 s; the shell was started again\]$"):
        await tools.shell("trap '' INT; sleep 600", timeout_seconds=0.5)
    with pytest.raises(ToolFailedError, match=r"interrupted after 0.5 s"):
        await tools.shell("yes", timeout_seconds=0.5)
    with pytest.raises(ToolFailedError, match=r"^\[the shell ended; the shell was started again\]$"):
        await tools.shell("exit 4")
    assert await tools.shell("echo again") == "again\n"


async def test_shell_long_output_keeps_beginning_and_end(tools: Toolbox) -> None:
    output = await tools.shell("echo first; head -c 3000000 /dev/zero | tr '\\0' x; echo; echo last")
    assert output.startswith("first\nxxx")
    assert output.endswith("xxx\nlast\n")
    assert "bytes left out]" in output
    assert len(output) < OUTPUT_BYTES + 100
    await tools.shell("(sleep 0.2; echo late) &")
    assert await tools.shell("wait; echo now") == "late\nnow\n"


async def test_python_keeps_names_and_shows_values(tools: Toolbox, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tool_session, "_GRACE_SECONDS", 60.0)
    assert await tools.python("import os\nx = 20\nprint('printed')\nx + 1") == "printed\n21\n"
    assert await tools.python("x += 1; x") == "21\n"
    with pytest.raises(ToolFailedError, match=r"(?s)File \"<tool>\", line 1.*ZeroDivisionError: division by zero\n\[exit code 1\]$"):
        await tools.python("1 / 0")
    with pytest.raises(ToolFailedError, match=r"(?s)KeyboardInterrupt\n\[interrupted after 2 s\]$"):
        await tools.python("while True: pass", timeout_seconds=2)
    with pytest.raises(ToolFailedError, match="exit code 1"):
        await tools.python("raise SystemExit")
    assert await tools.python("x") == "21\n"


async def test_python_in_a_deleted_directory_keeps_its_names(tools: Toolbox) -> None:
    assert await tools.python("import os, tempfile\nx = 1\nwith tempfile.TemporaryDirectory() as d: os.chdir(d)") == ""
    assert await tools.python("x") == "1\n"


async def test_action_with_a_false_marker_restarts_its_program(tools: Toolbox) -> None:
    with pytest.raises(ToolFailedError, match=r"^\[the interpreter ended; the interpreter was started again\]$"):
        await tools.python("import os, sys; os.write(1, sys.argv[1].encode()); os._exit(0)")
    with pytest.raises(ToolFailedError, match=r"^\[the shell ended; the shell was started again\]$"):
        await asyncio.wait_for(tools.shell('printf %s "$_marker"; sleep 600', timeout_seconds=600), 60)
    assert await tools.shell("echo again") == "again\n"


async def test_session_that_cannot_restart_closes_no_descriptor_of_others(directory: Path) -> None:
    try:
        async with open_toolbox(SandboxPolicy(directory, (), {}, False, LIMITS)) as tools:
            assert isinstance(tools.sandbox, Sandbox)
            os.killpg(tools.sandbox.process.pid, signal.SIGKILL)
            with pytest.raises(SandboxError, match="has ended"):
                await tools.sandbox.run(["sleep", "600"])
            with pytest.raises(SandboxRequestError, match="it has ended"):
                await tools.shell("exit 4")
            others = [os.open(os.devnull, os.O_RDONLY) for _ in range(8)]  # among them are the numbers that the session had
            with pytest.raises(SandboxRequestError, match=r"bash ended in the sandbox, and could not be started again\. Start another"):
                await tools.shell("true")
        for descriptor in others:
            os.close(descriptor)
    except SandboxError as error:
        if "no sandbox can be started here" not in str(error):
            raise
        pytest.skip(str(error))


async def test_shell_that_ends_while_its_children_hold_the_terminal_is_restarted(tools: Toolbox) -> None:
    with pytest.raises(ToolFailedError, match=r"^begun\n\[the shell ended; the shell was started again\]$"):
        await asyncio.wait_for(tools.shell("echo begun; setsid sleep 600 & sleep 0.3; exit 4", timeout_seconds=600), 60)
    assert await tools.shell("echo again") == "again\n"


async def test_shell_cancelled_by_a_scope_is_restarted(tools: Toolbox) -> None:
    async def act() -> None:
        await tools.shell("sleep 600")

    # A scope of anyio, as of a request of MCP, cancels each wait in it.
    async with anyio.create_task_group() as group:
        group.start_soon(act)
        await asyncio.sleep(0.5)
        group.cancel_scope.cancel()
    assert await tools.shell("echo again") == "again\n"


INTERRUPTS = """
import os, signal, threading, time
def interrupt():
    while not os.path.exists("/tmp/waits"):
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGINT)
    open("/tmp/interrupted", "w").close()
x = 1
threading.Thread(target=interrupt).start()
"""


async def test_python_interrupted_after_its_end_has_its_own_status(tools: Toolbox) -> None:
    # What a piece leaves behind interrupts the interpreter while it waits for the next piece.
    assert await tools.python(INTERRUPTS) == ""
    await tools.shell("touch /tmp/waits; until [ -e /tmp/interrupted ]; do sleep 0.05; done; sleep 0.3")
    assert await tools.python("x") == "1\n"


async def test_files_are_written_read_and_replaced(tools: Toolbox) -> None:
    path = "/tmp/new/file.py"
    await tools.write_file(path, "a = 1\nb = 2\nc = 1\n")
    assert await tools.read_file(path, first_line=2, lines=1) == "b = 2\n"
    await tools.replace_in_file(path, "b = 2", "b = 3")
    assert await tools.shell(f"cat {path}") == "a = 1\nb = 3\nc = 1\n"
    with pytest.raises(ToolFailedError, match=r"occurs 2 times in .*, and must occur once: nothing is changed"):
        await tools.replace_in_file(path, "= 1", "= 2")
    with pytest.raises(ToolFailedError, match="No such file or directory"):
        await tools.read_file("/etc/shadow")


async def test_files_beyond_the_limit_are_read_in_part_and_not_replaced(tools: Toolbox) -> None:
    await tools.shell(f"echo old >/tmp/whole; head -c {MOST_BYTES - 4} /dev/zero >>/tmp/whole; (cat /tmp/whole; echo end) >/tmp/large")
    size = len("end\n") + MOST_BYTES
    with pytest.raises(ToolFailedError, match=rf"large has more than {MOST_BYTES} bytes: change it by a command; nothing is changed$"):
        await tools.replace_in_file("/tmp/large", "old", "new")
    assert await tools.shell("wc -c </tmp/large; head -n 1 /tmp/large") == f"{size}\nold\n"
    left_out = f"\n[the file has more than {MOST_BYTES} bytes, and the rest was not read: read it by a command]"
    assert await tools.read_file("/tmp/large", lines=1) == f"old\n{left_out}"
    assert await tools.read_file("/tmp/whole", lines=1) == "old\n"
    await tools.replace_in_file("/tmp/whole", "old", "new")
    assert await tools.shell("wc -c </tmp/whole; head -n 1 /tmp/whole") == f"{MOST_BYTES}\nnew\n"


async def test_half_of_a_surrogate_pair_is_refused_and_bytes_that_are_no_text_stay(tools: Toolbox) -> None:
    half = "\ud83d"
    for action in (tools.shell(f"echo {half}"), tools.python(half), tools.write_file("/tmp/half", half)):
        with pytest.raises(ToolFailedError, match="half of a surrogate pair"):
            await action
    await tools.shell(r"printf 'a\377b' > /tmp/bytes")
    await tools.replace_in_file("/tmp/bytes", "b", "c")
    assert await tools.shell("od -An -tx1 /tmp/bytes") == " 61 ff 63\n"


async def test_call_text_of_bytes_beyond_utf8_can_be_sent(tools: Toolbox) -> None:
    await tools.shell(r"printf 'caf\351' > /tmp/bytes")
    assert await tools.call("read_file", {"path": "/tmp/bytes"}) == "caf?"
    assert (await tools.call("read_file", {"path": "/tmp/\udcff"})).endswith(" (/tmp/?).")


async def test_python_code_that_is_no_text_keeps_names(tools: Toolbox) -> None:
    await tools.python("x = 1")
    with pytest.raises(ToolFailedError, match=r"surrogates not allowed\n\[exit code 1\]$"):
        await tools.python("'\udcff'")
    assert await tools.python("x") == "1\n"


async def test_read_file_counts_lines_by_newline_alone(tools: Toolbox) -> None:
    await tools.write_file("/tmp/lines", "a\x0cb\u2028c\r\nd\r\ne\n")
    assert await tools.read_file("/tmp/lines", first_line=2, lines=1) == "d\r\n"


async def test_call_records_a_span_of_each_action(spans: InMemorySpanExporter, tools: Toolbox) -> None:
    assert await tools.call("shell", json.dumps({"command": "echo x"}), "call-1") == "x\n"
    assert await tools.call("shell", {"command": "false"}) == "[exit code 1]"
    assert "there is no tool 'nope'" in await tools.call("nope", {})
    assert "no JSON" in await tools.call("shell", "{")
    assert "no JSON" in await tools.call("shell", "[" * 100_000)
    assert "needs command" in await tools.call("shell", {"code": "x"})
    assert "command must be a string, not 1" in await tools.call("shell", {"command": 1})
    assert "holds a NUL character" in await tools.call("shell", {"command": "echo \0"})
    assert "half of a surrogate pair" in await tools.call("python", '{"code": "\\ud83d"}')
    first, failed, *others = spans.get_finished_spans()
    attributes: dict[str, Any] = dict(first.attributes or {})
    assert first.name == "execute_tool shell"
    assert attributes == {
        semconv.GEN_AI_OPERATION: "execute_tool",
        semconv.GEN_AI_TOOL_NAME: "shell",
        semconv.GEN_AI_TOOL_ARGUMENTS: '{"command": "echo x"}',
        semconv.GEN_AI_TOOL_CALL_ID: "call-1",
        semconv.GEN_AI_TOOL_RESULT: "x\n",
    }
    assert [span.status.is_ok for span in (first, failed, *others)] == [True, *[False] * 8]


async def test_tools_command_serves_mcp_in_the_trace_of_its_process(directory: Path) -> None:
    trace_id, parent = "ab" * 16, "cd" * 8
    of_agent = {
        "OTEL_EXPORTER_OTLP_HEADERS": "authorization=Bearer%20of-agents",
        MARK: "host",
        "BAGGAGE": "spangrad.rollout.id=ro,spangrad.rollout.attempt=0",
    }
    with OtlpSink() as sink:
        parameters = StdioServerParameters(
            command=sys.executable,
            args=["-P", "-m", "spangrad", "tools", "--directory", str(directory)],
            env={**os.environ, **of_agent, "TRACEPARENT": f"00-{trace_id}-{parent}-01", "OTEL_EXPORTER_OTLP_ENDPOINT": sink.url},
        )
        async with stdio_client(parameters) as (reading, writing), ClientSession(reading, writing) as session:
            await session.initialize()
            assert [tool.name for tool in (await session.list_tools()).tools][:2] == ["shell", "python"]
            right = await session.call_tool("shell", {"command": "pwd"})
            wrong = await session.call_tool("python", {"code": "1 / 0"})
        assert [(block.text, right.is_error) for block in right.content if block.type == "text"] == [(f"{directory}\n", False)]
        assert wrong.is_error
        spans = [*sink.named("execute_tool shell"), *sink.named("execute_tool python")]
        assert [(span.trace_id, span.parent_id, span.attributes[semconv.ROLLOUT_ID]) for span in spans] == [(trace_id, parent, "ro")] * 2
        assert {request.get("authorization") for request in sink.requests} == {"Bearer of-agents"}


def test_definitions_name_all_arguments() -> None:
    definitions = Toolbox.definitions()
    assert [tool["function"]["name"] for tool in definitions] == ["shell", "python", "read_file", "write_file", "replace_in_file"]
    assert all({*tool["function"]["parameters"]["required"]} <= {*tool["function"]["parameters"]["properties"]} for tool in definitions)
