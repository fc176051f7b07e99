"""`spangrad prompt`: prompts that agents fetch, and the search for better ones."""

from __future__ import annotations

import asyncio
import json
import os
import random
import signal
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.training.agents import Command, agent_spec
from spangrad.client.prompt_store import PromptStore
from spangrad.client.task_files import read_tasks
from spangrad.errors import PromptError

if TYPE_CHECKING:
    from prompts.search import Question, Result
    from runner.workers.agents import AgentSpec
    from spangrad.settings import Settings
    from spangrad.types import Task

_PIPE_WIDTH = 200
_PATIENCE_SECONDS = 5
"""People do not wait for a server that is away."""

prompt = App(name="prompt", help="Prompts that agents fetch: keep versions of them, look for better ones.")


@prompt.command(name="list")
def _list(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the prompts, each with the version that is published, else its newest."""
    from rich.table import Table

    table = Table("prompt", "version", "published", "characters", "since", box=None, pad_edge=False)
    for one in _store(resolve(config, set_), _PATIENCE_SECONDS).newest():
        table.add_row(one.name, str(one.version), "yes" if one.published else "no", str(len(one.text)), _time(one.created_at))
    _print(table)


@prompt.command(name="show")
def _show(name: str, /, *, version: int | None = None, history: bool = False, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print a prompt's text, or its history.

    Args:
        name: of the prompt.
        version: this one; by default the one that is published.
        history: instead of the text, a line a version: what it was edited from, and why.
    """
    store = _store(resolve(config, set_), _PATIENCE_SECONDS)
    if not history:
        print(store.get(name, version).text)
        return
    from rich.table import Table

    versions = store.versions(name)
    if not versions:
        raise PromptError(
            f"there is no prompt {name}. `spangrad prompt list` shows what there is, `spangrad prompt put {name} FILE` makes it."
        )
    edits = {edit.version: edit for edit in reversed(store.edits(name))}
    table = Table("version", "published", "since", "parent", "round", "search", "critique", box=None, pad_edge=False)
    for one in versions:
        edit = edits.get(one.version)
        of = (str(edit.parent), str(edit.round), edit.search, " ".join(edit.critique.split())[:80]) if edit else ("-", "-", "-", "")
        table.add_row(str(one.version), "yes" if one.published else "", _time(one.created_at), *of)
    _print(table)


@prompt.command(name="put")
def _put(
    name: str,
    file: Annotated[str, Parameter(allow_leading_hyphen=True)],
    /,
    *,
    publish: bool = True,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Keep a file's text as a version, and publish it. A text that was there before is the version that it was.

    Args:
        name: of the prompt: letters, digits, dots, dashes.
        file: with the text, which is kept as it is; `-`: standard input.
        publish: whether agents get it from now on.
    """
    if file != "-" and not Path(file).is_file():
        raise PromptError(f"{file} is no file. Name one that holds the prompt's text, or `-` for standard input.")
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        where = "standard input" if file == "-" else file
        raise PromptError(f"{where} is not UTF-8 at byte {error.start} ({error.reason}). Give the prompt's text in UTF-8.") from None
    kept = _store(resolve(config, set_), _PATIENCE_SECONDS).put(name, text, publish=publish)
    print(f"{kept.name}@{kept.version}{' (published)' if kept.published else ''}")


@prompt.command(name="optimise")
def _optimise(
    name: str,
    /,
    *command: Command,
    tasks: Path,
    held_out: Path | None = None,
    agent: str | None = None,
    image: str | None = None,
    evaluator: str | None = None,
    environment: str | None = None,
    directory: Path = Path(),
    instrument: bool = False,
    out: Path | None = None,
    publish: bool = True,
    rounds: int | None = None,
    seed: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Search for a better version of a prompt: run the agent with it, have a model criticise and edit it, keep what scores best.

    The same command, given again, goes on where it was ended. Trials are rollouts of mode `trial`, which are never trained.

    Args:
        name: of the prompt; its published version is where the search begins.
        command: after `--`: a program, as in `spangrad run`.
        tasks: file of JSON lines, each {"task_id": ..., "input": ...}.
        held_out: another such file: the tasks that candidates are measured on. Without it, prompts.held_out of the tasks are.
        agent: a Python callable, as MODULE:FUNCTION, instead of a command.
        image: as in `spangrad run`.
        evaluator: as in `spangrad run`: MODULE:FUNCTION that is given (input, output) and returns the reward, or a service's address.
        environment: as in `spangrad run`.
        directory: where the agent's modules, or its program's files, are.
        instrument: start the command under opentelemetry-instrument.
        out: directory for result.json and curve.png; by default data/prompts/NAME-SEARCH.
        publish: publish the best version where it is significantly better (prompts.max_p).
        rounds: prompts.rounds.
        seed: prompts.seed.
    """
    settings = resolve(config, set_, {"prompts.rounds": rounds, "prompts.seed": seed})
    log_to_stderr()
    if settings.runner.queue_url is None:
        raise PromptError("set runner.queue_url to where `spangrad queue` listens: it keeps the prompts, and agents fetch them there.")
    spec = agent_spec(command, agent, evaluator, directory, settings.runner, instrument=instrument, image=image, environment=environment)
    start = _store(settings).get(name)
    learn, measured = _split(read_tasks(tasks), None if held_out is None else read_tasks(held_out), settings)
    from prompts.search import Question, search_id

    agent_words = [*spec.host_arguments(), str(spec.directory.resolve())]
    question = Question(search_id(start, learn, measured, settings, agent_words), start, tuple(learn), tuple(measured))
    try:
        result = asyncio.run(_search(settings, spec, question))
    except asyncio.CancelledError:
        sys.exit(128 + signal.SIGTERM)
    _finish(settings, result, out or Path("data/prompts") / f"{name}-{question.id}", publish=publish)


def _finish(settings: Settings, result: Result, out: Path, *, publish: bool) -> None:
    """Write what was found, publish it, print it.

    In this order: what has published is written, since the same command then begins a new search; and nothing that is printed can keep
    the best version from its agents.
    """
    from prompts.report import as_object, as_table, plot

    start, best = result.question.start, result.best
    better = best.version != start.version and result.gain.mean > 0 and result.gain.p <= settings.prompts.max_p
    out.mkdir(parents=True, exist_ok=True)
    partial = out / "result.json.part"
    partial.write_text(json.dumps(as_object(result, published=publish and better), indent=2, ensure_ascii=False) + "\n")
    partial.replace(out / "result.json")
    try:
        plot(result, out / "curve.png")
    except ImportError:
        print("no curve.png: matplotlib is not installed", file=sys.stderr)
    if publish and better:
        _store(settings).put(start.name, best.text)
    _print(as_table(result))
    print(f"{out / 'result.json'}: gain {result.gain.mean:+.3f} over version {start.version}, p {result.gain.p:.3g}")
    if publish and better:
        print(f"published {start.name}@{best.version}")
    else:
        why = "as --no-publish says" if better else f"no version is better with p <= {settings.prompts.max_p:g}"
        print(f"published stays {start.name}@{start.version}: {why}")


async def _search(settings: Settings, spec: AgentSpec, question: Question) -> Result:
    from commands.training.prompt_progress import shown
    from prompts.critic import Critic
    from prompts.search import Search
    from prompts.trials import Trials
    from runner.runner import Outcome, Runner
    from spangrad.store.clickhouse import connect
    from spangrad.types import Mode

    run_id = f"prompt-{question.start.name}-{question.id}"
    settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"run_id": run_id})})
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    client = connect(settings.store)
    trials = Trials(client, settings.store.url, run_id, question.start.name)
    with shown(run_id, settings.prompts.rounds) as progress:
        async with Runner(settings, spec) as runner, Critic(settings, run_id) as critic:

            def ended(outcome: Outcome) -> None:
                progress.now(progress.doing, progress.done + 1, progress.of)

            async def run(tasks: Sequence[Task]) -> list[str]:
                outcomes = await runner.run(tasks, mode=Mode.TRIAL, group_size=1, progress=ended)
                return [one.key.rollout_id for one in outcomes]

            await runner.finish()  # what a search that was killed has left in the queue
            return await Search(question, settings.prompts, _store(settings), trials, run, critic, progress).go()


