"""Policies of sandboxes: what follows from settings, what is refused, what a program's environment has."""

from __future__ import annotations

import errno
import io
import os
import platform
import zipfile
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path
from typing import cast

import pytest

from runner.sandboxes.agent_sandbox import open_agent_sandbox, policy_of
from runner.sandboxes.engines import prepare
from runner.sandboxes.policy import RemoteServer, SandboxLimits, SandboxPolicy, interpreter_paths, require_narrow, services_of
from runner.sandboxes.remote import zipped
from runner.sandboxes.sandbox import Sandbox
from runner.tools.session import ToolSession
from runner.workers.agents import CallableAgent, CommandAgent
from spangrad.agent.command import SandboxLaunch
from spangrad.errors import SandboxError
from spangrad.settings import QueueSettings, RunnerSettings, Settings
from spangrad.types import SandboxRung

LIMITS = SandboxLimits(1, 1, 1)


def policy(directory: Path, *readable: Path) -> SandboxPolicy:
    return SandboxPolicy(directory, readable, {}, False, LIMITS)


def test_visible_paths_below_others_are_left_out(tmp_path: Path) -> None:
    (tmp_path / "below").mkdir()
    shown = policy(tmp_path, tmp_path / "below", Path("/usr/lib"), tmp_path / "missing").visible()
    assert [path for path in shown if tmp_path in (path, *path.parents)] == [tmp_path]
    assert Path("/usr/lib") not in shown
    assert Path("/etc/shadow") not in shown
    assert Path("/etc") not in shown


def descriptors() -> set[str]:
    return {entry.name for entry in Path("/proc/self/fd").iterdir()}


async def open_program() -> None:
    await Sandbox.open_process(cast("Sandbox", None), ["true"])


async def open_session() -> None:
    async with ToolSession.shell(cast("Sandbox", None), 1):
        pass


@pytest.mark.parametrize(("start", "count"), [(open_program, 1), (open_program, 2), (open_session, 0), (open_session, 1)])
async def test_program_start_without_descriptors_leaves_none_open(
    start: Callable[[], Awaitable[None]], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = descriptors()
    pipes = iter([os.pipe() for _ in range(count)])

    def pipe() -> tuple[int, int]:
        if (ends := next(pipes, None)) is None:
            raise OSError(errno.EMFILE, "Too many open files")
        return ends

    monkeypatch.setattr(os, "pipe", pipe)
    with pytest.raises(OSError, match="Too many open files"):
        await start()
    assert descriptors() == before


def test_require_narrow_home_directory_is_refused() -> None:
    with pytest.raises(SandboxError, match=r"would show its program all of /, .* runner.sandbox.readable"):
        require_narrow(policy(Path("/")))
    with pytest.raises(SandboxError, match="the home directory of this user included"):
        require_narrow(policy(Path("/usr"), Path.home()))


def test_services_of_remote_url_is_refused() -> None:
    assert services_of(["http://127.0.0.1:8080/v1", "http://localhost:4318"]) == {8080: ("127.0.0.1", 8080), 4318: ("localhost", 4318)}
    with pytest.raises(SandboxError, match=r"http://gateway.example:8080 is elsewhere.* runner.sandbox.network = host"):
        services_of(["http://gateway.example:8080"])


def test_interpreter_paths_of_virtual_environment_include_its_base(tmp_path: Path) -> None:
    base = tmp_path / "base/bin"
    environment = tmp_path / "venv/bin"
    for directory in (base, environment):
        directory.mkdir(parents=True)
    (base / "python").touch()
    (environment / "python").symlink_to(base / "python")
    (environment / "tool").touch()
    (tmp_path / "venv/pyvenv.cfg").write_text(f"home = {base}\nversion = 3.11.7\n")
    assert {*interpreter_paths(environment / "python")} == {tmp_path / "venv", tmp_path / "base"}
    assert {*interpreter_paths(environment / "tool")} == {tmp_path / "venv", tmp_path / "base"}


def test_interpreter_paths_of_a_program_below_home_are_its_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "home")
    for prefix, shown in ((tmp_path, "bin/tool"), (tmp_path / "home", "bin/tool"), (tmp_path / "home/tools", "")):
        (prefix / "bin").mkdir(parents=True)
        (program := prefix / "bin/tool").touch()
        assert [*interpreter_paths(program)] == [prefix / shown]


