"""`spangrad prompt`: versions of agents' prompts, and the search for better ones."""

from __future__ import annotations

import json
import random
import sys
from collections import Counter
from collections.abc import Sequence
from contextlib import aclosing
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from commands.options import ConfigFile, Overrides, log_to_stderr, resolve
from commands.output_files import make_directory_of
from commands.training.agents import AgentOptions, ProgramArguments, agent_spec, handler_of, run_until_sigterm
from spangrad.agent.prompt_store import PromptStore
from spangrad.client.task_files import read_tasks
from spangrad.errors import PromptError

if TYPE_CHECKING:
    from prompts.search import Question, SearchResult
    from runner.workers.agents import AgentSpec
    from spangrad.settings import Settings
    from spangrad.types import Task

_CONNECT_SECONDS = 5
"""Longest time that a command retries while the queue's server does not answer, in seconds."""

prompt = App(name="prompt", help="Keep versions of agents' prompts, search better ones.")


@prompt.command(name="list")
def _list(*, config: ConfigFile = None, set_: Overrides = None) -> None:
    """List the prompts, each with its published version, or its newest version if none is published."""
    from commands.console import print_table

    rows = (
        (entry.name, entry.version, "yes" if entry.published else "no", len(entry.text), _time(entry.created_at))
        for entry in _store(resolve(config, set_), _CONNECT_SECONDS).newest()
    )
    print_table(("prompt", "version", "published", "characters", "since"), rows)


@prompt.command(name="show")
def _show(name: str, /, *, version: int | None = None, history: bool = False, config: ConfigFile = None, set_: Overrides = None) -> None:
    """Print a prompt's text, or the history of its versions.

    Args:
        name: name of the prompt.
        version: number of the version; default: the published version.
        history: print, instead of the text, one line a version with its parent and the critique that led to it.
    """
    if history and version is not None:
        raise PromptError("--history shows all versions, and --version one: leave one of them out.")
    store = _store(resolve(config, set_), _CONNECT_SECONDS)
    if not history:
        print(store.get(name, version).text)
        return
    from commands.console import print_table

    versions = store.versions(name)
    if not versions:
        raise PromptError(
            f"there is no prompt {name}. `spangrad prompt list` shows what there is, `spangrad prompt put {name} FILE` makes it."
        )
    edits = {edit.version: edit for edit in reversed(store.edits(name))}
    rows: list[tuple[object, ...]] = []
    for entry in versions:
        edit = edits.get(entry.version)
        of = (str(edit.parent), str(edit.round), edit.search, " ".join(edit.critique.split())[:80]) if edit else ("-", "-", "-", "")
        rows.append((entry.version, "yes" if entry.published else "", _time(entry.created_at), *of))
    print_table(("version", "published", "since", "parent", "round", "search", "critique"), rows)


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
    """Store a file's text as a version of a prompt, and publish it. A text that an earlier version has keeps that version's number.

    Args:
        name: name of the prompt, of letters, digits, dots and dashes.
        file: file of the text in UTF-8, which is stored unchanged; `-` for standard input.
        publish: publish the version: agents that fetch the prompt get it from now on.
    """
    if file != "-" and not Path(file).is_file():
        raise PromptError(f"{file} is no file. Name one that holds the prompt's text, or `-` for standard input.")
    raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    where = "standard input" if file == "-" else file
    try:
        text = raw.decode()
    except UnicodeDecodeError as error:
        raise PromptError(f"{where} is not UTF-8 at byte {error.start} ({error.reason}). Give the prompt's text in UTF-8.") from None
    if "\0" in text:
        raise PromptError(f"{where} holds a null character at byte {raw.index(0)}, as UTF-16 does. Give the prompt's text in UTF-8.")
    kept = _store(resolve(config, set_), _CONNECT_SECONDS).put(name, text, publish=publish)
    print(f"{kept.name}@{kept.version}{' (published)' if kept.published else ''}")


