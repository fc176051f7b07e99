"""Agents that command lines name."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest

from commands.services.up import up
from commands.training.agents import AgentOptions, agent_spec, agents_of, require_loadable
from commands.training.run import first_and_last_line
from runner.workers.agents import AgentSpec, CallableAgent, CommandAgent, ContainerAgent
from spangrad.cli import app
from spangrad.errors import AgentError
from spangrad.settings import RunnerSettings
from spangrad.settings.runner import ContainerSettings, HandlerSettings


def spec(*command: str, runner: RunnerSettings | None = None, **words: Any) -> AgentSpec:
    return agent_spec(HandlerSettings(command=list(command), **words), runner or RunnerSettings())


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "parts").mkdir()
    for name in ("solver.py", "parts/judge.py"):
        (tmp_path / name).write_text("")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_agent_spec_from_each_form_of_arguments(project: Path) -> None:
    solver, judge = str(project / "solver.py"), str(project / "parts" / "judge.py")
    assert spec("solver.py") == spec(agent="solver.py") == CallableAgent(solver)
    assert spec("solver.py:solve", evaluator="parts/judge.py:score") == CallableAgent(f"{solver}:solve", evaluator=f"{judge}:score")
    assert spec(agent="judge.py:a", directory=Path("parts")) == CallableAgent(f"{judge}:a", directory=Path("parts"))
    assert spec(agent="solver:solve", evaluator="judge:score") == CallableAgent("solver:solve", evaluator="judge:score")
    assert spec("python", "solver.py", instrument=True) == CommandAgent(("python", "solver.py"), instrument=True)
    assert spec(image="org/agent:1", evaluator="judge:score") == ContainerAgent("org/agent:1", evaluator="judge:score")
    asked = RunnerSettings(container=ContainerSettings(engine="podman", network="mine", arguments=["--gpus", "all"], address="host"))
    assert spec("solver.py", "--fast", image="org/agent", runner=asked) == ContainerAgent(
        "org/agent", ("solver.py", "--fast"), container=asked.container
    )
    names = [spec("solver.py:solve"), spec(agent="parts.judge:a"), spec("./run.sh"), spec(image="registry:5000/org/agent:1@sha256:0")]
    assert [agent.name for agent in names] == ["solver", "parts.judge", "run.sh", "agent"]


@pytest.mark.parametrize(
    ("command", "words", "message"),
    [
        ((), {}, "name one agent: FILE.py, --agent MODULE:FUNCTION, --image IMAGE, a command after `--`, or only --environment"),
        (("python", "a.py"), {"agent": "solver.py"}, "name one agent"),
        ((), {"agent": "solver.py", "image": "agent"}, "name one agent"),
        (("other.py",), {}, "other.py is no file. Name one that exists."),
        (("solver.py:solve", "--grop-size", "4"), {}, "solver.py:solve is followed by '--grop-size', and a file whose function is called"),
        (("judge.py", "--x"), {"directory": Path("parts")}, "judge.py is followed by '--x'"),
        ((), {"agent": "solver:a", "evaluator": "no.py:b", "directory": Path("parts")}, "no.py is no file, neither here nor in parts."),
    ],
)
@pytest.mark.usefixtures("project")
def test_agent_spec_with_invalid_arguments_raises(command: tuple[str, ...], words: dict[str, Any], message: str) -> None:
    with pytest.raises(AgentError) as raised:
        spec(*command, **words)
    assert str(raised.value).startswith(message)


def test_agents_of_without_an_agent_are_those_of_the_handlers(project: Path) -> None:
    handlers = {
        "math": HandlerSettings(agent="solver.py:solve", evaluator="judge.py:score", on_failure="judge.py:rescue", directory=Path("parts")),
        "code": HandlerSettings(image="org/agent:1", command=["--fast"], container=ContainerSettings(engine="podman")),
    }
    runner = RunnerSettings(handlers=handlers, concurrency=3)
    judge = project / "parts" / "judge.py"
    assert agents_of(runner, HandlerSettings()) == {
        "math": CallableAgent(
            f"{project / 'solver.py'}:solve", evaluator=f"{judge}:score", directory=Path("parts"), on_failure=f"{judge}:rescue"
        ),
        "code": ContainerAgent("org/agent:1", ("--fast",), container=ContainerSettings(engine="podman")),
    }
    assert runner.of_handler("code").container.engine == "podman"
    assert runner.of_handler("math") == runner
    assert agents_of(runner, HandlerSettings(agent="solver:solve")) == CallableAgent("solver:solve")
    with pytest.raises(AgentError, match="--evaluator and --instrument belong to an agent"):
        agents_of(runner, HandlerSettings(evaluator="judge.py:score"))
    with pytest.raises(AgentError, match=r"runner\.handlers\.none: name one agent"):
        agents_of(RunnerSettings(handlers={"none": HandlerSettings()}), HandlerSettings())


@pytest.mark.parametrize(
    ("handler", "message"),
    [
        ({"agent": "nowhere:solve"}, "there is no module 'nowhere' in {project}"),
        ({"agent": "pack.nowhere:solve"}, "there is no module 'pack.nowhere' in {project}"),
        ({"agent": "pack.solver:slove"}, "{project}/pack/solver.py does not hold 'slove', which 'pack.solver:slove' names."),
        ({"agent": "pack/solver.py:slove"}, "{project}/pack/solver.py does not hold 'slove'"),
        ({"agent": "pack.solver:solve", "evaluator": "nowhere:score"}, "there is no module 'nowhere'"),
        ({"environment": "pack.solver:Game"}, "{project}/pack/solver.py does not hold 'Game'"),
        ({"command": ["nowhere", "-x"]}, "the agent's program 'nowhere' is neither in PATH nor in {project}."),
        ({"image": "a", "container": ContainerSettings(engine="nowhere")}, "the container engine 'nowhere' is not in PATH."),
    ],
)
def test_require_loadable_with_missing_parts_raises(project: Path, handler: dict[str, Any], message: str) -> None:
    _package(project)
    runner = RunnerSettings(handlers={"math": HandlerSettings(**handler)})
    with pytest.raises(AgentError) as raised:
        require_loadable(agents_of(runner, HandlerSettings()), runner)
    assert str(raised.value).startswith("runner.handlers.math: " + message.format(project=project))


def test_require_loadable_imports_no_module(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _package(project)
    with ZipFile(project / "archive.zip", "w") as archive:
        archive.writestr("zipped.py", "def score(): ...")
    monkeypatch.syspath_prepend(str(project / "archive.zip"))
    runner = RunnerSettings()
    for handler in (
        HandlerSettings(agent="pack.solver:solve", evaluator="http://127.0.0.1:1", environment="pack.solver:Outer.Inner"),
        HandlerSettings(agent="pack/solver.py"),
        HandlerSettings(agent="pack.solver:decorated"),
        HandlerSettings(agent="pack.solver:löse", evaluator="zipped:score"),
        HandlerSettings(agent="dynamic.part:any", evaluator="dynamic:any"),
        HandlerSettings(agent="json:loads"),
        HandlerSettings(environment="gymnasium:CartPole-v1"),
        HandlerSettings(command=["run.sh"], directory=Path("parts")),
    ):
        require_loadable(agents_of(runner, handler), runner)
    assert not {"pack", "pack.solver", "dynamic"} & sys.modules.keys()


def _package(project: Path) -> None:
    for name, text in {
        "pack/__init__.py": "raise SystemExit",
        "pack/solver.py": "def solve(): ...\ndef löse(): ...\nclass Outer: ...\nrollout(name='decorated')\nraise SystemExit",
        "dynamic.py": "def __getattr__(name): ...\nraise SystemExit",
        "parts/run.sh": "#!/bin/sh",
    }.items():
        (project / name).parent.mkdir(exist_ok=True)
        (project / name).write_text(text, "utf-8")
    (project / "parts" / "run.sh").chmod(0o755)


def test_run_arguments_accept_file_before_options() -> None:
    _, bound, _ = app.parse_args(["run", "solver.py:solve", "--tasks", "hf:mine/sums:dev"])
    assert (bound.args, bound.kwargs) == (("solver.py:solve",), {"tasks": "hf:mine/sums:dev"})
    _, bound, _ = app.parse_args(["worker", "--image", "org/agent:1", "--", "agent", "--fast"])
    assert (bound.args, bound.kwargs) == (("agent", "--fast"), {"options": AgentOptions(image="org/agent:1")})


@pytest.mark.parametrize("command", ["run", "worker", "up", "prompt optimise greeting --tasks t"])
def test_unknown_option_before_program_exits_2_with_near_option(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--confg", "f.toml"], ["--confg", "f.toml", "--", "python", "agent.py"], ["--set", "a.b=1", "--confg=f.toml", "python"]):
        with pytest.raises(SystemExit) as raised:
            app.parse_args([*command.split(), *words])
        assert raised.value.code == 2
        assert re.search(r"Unknown option: --confg\S*. Did you mean --config\?", capsys.readouterr().err)


@pytest.mark.parametrize("words", ["python a.py --x 1", "-- python a.py --x 1", "--run-id r -- --fast -x", "python -- -x"])
def test_options_after_program_or_dashes_are_the_agents(words: str) -> None:
    _, bound, _ = app.parse_args(["run", *words.split()])
    assert bound.args == tuple(word for word in words.removeprefix("--run-id r ").split() if word != "--")


@pytest.mark.parametrize("words", [("--agnet", "a.py:f"), ("--tasks", "t.jsonl", "--agnet", "a.py:f", "--", "python")])
def test_up_with_unknown_option_of_the_agent_exits_2(words: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as raised:
        up(*words, set_=["engine.model=m", "queue.url=http://127.0.0.1:8190"])
    assert raised.value.code == 2
    assert "Unknown option: --agnet. Did you mean --agent?" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("", ""),
        ("ValueError: no", "ValueError: no"),
        ("ValueError: no\n\nTraceback ...\nValueError: no\n", "ValueError: no"),
        ("SettingsError: no\nTraceback ...\nspangrad.errors.SettingsError: no", "SettingsError: no"),
        ("exit code 3\nloading\nno such file\n", "exit code 3: no such file"),
    ],
)
def test_first_and_last_line_of_a_failure_repeats_nothing(text: str, line: str) -> None:
    assert first_and_last_line(text) == line


@pytest.mark.parametrize(
    ("command", "name"),
    [
        (("bin/solve", "rules.py"), "solve"),
        (("/usr/bin/python3.11", "-u", "my/agent.py", "other.py"), "agent.py"),
        (("node", "--import", "@opentelemetry/auto-instrumentations-node/register", "agent.mjs"), "agent.mjs"),
        (("node", "--import", "./instrumentation.mjs", "-r", "dotenv.js", "agent.mjs"), "agent.mjs"),
        (("java", "-javaagent:opentelemetry-javaagent.jar", "-jar", "lib/agent.jar"), "agent.jar"),
        (("python", "-m", "agent"), "python"),
        (("bash", "-c", "cd my && python agent.py"), "bash"),
        (("sh", "-c", "echo 1"), "sh"),
    ],
)
def test_service_name_of_a_program_is_that_of_its_script(command: tuple[str, ...], name: str) -> None:
    assert CommandAgent(command).name == name
