"""`spangrad run`: rollouts of an agent on tasks."""

from __future__ import annotations

import asyncio
import itertools
import sys
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import TYPE_CHECKING

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.training.agents import AgentOptions, ProgramArguments, agents_of, end_signal, handler_of, require_loadable, run_until_sigterm
from spangrad.agent.reward_values import total
from spangrad.client.task_files import read_tasks
from spangrad.client.task_store import STORED, TaskStore
from spangrad.errors import AgentError
from spangrad.http.readiness import await_services, needs_of_rollouts
from spangrad.processes import raise_files_limit
from spangrad.types import Mode, Task

if TYPE_CHECKING:
    from runner.runner import Outcome
    from runner.workers.agents import AgentsBySource, AgentSpec
    from spangrad.settings import RunnerSettings, Settings

_LINE = 200
"""Longest line of an agent's output that is printed, in characters."""


def run(
    program: str | None = None,
    /,
    *arguments: ProgramArguments,
    tasks: str | None = None,
    options: AgentOptions | None = None,
    mode: Mode = Mode.TRAIN,
    group_size: int | None = None,
    run_id: str | None = None,
    resume: bool = False,
    follow_demand: bool = False,
    seed: int = 0,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Run an agent on tasks, with several rollouts per task, and print the mean reward of each task.

    Without an agent, each task is run by the handler of its data source (runner.handlers).

    Args:
        program: program of the agent, after `--`: it reads a task's input as JSON on standard input, and the last line of its output is
            its answer. Or FILE.py with a function that is decorated with @spangrad.rollout.
        arguments: arguments of the program.
        tasks: FILE.jsonl of lines {"task_id": ..., "input": ...}, FILE.parquet, DIRECTORY[:SPLIT] written by Dataset.save_to_disk,
            hf:OWNER/NAME[:[CONFIG:]SPLIT] on Hugging Face's hub, or queue:NAME for tasks that a client has uploaded. Required without
            --resume.
        mode: purpose of the rollouts; only rollouts of the modes in trainer.modes are trained.
        group_size: number of rollouts per task; default: runner.group_size.
        run_id: id of the run that the rollouts belong to; default: runner.run_id.
        resume: finish the rollouts that a killed process left of the run, without starting new ones.
        follow_demand: run as many groups as the trainers of the run request from the queue at queue.url, on tasks in random order.
            Ends at SIGTERM or Ctrl-C, as a worker does.
        seed: random seed of the order of tasks with --follow-demand.
    """
    settings = resolve(config, set_, {"runner.group_size": group_size, "runner.run_id": run_id})
    log_to_stderr()
    raise_files_limit()
    if resume != (tasks is None):
        raise AgentError(
            "give --tasks FILE, or --resume: what a process that was killed has left is finished before anything new is begun."
        )
    if follow_demand and (tasks is None or settings.queue.url is None):
        raise AgentError("--follow-demand needs --tasks FILE, and queue.url: the queue to which trainers report their demand.")
    agents = agents_of(settings.runner, handler_of(program, arguments, options))
    require_loadable(agents, settings.runner)
    # A file that cannot be read ends the command at once; tasks that the queue holds are read when it answers.
    stored = TaskStore.of(settings) if tasks is not None and tasks.startswith(STORED) else None
    read = None if tasks is None or stored else read_tasks(tasks)
    await_services(needs_of_rollouts(settings), settings.engine.start_timeout_seconds)
    if tasks is not None and stored:
        read = stored.read(tasks.removeprefix(STORED))
    if follow_demand and read is not None:
        asyncio.run(_follow(settings, agents, read, seed))
        return
    outcomes = run_until_sigterm(_run(settings, agents, read, mode))
    _show(outcomes)
    _explain(outcomes, settings.runner)
    if outcomes and all(outcome.failure for outcome in outcomes):
        sys.exit(1)


async def _follow(settings: Settings, agents: AgentSpec | AgentsBySource, tasks: Sequence[Task], seed: int) -> None:
    from runner.runner import Runner

    ending = end_signal()
    async with Runner(settings, agents) as runner:
        await runner.follow(tasks, ending, seed=seed)


async def _run(settings: Settings, agents: AgentSpec | AgentsBySource, tasks: Sequence[Task] | None, mode: Mode) -> list[Outcome]:
    """Run rollouts of the tasks, or finish the rollouts that are left of the run if `tasks` is None."""
    from commands.console import rollout_progress
    from runner.runner import Runner
    from spangrad.greedy_baseline import wants_greedy

    async with Runner(settings, agents, resume=tasks is None) as runner:
        size = settings.runner.group_size
        total = len(await runner.waiting()) if tasks is None else len(tasks) * (size + wants_greedy(settings, mode))
        ended = itertools.count(1)
        with rollout_progress("running") as show:
            show(0, total)

            def on_end(_: Outcome) -> None:
                show(next(ended), total)

            if tasks is None:
                return await runner.finish(on_end)
            return await runner.run(tasks, mode=mode, group_size=size, progress=on_end)


def _show(outcomes: Sequence[Outcome]) -> None:
    from commands.console import print_table

    greedy = ["greedy"] if any(outcome.mode is Mode.GREEDY for outcome in outcomes) else []
    by_task: defaultdict[str, list[Outcome]] = defaultdict(list)
    for outcome in outcomes:
        by_task[outcome.task_id].append(outcome)
    rows: list[tuple[object, ...]] = []
    for task_id, of_task in by_task.items():
        means = [_mean([outcome for outcome in of_task if (outcome.mode is Mode.GREEDY) is greedily]) for greedily in (False, True)]
        failed, calls = sum(outcome.failure is not None for outcome in of_task), sum(outcome.calls or 0 for outcome in of_task)
        rows.append((task_id, len(of_task), *means[: 1 + len(greedy)], failed, calls))
    print_table(("task", "rollouts", "mean reward", *greedy, "failed", "calls"), rows)


def _explain(outcomes: Sequence[Outcome], runner: RunnerSettings) -> None:
    """Print the reasons of failures, each with its number and an example; and hints on rewards or calls that the table does not have."""
    failed = [outcome for outcome in outcomes if outcome.failure]
    for reason, count in Counter(outcome.failure for outcome in failed).most_common():
        example = next(outcome for outcome in failed if outcome.failure is reason)
        rollout_id = example.key.rollout_id
        print(f"{count} failed, {reason}: {_what_happened(example, runner)}; see `spangrad rollout show {rollout_id}`")
    rewarded = [outcome for outcome in outcomes if outcome.failure is None and not outcome.reward]
    if rewarded:
        print(
            f"{len(rewarded)} recorded rewards on the spans of the agent; see `spangrad rollout show {rewarded[0].key.rollout_id}`, or the "
            "table spangrad.rollouts"
        )
    if len(failed) < len(outcomes) and all(outcome.calls == 0 for outcome in outcomes):
        print("no rollout called the policy: agents find the gateway in OPENAI_BASE_URL, or in their argument `endpoint`")


def _what_happened(outcome: Outcome, runner: RunnerSettings) -> str:
    """Return the first and the last line of a failed attempt's detail and log."""
    from runner.workers.attempt_files import AttemptFiles

    log = AttemptFiles(runner.directory, runner.attempts_kept).tail(outcome.key.rollout_id, outcome.key.attempt)
    return first_and_last_line(f"{outcome.detail}\n{log}")


def first_and_last_line(text: str) -> str:
    """Return the first and the last line of a text that are not empty; a last one that ends with the first is left out."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [""]
    first, last = lines[0], lines[-1]
    return first[:_LINE] if last.endswith(first) else f"{first[:_LINE]}: {last[:_LINE]}"


def _mean(outcomes: Sequence[Outcome]) -> str:
    returns = [total(outcome.reward) for outcome in outcomes if outcome.reward]
    return f"{sum(returns) / len(returns):+.3f}" if returns else "-"
