"""MuSiQue: questions, the corpus of their paragraphs, the reward; and small data in the same schema.

In: rows with `question`, `answer`, `answer_aliases`, `answerable` and `paragraphs` (`title`, `paragraph_text`). Out: inputs of the agent,
and a corpus. Invariant: unanswerable questions are left out; the agent never sees which paragraphs support an answer.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from examples.retrieval_qa.facts import CITIES, CITIES_HAVE, COUNTRIES, COUNTRIES_HAVE, facts
from examples.retrieval_qa.task import f1
from recipes.musique.retrieval import WORDS
from recipes.recipe import CHECKOUT, Recipe, Row, SmallData, write_rows
from spangrad.processes import free_ports
from spangrad.supervisor.service import ServiceSpec

RIGHT, FORM = 0.9, 0.1
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.S)


def tasks(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the agent's inputs: each answerable question with its answers."""
    return [
        {"question": row["question"], "answers": [row["answer"], *(row.get("answer_aliases") or [])]}
        for row in rows
        if row.get("answerable", True)
    ]


def corpus(rows: Iterable[Row]) -> list[str]:
    """Return the paragraphs of all rows, each once, with their titles."""
    return list(dict.fromkeys(f"{part['title']} : {part['paragraph_text']}" for row in rows for part in row["paragraphs"]))


def words_of(text: str) -> list[str]:
    """Return the words that count: no case, no punctuation, no articles."""
    return [word for word in re.findall(r"\w+", text.lower()) if word not in {"a", "an", "the"}]


def evaluate(given: Mapping[str, Any], output: str) -> float:
    """Return 0.9 F1 with the nearest answer + 0.1 for an answer in tags; 0 for none."""
    answers = _ANSWER.findall(output)
    if not answers:
        return 0.0
    return RIGHT * max(f1(words_of(answers[-1]), words_of(right)) for right in given["answers"]) + FORM


def services(rows: Iterable[Row], arguments: argparse.Namespace, directory: Path) -> tuple[Sequence[ServiceSpec], Mapping[str, str]]:
    """Write the corpus, and have it served."""
    file = directory / "corpus.jsonl"
    write_rows(file, ({"text": text} for text in corpus(rows)))
    if arguments.retrieval:
        return (), {"RETRIEVAL_URL": arguments.retrieval}
    (port,) = free_ports(1)
    url = f"http://127.0.0.1:{port}"
    # In the checkout's root, wherever the recipe was started.
    code = f"import sys; sys.path.insert(0, {str(CHECKOUT)!r}); from recipes.musique.retrieval import main; main()"
    command = (sys.executable, "-c", code, "--corpus", str(file), "--embedder", arguments.embedder, "--port", str(port))
    # On the CPU: engines and trainer take the GPUs.
    hidden = {"CUDA_VISIBLE_DEVICES": ""}
    service = ServiceSpec("retrieval", command, directory / "logs" / "retrieval.log", f"{url}/health", env=hidden)
    return (service,), {"RETRIEVAL_URL": url}


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of the retrieval service."""
    parser.add_argument("--embedder", default="models/e5-base-v2", help=f"encoder of paragraphs and queries: its directory, or {WORDS}")
    parser.add_argument("--retrieval", metavar="URL", help="service of corpus.jsonl that runs already; default: one on this machine's CPU")


def small(directory: Path) -> SmallData:
    """Return questions of one and two hops about the world of the retrieval example."""
    known = facts()
    paragraphs = [
        {"idx": number, "title": entity, "paragraph_text": f"the {relation} of {entity} is {answer}", "is_supporting": False}
        for number, ((relation, entity), answer) in enumerate(known.items())
    ]
    single = [
        (f"what is the {relation} of {country}", known[relation, country]) for relation in COUNTRIES_HAVE for country in COUNTRIES[:8]
    ]
    double = [
        (f"what is the {relation} of the capital of {country}", known[relation, known["capital", country]])
        for relation in CITIES_HAVE
        for country in COUNTRIES[:8]
    ]

    def given(number: int) -> list[dict[str, Any]]:
        """Return some of the paragraphs, so that all rows together have all."""
        return [paragraphs[(7 * number + place) % len(paragraphs)] for place in range(60)]

    rows: list[Row] = [
        {"id": f"{number}", "question": question, "answer": answer, "answer_aliases": [], "answerable": True, "paragraphs": given(number)}
        for number, (question, answer) in enumerate([*single, *double])
    ]
    return rows, rows[::6], {"embedder": WORDS}


SMALL_WORDS = (*COUNTRIES, *CITIES, *COUNTRIES_HAVE, *CITIES_HAVE, *(word for answer in facts().values() for word in answer.split()))


RECIPE = Recipe(
    name="musique",
    train="hf:dgslibisey/MuSiQue:train",
    held_out="hf:dgslibisey/MuSiQue:validation",
    inputs=lambda rows, arguments, directory: tasks(rows),
    small=small,
    services=services,
    options=add_options,
)
