"""What a search has found, for people and for programs.

In: a `Result`. Out: an object of JSON, a table, a plot. Invariant: the numbers of all three are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompts.search import Candidate, Result

if TYPE_CHECKING:
    from rich.table import Table

_FIRST_WORDS = 60


def as_object(result: Result, *, published: bool) -> dict[str, Any]:
    """All of it; `published` says whether agents get the best one from now on."""
    question = result.question
    return {
        "prompt": question.start.name,
        "search": question.id,
        "start": question.start.version,
        "best": result.best.version,
        "gain": result.gain.mean,
        "p": result.gain.p,
        "published": published,
        "held_out": [task.task_id for task in question.held_out],
        "rounds": [
            {"round": one.number, "beam": list(one.beam), "best_score": result.candidate(one.beam[0]).score} for one in result.rounds
        ],
        "candidates": [_candidate(one) for one in result.candidates],
    }


def _candidate(one: Candidate) -> dict[str, Any]:
    edit = one.edit
    return {
        "version": one.version,
        "round": edit.round if edit else 0,
        "parent": edit.parent if edit else None,
        "score": one.score,
        "failed": one.failed,
        "by_task": dict(one.by_task),
        "critique": edit.critique if edit else None,
        "text": one.text,
    }


def as_table(result: Result) -> Table:
    """A row a candidate, the best first."""
    from rich.table import Table

    table = Table("version", "round", "parent", "score", "failed", "begins", box=None, pad_edge=False)
    for one in sorted(result.candidates, key=lambda one: (one.score is None, -(one.score or 0.0))):
        row = _candidate(one)
        words = " ".join(one.text.split())
        table.add_row(
            str(one.version),
            str(row["round"]),
            str(row["parent"] or "-"),
            "-" if one.score is None else f"{one.score:.3f}",
            str(one.failed),
            words if len(words) <= _FIRST_WORDS else f"{words[:_FIRST_WORDS]}...",
        )
    return table


def plot(result: Result, file: Path) -> None:
    """The best score after each round as a line, each candidate as a dot, in a PNG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=150)
    known = [(one.edit.round if one.edit else 0, one.score) for one in result.candidates if one.score is not None]
    axes.plot([round for round, _ in known], [score for _, score in known], "o", color="0.7", label="candidates")
    bests = [result.candidate(one.beam[0]).score or 0.0 for one in result.rounds]
    axes.plot(range(len(bests)), bests, "-o", label="best so far")
    axes.set(xlabel="round", ylabel="mean score, held-out tasks", title=f"prompt {result.question.start.name}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
