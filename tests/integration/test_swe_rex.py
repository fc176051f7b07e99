"""Sandboxes by SWE-ReX's routes: its own package, unmodified, acts in one of ours."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest
from opentelemetry.context import Context
from pydantic import SecretStr

from benchmarks.peers.environment import peer_environment
from runner.sandboxes.policy import SandboxLimits, SandboxPolicy
from runner.swe_rex.server import running
from spangrad.agent.propagation import context_from
from spangrad.errors import SandboxError
from spangrad.settings import Settings, StoreSettings, ToolServiceSettings
from tests.support.otlp import OtlpSink

LIMITS = SandboxLimits(processes=64, memory_bytes=2**30, disk_bytes=2**24)
CLIENT = Path(__file__).resolve().parent.parent / "programs" / "swe_rex_client.py"


@pytest.fixture(scope="module")
def policy() -> Generator[SandboxPolicy]:
    with tempfile.TemporaryDirectory() as base:
        Path(base).chmod(0o755)
        yield SandboxPolicy(Path(base), (), {}, False, LIMITS)


async def client(url: str, key: str) -> tuple[int | None, str, str]:
    """The package's client, and what it printed."""
    host, _, port = url.rpartition(":")
    process = await asyncio.create_subprocess_exec(
        await asyncio.to_thread(lambda: peer_environment("swe_rex") / "python"), "-P", CLIENT, host, port, key,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    stdout, stderr = await process.communicate()
    return process.returncode, stdout.decode(), stderr.decode()


async def test_remote_runtime_acts_in_a_sandbox_of_ours(policy: SandboxPolicy) -> None:
    parent = context_from({"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-01", "baggage": "spangrad.rollout.id=ro"}, Context())
    with OtlpSink() as sink:
        settings = Settings(tools=ToolServiceSettings(port=0, token=SecretStr("key")), store=StoreSettings(otlp_endpoint=sink.url))
        try:
            async with running(settings, policy, "auto", parent) as url:
                code, stdout, stderr = await client(url, "key")
                refused, _, why = await client(url, "wrong")
        except SandboxError as error:
            pytest.skip(str(error))
        assert code == 0, stderr
        seen = json.loads(stdout.splitlines()[-1])
        assert seen.pop("raise")[1].startswith("mine: Command 'exit_code() { return 3; }; exit_code' failed with exit code 3.")
        assert "syntax error" in seen.pop("syntax")[1]
        assert seen == {
            "alive": True,
            "kept": ["hello yes\n/tmp\n", 0],
            "silent": 1,
            "timeout": "CommandTimeoutError",
            "interrupted": 130,
            "other_session": "SessionDoesNotExistError",
            "execute": ["/tmp\n1\n", "bad\n", 4],
            "shell": "b\nc\n",
            "check": "NonZeroExitCodeError",
            "slow": "CommandTimeoutError",
            "missing": "FileNotFoundError",
            "uploaded": ["uploaded", "uploaded"],
            "closed": "SessionDoesNotExistError",
            "fresh": 1,
        }
        assert refused
        assert "401" in why
        spans = [span for span in sink.spans if span.name.startswith("execute_tool ")]
        assert {(span.trace_id, span.attributes["spangrad.rollout.id"]) for span in spans} == {("ab" * 16, "ro")}
        assert {span.name.split()[1] for span in spans} == {"shell", "execute", "read_file", "write_file", "upload"}
