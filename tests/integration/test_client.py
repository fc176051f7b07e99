"""`spangrad.Client` in scripts of their own, against a real queue server and real workers; gateway and store are small."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import textwrap
from collections import Counter
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from spangrad import semconv
from spangrad.agent.prompt_store import PromptStore
from spangrad.client.client import TEST, TRAIN, Client
from spangrad.client.queue_http import QueueHttp
from spangrad.errors import PromptError, SettingsError
from spangrad.processes import wait_until
from spangrad.settings import Settings
from spangrad.types import Mode, PromptVersion, Rollout, Task
from tests.support.runners import RunnerServices, queue_server, queue_settings, runner_services

EXAMPLE = Path(__file__).parents[2] / "examples" / "client" / "sums.py"
OURS = ("runner", "gateway", "collector", "trainer", "transition_builder", "commands", "dashboards", "tests")


@dataclass
class Place:
    """A queue server, and what else a client needs."""

    services: RunnerServices
    settings: Settings

    @property
    def url(self) -> str:
        """The queue's."""
        return self.settings.queue.url or ""

    def queue(self, run_id: str) -> QueueHttp:
        """Return a queue client through which a test inspects a run."""
        return QueueHttp(self.url, None, run_id, retry_seconds=5)

    def start(self, script: Path, *words: str) -> subprocess.Popen[str]:
        """The script, as a user runs it."""
        settings = {
            "SPANGRAD_STORE__OTLP_ENDPOINT": self.services.settings.store.otlp_endpoint,
            "SPANGRAD_GATEWAY__URL": self.services.settings.gateway.url,
            "SPANGRAD_RUNNER__DIRECTORY": str(self.services.directory / "runner"),
            "OTEL_PYTHON_DISABLED_INSTRUMENTATIONS": "langchain,openai,httpx,httpx2",
        }
        command = [sys.executable, script.name, self.url, *words]
        return subprocess.Popen(
            command, cwd=script.parent, env=os.environ | settings, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )

    def run(self, script: Path, *words: str) -> tuple[int, str, str]:
        """The same, until it ends: its code, what it printed, what it said."""
        process = self.start(script, *words)
        try:
            out, err = process.communicate(timeout=200)
        finally:
            process.kill()
        return process.returncode, out, err

    def modes(self) -> Counter[str]:
        """Root spans that the store has, by mode."""
        return Counter(str(root[semconv.ROLLOUT_MODE]) for root in self.services.roots().values())


@contextmanager
def place(directory: Path) -> Generator[Place]:
    settings = queue_settings(f"sqlite:///{directory}/queue.db")
    with runner_services(directory) as services, queue_server(settings, directory / "queue.log"):
        services.gateway.reply = _reply
        yield Place(services, settings)


def _reply(messages: list[dict[str, str]]) -> str:
    """Right below 50."""
    a, b = map(int, re.findall(r"\d+", messages[-1]["content"]))
    return f"It is {a + b if a < 50 else 0}"


def test_client_example_trains_with_shadowing_agent_modules(tmp_path: Path) -> None:
    script = tmp_path / "agent" / "sums.py"
    script.parent.mkdir()
    for name in OURS:  # none of them is what spangrad's own processes import
        (script.parent / f"{name}.py").write_text("MINE = True\n")
    source = EXAMPLE.read_text()
    assert "import spangrad\n" in source
    script.write_text(
        source.replace("import spangrad\n", f"import {', '.join(OURS)}\nimport spangrad\n\nassert runner.MINE and tests.MINE\n", 1)
    )
    with place(tmp_path) as on:
        code, out, err = on.run(script)
        assert code == 0, err
        first, *tests = out.splitlines()
        assert re.fullmatch(r"run sums: 8 groups in \d+ s; 32 rollouts \(32 succeeded\), mean reward \+0\.\d{3}", first)
        assert len(tests) in {1, 2}
        assert re.fullmatch(r"  test data after 8 groups: 4 rollouts \(4 succeeded\), mean reward \+\d\.\d{3}", tests[-1])
        assert on.modes() == {"train": 32, "validate": 4 * len(tests)}
        questions = [chat["messages"][0]["content"] for chat in on.services.gateway.chats]
        right = Counter(int(re.findall(r"\d+", question)[0]) < 50 for question in questions)
        rewards = [event[1][semconv.EVALUATION_SCORE] for root in on.services.sink.named("rollout") for event in root.events]
        assert Counter(reward == 1.0 for reward in rewards) == right
        assert on.services.processes() == []


