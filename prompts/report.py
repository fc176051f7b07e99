"""Reports of a search, for people and for programs.

In: a `SearchResult`. Out: a JSON object, a table, a plot. Invariant: the numbers of all three are the same.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from prompts.search import Candidate, SearchResult

if TYPE_CHECKING:
    from rich.table import Table

_FIRST_WORDS = 60


def as_object(result: SearchResult, *, published: bool) -> dict[str, Any]:
    """Return the whole result as a JSON object; `published` is recorded in it: whether agents get the best version from now on."""
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
            {"round": number, "beam": [candidate.version for candidate in beam], "best_score": beam[0].score}
            for number, beam in enumerate(result.beams)
        ],
        "candidates": [_candidate(candidate) for candidate in result.candidates],
    }


def _candidate(candidate: Candidate) -> dict[str, Any]:
    edit = candidate.edit
    return {
        "version": candidate.version,
        "round": edit.round if edit else 0,
        "parent": edit.parent if edit else None,
        "score": candidate.score,
        "failed": candidate.failed,
        "by_task": dict(candidate.by_task),
        "critique": edit.critique if edit else None,
        "text": candidate.text,
    }


def as_table(result: SearchResult) -> Table:
    """Build a table with a row per candidate, the best first."""
    from rich.table import Table

    table = Table("version", "round", "parent", "score", "failed", "begins", box=None, pad_edge=False)
    for candidate in sorted(result.candidates, key=lambda candidate: (candidate.score is None, -(candidate.score or 0.0))):
        row = _candidate(candidate)
        words = " ".join(candidate.text.split())
        table.add_row(
            str(candidate.version),
            str(row["round"]),
            str(row["parent"] or "-"),
            "-" if candidate.score is None else f"{candidate.score:.3f}",
            str(candidate.failed),
            words if len(words) <= _FIRST_WORDS else f"{words[:_FIRST_WORDS]}...",
        )
    return table


def plot(result: SearchResult, file: Path) -> None:
    """Write a PNG with the best score after each round as a line, and each candidate as a dot."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot
    from matplotlib.ticker import MaxNLocator

    figure, axes = pyplot.subplots(figsize=(6, 3.6), dpi=150)
    edits = ((candidate.edit, candidate.score) for candidate in result.candidates)
    known = [(edit.round if edit else 0, score) for edit, score in edits if score is not None]
    axes.plot([round for round, _ in known], [score for _, score in known], "o", color="0.7", label="candidates")
    bests = [beam[0].score or 0.0 for beam in result.beams]
    axes.plot(range(len(bests)), bests, "-o", label="best so far")
    axes.set(xlabel="round", ylabel="mean score, held-out tasks", title=f"prompt {result.question.start.name}")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.legend()
    figure.tight_layout()
    figure.savefig(file)
    pyplot.close(figure)