def _split(tasks: Sequence[Task], held_out: Sequence[Task] | None, settings: Settings) -> tuple[list[Task], list[Task]]:
    """Tasks to learn from, and tasks to measure on.

    Raises:
        PromptError: two tasks have one name, or there are too few to split.
    """
    if held_out is None:
        if len(tasks) < 2:
            raise PromptError(
                "--tasks holds one task: give more, or --held-out FILE. Candidates are measured on tasks that no critique saw."
            )
        mixed = sorted(tasks, key=lambda task: task.task_id)
        random.Random(settings.prompts.seed).shuffle(mixed)
        count = min(max(1, round(len(mixed) * settings.prompts.held_out)), len(mixed) - 1)
        tasks, held_out = mixed[count:], mixed[:count]
    names = [task.task_id for task in (*tasks, *held_out)]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise PromptError(f"task {twice[0]} is there twice: each task_id names one task, which is either learnt from or held out.")
    return list(tasks), list(held_out)


def _store(settings: Settings, patience_seconds: float = 30) -> PromptStore:
    from runner.queue.client import default_url

    runner = settings.runner
    token = runner.queue_token.get_secret_value() if runner.queue_token else None
    return PromptStore(runner.queue_url or default_url(runner), token, patience_seconds=patience_seconds)


def _print(table: object) -> None:
    from commands.console import plain_console

    plain_console(int(os.environ.get("COLUMNS", _PIPE_WIDTH))).print(table)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