@prompt.command(name="optimise")
def _optimise(
    name: str,
    program: str | None = None,
    /,
    *arguments: ProgramArguments,
    tasks: Path,
    held_out: Path | None = None,
    options: AgentOptions | None = None,
    out: Path | None = None,
    publish: bool = True,
    rounds: int | None = None,
    seed: int | None = None,
    config: ConfigFile = None,
    set_: Overrides = None,
) -> None:
    """Search for a better version of a prompt: run the agent with it, let a model criticise and edit it, keep the versions that score best.

    The same command continues a search that was interrupted. Trials are rollouts of mode `trial`, which are never trained.

    Args:
        name: name of the prompt; the search begins with its published version.
        program: program of the agent, after `--`, as in `spangrad run`.
        arguments: arguments of the program.
        tasks: file of tasks in JSON lines, each {"task_id": ..., "input": ...}.
        held_out: file of tasks, in the same format, on which candidates are measured. Default: a share of --tasks (prompts.held_out).
        out: directory for result.json and curve.png; default: data/prompts/NAME-SEARCH.
        publish: publish the best version if it is significantly better than the first (prompts.max_p).
        rounds: number of rounds of critique and editing; default: prompts.rounds.
        seed: random seed of the split of tasks, the minibatches and the significance test; default: prompts.seed.
    """
    from prompts.search import Question, search_id

    settings = resolve(config, set_, {"prompts.rounds": rounds, "prompts.seed": seed})
    log_to_stderr()
    if settings.queue.url is None:
        raise PromptError("set queue.url to where `spangrad queue` listens: it keeps the prompts, and agents fetch them there.")
    spec = agent_spec(handler_of(program, arguments, options), settings.runner)
    learn, measured = _split(read_tasks(tasks), None if held_out is None else read_tasks(held_out), settings)
    start = _store(settings).get(name)
    agent_words = [*spec.host_arguments(), str(spec.directory.resolve())]
    question = Question(search_id(start, learn, measured, settings, agent_words), start, tuple(learn), tuple(measured))
    out = out or Path("data/prompts") / f"{name}-{question.id}"
    make_directory_of(out / "result.json", "--out:")
    result = run_until_sigterm(_search(settings, spec, question))
    _finish(settings, result, out, publish=publish)


def _finish(settings: Settings, result: SearchResult, out: Path, *, publish: bool) -> None:
    """Write the result to files, publish the best version if it is better, and print the result, in this order.

    Files come first because after publishing, the same command begins a new search. Printing comes last so that an error in it cannot
    prevent publishing.
    """
    from commands.console import plain_console
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
    plain_console().print(as_table(result))
    print(f"{out / 'result.json'}: gain {result.gain.mean:+.3f} over version {start.version}, p {result.gain.p:.3g}")
    if publish and better:
        print(f"published {start.name}@{best.version}")
    else:
        why = "as --no-publish says" if better else f"no version is better with p <= {settings.prompts.max_p:g}"
        print(f"published stays {start.name}@{start.version}: {why}")


async def _search(settings: Settings, spec: AgentSpec, question: Question) -> SearchResult:
    from commands.prompts.progress import shown
    from prompts.critic import Critic
    from prompts.search import Search
    from prompts.trials import Trials
    from runner.runner import Outcome, Runner
    from spangrad.store.clickhouse import connect
    from spangrad.types import Mode

    run_id = f"prompt-{question.start.name}-{question.id}"
    settings = settings.model_copy(update={"runner": settings.runner.model_copy(update={"run_id": run_id})})
    client = connect(settings.store)
    trials = Trials(client, run_id, question.start.name)
    with shown(run_id, settings.prompts.rounds) as progress:
        async with Runner(settings, spec) as runner, aclosing(Critic(settings, run_id)) as critic:

            def ended(outcome: Outcome) -> None:
                progress.now(progress.doing, progress.done + 1, progress.of)

            async def run(tasks: Sequence[Task]) -> list[str]:
                outcomes = await runner.run(tasks, mode=Mode.TRIAL, group_size=1, progress=ended)
                return [outcome.key.rollout_id for outcome in outcomes]

            await runner.finish()  # rollouts that a killed search left in the queue
            return await Search(question, settings.prompts, _store(settings), trials, run, critic.complete, progress).go()


def _split(tasks: Sequence[Task], held_out: Sequence[Task] | None, settings: Settings) -> tuple[list[Task], list[Task]]:
    """Return the tasks to learn from, and the held-out tasks to measure candidates on.

    Raises:
        PromptError: two tasks have the same id, or there are too few tasks to split.
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
    counts = Counter(task.task_id for task in (*tasks, *held_out))
    if repeated := sorted(name for name, count in counts.items() if count > 1):
        raise PromptError(f"task {repeated[0]} is there twice: each task_id names one task, which is either learnt from or held out.")
    return list(tasks), list(held_out)


def _store(settings: Settings, connect_seconds: float = 30) -> PromptStore:
    from runner.queue.client import default_url

    queue = settings.queue
    return PromptStore(queue.url or default_url(queue), queue.token, retry_seconds=connect_seconds)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%d %H:%M:%S")
