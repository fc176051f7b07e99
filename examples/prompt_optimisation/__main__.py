"""`python -m examples.prompt_optimisation`: services, a first prompt, a search, and the question which version was worth what."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

from commands.demo.settings import SETTINGS, store_and_gateway, write_settings
from examples.prompt_optimisation.models import serving
from examples.prompt_optimisation.task import FIRST_PROMPT, tasks
from spangrad.processes import free_ports, own_command
from spangrad.settings.sources import explain_settings
from spangrad.supervisor.launcher import launch_without_settings
from spangrad.supervisor.run_directory import fresh_directory
from spangrad.supervisor.service import ServiceSpec
from spangrad.supervisor.supervisor import Supervisor

HERE = Path(__file__).parent
CHECKOUT = HERE.parents[1]
WORTH = """
SELECT r.Attributes['spangrad.prompt.version'] AS Version, count() AS Rollouts,
    round(avg(toFloat64(e.Attributes['gen_ai.evaluation.score.value'])), 3) AS MeanReward
FROM spangrad.rollout_spans AS r JOIN spangrad.rollout_spans AS e ON r.TraceId = e.TraceId AND r.SpanId = e.SpanId
WHERE r.RowKind = 'span' AND r.SpanName = 'rollout' AND e.RowKind = 'evaluation_event'
GROUP BY Version ORDER BY Version
"""


def settings_of(directory: Path, models: str) -> dict[str, object]:
    """Free ports, everything under `directory`, both models behind the gateway."""
    *ports, queue = free_ports(5)
    return {
        **store_and_gateway(directory, ports),
        "gateway.engine_url": "",
        "gateway.backends": [{"url": models, "policy": policy, "kind": "openai"} for policy in ("policy", "critic")],
        "runner.directory": str(directory / "runner"),
        "queue.port": queue,
        "queue.url": f"http://127.0.0.1:{queue}",
        "queue.db": f"sqlite:///{directory}/queue.db",
        "prompts.model": "critic",
        "prompts.variable": "SYSTEM_PROMPT",
        "prompts.rounds": 2,
        "prompts.branch": 2,
        "prompts.minibatch": 4,
    }


def run(directory: Path, seed: int) -> dict[str, object]:
    """The whole example; what the search has found."""
    directory = directory.resolve()
    with fresh_directory(directory) as fresh:
        fresh.clear()
        return _run(directory, seed)


def _run(directory: Path, seed: int) -> dict[str, object]:
    file = directory / SETTINGS
    for name, count in (("tasks", 8), ("held_out", 8)):
        drawn = tasks(seed + (name == "held_out"), count)
        lines = [json.dumps({**task, "task_id": f"{name}-{task['task_id']}"}) for task in drawn]
        (directory / f"{name}.jsonl").write_text("\n".join(lines) + "\n")
    (directory / "first.txt").write_text(FIRST_PROMPT)
    with ExitStack() as stack:
        values = settings_of(directory, stack.enter_context(serving()))
        write_settings(file, explain_settings(values, env={}))
        urls = {
            "store": f"{values['store.url']}/ping",
            "queue": f"{values['queue.url']}/readyz",
            "gateway": f"{values['gateway.url']}/readyz",
        }
        services = [
            ServiceSpec(name, tuple(own_command(name, "--config", str(file))), directory / f"{name}.log", url) for name, url in urls.items()
        ]
        stack.enter_context(Supervisor(services, print, launch=launch_without_settings)).start(60)
        _spangrad(file, "prompt", "put", "dates", str(directory / "first.txt"))
        files = ["--tasks", str(directory / "tasks.jsonl"), "--held-out", str(directory / "held_out.jsonl")]
        judge = ["--evaluator", "examples.prompt_optimisation.task:score", "--directory", str(CHECKOUT)]
        agent = ["--", sys.executable, str(HERE / "agent.py")]
        _spangrad(file, "prompt", "optimise", "dates", *files, *judge, "--out", str(directory), then=agent)
        _spangrad(file, "prompt", "show", "dates", "--history")
        _spangrad(file, "sql", WORTH)
    return json.loads((directory / "result.json").read_text())


def _spangrad(file: Path, *words: str, then: list[str] | None = None) -> None:
    """Run a command as a user would."""
    print(f"\n$ spangrad {' '.join(words[:3])}", flush=True)
    subprocess.run([*own_command(*words), "--config", str(file), *(then or [])], check=True, cwd=CHECKOUT)


def main() -> None:
    """Parse and run."""
    parser = argparse.ArgumentParser(prog="python -m examples.prompt_optimisation")
    parser.add_argument("--directory", type=Path, default=Path("runs/prompt_optimisation"), help="emptied at the start")
    parser.add_argument("--seed", type=int, default=0, help="of the tasks")
    given = parser.parse_args()
    run(given.directory, given.seed)


if __name__ == "__main__":
    main()