SLOW = """
    import sys, time
    import spangrad
    from spangrad.errors import SpangradError

    def agent(task):
        time.sleep(0.2)
        return 1.0

    if __name__ == "__main__":
        settings = {"runner.group_size": 4, "runner.concurrency": 2, "runner.drain_seconds": 5}
        client = spangrad.Client(sys.argv[1], run_id="slow", settings=settings)
        groups = int(sys.argv[2]) if len(sys.argv) > 2 else None
        try:
            print(client.upload_data("tasks.jsonl").train(agent, groups=groups, idle_seconds=120))
        except KeyboardInterrupt:
            print("interrupted")
"""


def _slow(directory: Path) -> Path:
    (directory / "agent").mkdir()
    (directory / "agent" / "tasks.jsonl").write_text("".join(f'{{"question": {n}}}\n' for n in range(10)))
    script = directory / "agent" / "slow.py"
    script.write_text(textwrap.dedent(SLOW))
    return script


@pytest.mark.slow
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL])
def test_client_script_stopped_resumes_where_it_was(tmp_path: Path, how: signal.Signals) -> None:
    script = _slow(tmp_path)
    with place(tmp_path) as on:
        stopped = on.start(script)
        try:
            on.services.sink.wait_for(lambda: len(on.services.sink.named("rollout")) >= 3, 60)
            stopped.send_signal(how)
            out, err = stopped.communicate(timeout=60)
        finally:
            stopped.kill()
        if how is signal.SIGINT:
            assert out == "interrupted\n"
            assert "attempts may end for 5 s; what is not done by then stays in the queue" in err
            assert on.queue("slow").states().get("running") is None
        wait_until(lambda: not on.queue("slow").states().get("running"), 60, "the end of the workers that were left")
        assert on.queue("slow").states()["queued"] > 0
        code, out, err = on.run(script)
        assert code == 0, err
        assert out.startswith("run slow: 10 groups in ")
        assert on.queue("slow").states() == {"succeeded": 40}


@pytest.mark.slow
def test_client_with_trainer_demand_makes_demanded_groups(tmp_path: Path) -> None:
    script = _slow(tmp_path)
    with place(tmp_path) as on:
        want = {"policy": "policy", "branch": "main", "groups": 3}
        on.queue("slow").ask("PUT", "/demand", want)
        code, out, err = on.run(script, "3")
        assert code == 0, err
        assert re.match(r"run slow: 3 groups in \d+ s; 12 rollouts \(12 succeeded\), mean reward \+1\.000\n", out)
        assert on.queue("slow").states() == {"succeeded": 12}