def test_upload_of_a_directory_has_files_from_before_zip(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    os.utime(tmp_path / "file", (0, 0))
    with zipfile.ZipFile(io.BytesIO(zipped(tmp_path))) as archive:
        assert archive.read("file") == b"x"


def test_policy_of_settings_names_services_and_limits(tmp_path: Path) -> None:
    settings = Settings(queue=QueueSettings(url="http://127.0.0.1:8190"))
    sandbox_policy = policy_of(settings, CommandAgent(("sh", "agent.sh"), directory=tmp_path))
    assert {*sandbox_policy.services} == {8180, 4318, 8190}
    assert sandbox_policy.directory == tmp_path
    assert sandbox_policy.limits == SandboxLimits(256, 4 * 2**30, 2**30)


def test_launch_environment_holds_allowed_variables_alone() -> None:
    launch = SandboxLaunch(("bwrap",), ("PATH",), {"HOME": "/tmp"}, (10,))
    variables = {"PATH": "/bin", "HOME": "/root", "SECRET": "s", "OPENAI_BASE_URL": "u", "SPANGRAD_HOST": "mark", "TRACEPARENT": "t"}
    assert launch.environment(variables) == {
        "PATH": "/bin", "HOME": "/tmp", "OPENAI_BASE_URL": "u", "SPANGRAD_HOST": "mark", "TRACEPARENT": "t",
    }  # fmt: skip


def test_rung_reaches_weaker_rungs_alone() -> None:
    assert SandboxRung.BUBBLEWRAP.reaches(SandboxRung.LANDLOCK)
    assert not SandboxRung.NONE.reaches(SandboxRung.LANDLOCK)
    assert not SandboxRung.REMOTE.reaches(SandboxRung.LANDLOCK)


def test_prepare_remote_sandbox_refuses_policies_beyond_the_protocol(tmp_path: Path) -> None:
    with pytest.raises(SandboxError, match=r"Set runner\.sandbox\.url"):
        prepare(replace(policy(tmp_path), engine=SandboxRung.REMOTE))
    remote = replace(policy(tmp_path), engine=SandboxRung.REMOTE, remote=RemoteServer("http://sandboxes:8000"))
    assert prepare(remote).remote == remote.remote
    with pytest.raises(SandboxError, match="the home directory of this user included"):
        prepare(replace(remote, directory=Path("/")))
    for demanding, name in (
        (replace(remote, readable=(tmp_path,)), "files"),
        (replace(remote, services={80: ("127.0.0.1", 80)}), "services"),
    ):
        with pytest.raises(SandboxError, match=f"cannot hand on the .*{name} of a policy"):
            prepare(demanding)


async def test_program_without_a_sandbox_warns_once_with_program_place_and_remedy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with open_agent_sandbox(Settings(), CommandAgent(("solve.sh", "--key", "secret"), directory=tmp_path)) as sandbox:
        assert sandbox is None
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"program solve.sh runs without a sandbox in {tmp_path} on {platform.node()}, ")
    assert "Set runner.sandbox.engine = auto" in record.getMessage()
    assert "secret" not in record.getMessage()


async def test_function_without_a_sandbox_warns_of_nothing(caplog: pytest.LogCaptureFixture) -> None:
    async with open_agent_sandbox(Settings(), CallableAgent("json:loads")):
        assert not caplog.records


@pytest.mark.parametrize(
    ("sandbox", "sentence"),
    [
        ({"engine": "remote", "url": "http://sandboxes:8000"}, "cannot run an agent that reaches gateway and store"),
        ({"image": "images/agent.tar"}, r"image = images/agent\.tar needs a sandbox\. Set runner\.sandbox\.engine = auto"),
    ],
)
async def test_open_agent_sandbox_that_cannot_keep_settings_is_refused(sandbox: object, sentence: str, tmp_path: Path) -> None:
    settings = Settings(runner=RunnerSettings.model_validate({"sandbox": sandbox}))
    with pytest.raises(SandboxError, match=sentence):
        async with open_agent_sandbox(settings, CommandAgent(("true",), directory=tmp_path)):
            pass