def test_client_epochs_resume_only_those_with_open_rollouts(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    with queue_server(settings, tmp_path / "queue.log"):
        client = Client(settings.queue.url or "", run_id="again", settings={"runner.group_size": 2})
        client.upload_data([{"q": n} for n in range(600)], test_file=[{"q": -1}])
        (stored, tasks), (tests, test_tasks) = client._data[TRAIN], client._data[TEST]
        epochs = [client._rollouts(stored, tasks, epoch, Mode.TRAIN) for epoch in range(3)]
        client._enqueue([*epochs[0], *epochs[1]])
        assert client._epochs(stored, tasks, 1) == epochs[0]
        client._queue.ask("POST", "/v1/cancel", {"rollout_ids": [rollout.key.rollout_id for rollout in epochs[0]]})
        last = epochs[1].pop().key.rollout_id
        client._queue.ask("POST", "/v1/cancel", {"rollout_ids": [rollout.key.rollout_id for rollout in epochs[1]]})
        assert client._epochs(stored, tasks, 1)[-1].key.rollout_id == last
        client._enqueue(client._rollouts(tests, test_tasks, "interrupted", Mode.VALIDATE))
        client._queue.ask("POST", "/v1/cancel", {"rollout_ids": [last]})
        assert client._epochs(stored, tasks, 1) == epochs[2]


def test_client_epochs_of_killed_call_end_with_its_last_one(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    with queue_server(settings, tmp_path / "queue.log"):
        client = Client(settings.queue.url or "", run_id="again", settings={"runner.group_size": 2})
        client.upload_data([{"q": n} for n in range(3)])
        stored, tasks = client._data[TRAIN]
        epochs = [client._rollouts(stored, tasks, epoch, Mode.TRAIN) for epoch in range(4)]

        def end(rollouts: list[Rollout]) -> None:
            client._queue.ask("POST", "/v1/cancel", {"rollout_ids": [rollout.key.rollout_id for rollout in rollouts]})

        client._enqueue([*epochs[0], *epochs[1]])
        end(epochs[1])
        assert client._epochs(stored, tasks, 2) == [*epochs[0], *epochs[1]], "one that ended before an earlier one"
        assert client._epochs(stored, tasks, 3) == [*epochs[0], *epochs[1], *epochs[2]], "a call of more epochs is another one"
        end(epochs[0][1:])
        assert client._epochs(stored, tasks, 2) == [*epochs[0], *epochs[1]]
        end(epochs[0])
        assert client._epochs(stored, tasks, 2) == [*epochs[2], *epochs[3]]
        client._enqueue([*epochs[2], *epochs[3][:2]])
        assert client._epochs(stored, tasks, 2) == [*epochs[2], *epochs[3]], "killed while it enqueued"
        client._enqueue(epochs[3])
        end(epochs[2])
        assert client._epochs(stored, tasks, 2) == epochs[3]


def test_client_rollouts_keep_prompt_source_and_sampling(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    given = {
        "runner.group_size": 1,
        "runner.validation_sampling.temperature": 0.5,
        "runner.handlers": {"digits": {"agent": "sums:agent", "timeout_seconds": 7}},
        "prompts.pin": "solver",
    }
    sums = Task("sums", {"share": np.float64(0.5)}, data_source="digits")
    with queue_server(settings, tmp_path / "queue.log"):
        url = settings.queue.url or ""
        client = Client(url, run_id="facts", settings=given)
        client.upload_data([sums], test_file=[Task("pinned", 1, PromptVersion("other", 3)), sums])
        other = Client(url, run_id="facts", settings=given)  # reads the tasks from the queue
        train = client._rollouts(*client._required_data(TRAIN), 0, Mode.TRAIN)
        test = other._rollouts(*other._required_data(TEST), 0, Mode.VALIDATE)
        with pytest.raises(PromptError, match="solver"):
            client._enqueue(train)
        PromptStore(url).put("solver", "Solve it.")
        client._enqueue(train)
        other._enqueue(test)
        leases = client._queue.ask("POST", "/v1/leases", {"run_id": "facts", "worker": "worker", "count": 9})["leases"]
    assert [(lease["task_id"], lease.get("sampling"), lease["timeout_seconds"], lease["prompt"]["name"]) for lease in leases] == [
        ("pinned", {"temperature": 0.5}, 7, "other"),
        ("sums", {"temperature": 0.5}, 7, "solver"),
        ("sums", None, 7, "solver"),
    ]
    assert [lease.get("data_source") for lease in leases] == [None, "digits", "digits"]
    assert leases[-1]["input"] == {"share": 0.5}


def test_client_train_with_unusable_sampling_raises_first(tmp_path: Path) -> None:
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    given = {"runner.gateway": False, "runner.validation_sampling.temperature": 0}
    with queue_server(settings, tmp_path / "queue.log"):
        client = Client(settings.queue.url or "", settings=given).upload_data([{"q": 1}], test_file=[{"q": 2}])
        with pytest.raises(SettingsError, match="validation_sampling needs the gateway"):
            client.train(place)
        assert client._queue.states() == {}


def test_client_with_unpublished_prompt_starts_no_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Client, "_workers", None)
    settings = queue_settings(f"sqlite:///{tmp_path}/queue.db")
    with queue_server(settings, tmp_path / "queue.log"):
        client = Client(settings.queue.url or "", settings={"prompts.pin": "solver"}).upload_data([{"q": 1}], test_file=[{"q": 2}])
        for call in (client.train, client.validate):
            with pytest.raises(PromptError, match="solver"):
                call(place)


UNGUARDED = """
    import sys
    import spangrad

    def agent(task):
        return 1.0

    spangrad.Client(sys.argv[1]).upload_data([{"q": 1}]).train(agent)
"""


@pytest.mark.slow
def test_client_script_without_main_guard_gets_remedy(tmp_path: Path) -> None:
    script = tmp_path / "unguarded.py"
    script.write_text(textwrap.dedent(UNGUARDED))
    with place(tmp_path) as on:
        code, _, err = on.run(script)
        assert code == 1
        assert "worker 0 ended with exit code 1." in err
        assert "Put that under `if __name__ == '__main__':`" in err


def test_client_example_matches_script_in_docs() -> None:
    """The page's script has the example's lines, in their order."""
    page = (EXAMPLE.parents[2] / "docs" / "guides" / "client.md").read_text()
    shown = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert shown
    lines = iter(EXAMPLE.read_text().splitlines())
    assert [line for line in shown[1].splitlines() if line.strip() and line not in lines] == []
