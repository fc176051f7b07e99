"""Views of the page: from the parameters of a URL to what the view shows.

In: query strings. Out: plain values, or the parts of a download. Invariant: every view is decided by its address alone, so that an address
can be shared.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from multidict import MultiMapping

from page.actions.records import actions_view
from page.call_view import TEXT_CHARACTERS, CallPlace, alternatives, call_texts, call_view
from page.cursors import decode_cursor
from page.lanes import STEPS_MOST, lanes_view
from page.overview import OverviewReader
from page.queue_view import STATES, queue_view, queued_rollout
from page.reading import PageStore
from page.rollouts.conversation import TURNS_MOST, ReadMessages, turns
from page.rollouts.filters import RolloutFilter, RolloutOrder
from page.rollouts.listing import choices_of, export, numbers_of, search
from page.rollouts.view import rollout_view, span_view
from page.token_texts import TokenTexts
from page.training import (
    SKIPPED_CURSOR,
    SKIPPED_ROWS,
    STEP_CURSOR,
    SkippedQuery,
    SkippedRow,
    StepOrder,
    advantages_of,
    comparison,
    skipped_view,
    step_rows,
    steps_export,
    training_view,
    version_view,
)
from spangrad.errors import LedgerError, StoreError
from spangrad.settings import Settings

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

    from spangrad.store.rollout.record import Record

Query = MultiMapping[str]
_DOWNLOAD_CHARACTERS = 2**20
_MOST_CHOICE = 9999
_CHECKPOINTS = """
SELECT Path FROM spangrad.policy_versions WHERE TokenizerHash = {hash:String} AND Path != '' ORDER BY IngestedAt DESC LIMIT 5
"""


@dataclass(frozen=True, slots=True)
class PageReaders:
    """Reads that need the builder's dialects or the trainers' ledger, which the page does not import."""

    record: Callable[[Client, Settings, str], Record]
    """Function from a client, settings and the id of a rollout to its record.

    Raises:
        StoreError: the store holds no span of it.
    """
    messages: ReadMessages
    skipped: Callable[[Settings, SkippedQuery], tuple[Sequence[SkippedRow], Mapping[str, int]]]
    """Function from settings and a question to groups that a branch skipped, and on the first page the number of all by reason.

    Raises:
        LedgerError: there is no ledger, or it does not answer.
    """


class PageViews:
    """Views over one store."""

    def __init__(self, settings: Settings, readers: PageReaders) -> None:
        self._settings = settings
        self._readers = readers
        self.store = PageStore(settings.store)
        self._texts = TokenTexts(self._tokenizer_directories)
        self.overview = OverviewReader(self.store, settings)

    def prepare(self) -> None:
        """Import what the first rollout needs."""
        import polars  # pyright: ignore[reportUnusedImport]  # noqa: F401
        import tokenizers  # pyright: ignore[reportUnusedImport]  # noqa: F401

    def close(self) -> None:
        """Close the connections to the store."""
        self.store.close()

    def answers(self) -> dict[str, Callable[[Query], Any]]:
        """Return the functions that answer in JSON, by path; a function that returns None has nothing at that address."""
        return {
            "/api/rollouts": lambda query: search(self.store, RolloutFilter.of(query), RolloutOrder.of(query)),
            "/api/rollouts/numbers": lambda query: numbers_of(self.store, RolloutFilter.of(query)),
            "/api/rollouts/choices": lambda query: choices_of(self.store),
            "/api/rollout": self._rollout,
            "/api/rollout/turns": self._turns,
            "/api/actions": lambda query: actions_view(self.store, query.get("after", "")),
            "/api/queue": self._queue,
            "/api/queue/rollout": lambda query: queued_rollout(self._settings.queue, _required(query, "id")),
            "/api/training": lambda query: training_view(self.store, query.get("policy") or None, query.get("branch") or None),
            "/api/lanes": lambda query: lanes_view(
                self.store, *_branch(query), _number(query, "newest"), _number(query, "steps", most=STEPS_MOST)
            ),
            "/api/training/skipped": self._skipped,
            "/api/training/steps": lambda query: step_rows(self.store, *_steps_of(query)),
            "/api/version": self._version,
            "/api/compare": lambda query: comparison(
                self.store, _required(query, "policy"), _number(query, "left"), _number(query, "right")
            ),
            "/api/beside/advantages": lambda query: advantages_of(self.store, query.getall("rollout", [])),
            "/api/span": lambda query: span_view(self.store, _required(query, "trace"), _required(query, "span")),
            "/api/call": lambda query: call_view(self.store, self._texts, _place(query), whole=query.get("whole") == "yes"),
            "/api/call/texts": self._call_texts,
            "/api/call/alternatives": lambda query: alternatives(self.store, _place(query)),
        }

    def downloads(self) -> dict[str, Callable[[Query], tuple[str, Iterable[bytes] | None]]]:
        """Return the functions of downloads, by path: the name of the file and its parts. None: there is nothing at that address."""
        return {
            **{f"/{name}": partial(self._export, name) for name in ("rollouts.csv", "rollouts.jsonl")},
            "/steps.csv": lambda query: ("steps.csv", steps_export(self.store, *_steps_of(query))),
            "/call.txt": self._call_file,
        }

    def _export(self, name: str, query: Query) -> tuple[str, Iterator[bytes]]:
        return name, export(self.store, RolloutFilter.of(query), RolloutOrder.of(query), name.rpartition(".")[2])

    def _call_file(self, query: Query) -> tuple[str, list[bytes] | None]:
        part = query.get("part", "request")
        if part not in {"request", "response"}:
            raise ValueError(f"part = {part!r}: give request or response.")
        texts = call_texts(self.store, _place(query))
        if texts is None:
            return "", None
        text = texts[part]
        return f"{part}.txt", [
            text[at : at + _DOWNLOAD_CHARACTERS].encode(errors="replace") for at in range(0, len(text), _DOWNLOAD_CHARACTERS)
        ]

    def _rollout(self, query: Query) -> dict[str, Any]:
        id_ = _required(query, "id")
        record = self.store.read(lambda client: self._readers.record(client, self._settings, id_))
        return rollout_view(record, self._settings)

    def _turns(self, query: Query) -> list[dict[str, Any]]:
        calls = [_call_row(text) for text in query.getall("call", [])]
        known = _number(query, "known") if query.get("known") else 0
        if not calls or len(calls) > TURNS_MOST or known >= len(calls):
            raise ValueError(f"give 1 to {TURNS_MOST} calls, and fewer `known` ones.")
        return turns(self.store.read(lambda client: self._readers.messages(client, calls)), known)

    def _call_texts(self, query: Query) -> dict[str, Any] | None:
        texts = call_texts(self.store, _place(query))
        if texts is None:
            return None
        return {name: {"text": text[:TEXT_CHARACTERS], "characters": len(text)} for name, text in texts.items()}

    def _version(self, query: Query) -> dict[str, Any]:
        (policy, branch), version = _branch(query), _number(query, "version")
        view = version_view(self.store, policy, branch, version)
        if view is None:
            missing = StoreError(f"the store knows no version {policy}@{version} on branch {branch}. /training lists those of each branch.")
            missing.http_status = 404
            raise missing
        return view

    def _queue(self, query: Query) -> dict[str, Any]:
        state = query.get("state", "")
        if state and state not in STATES:
            raise ValueError(f"state = {state[:80]!r} is none of {', '.join(STATES)}.")
        after = _number(query, "after") if query.get("after") else 0
        order = query.get("order") or "newest"
        if order not in {"newest", "oldest"}:
            raise ValueError(f"order = {order[:80]!r}: give newest or oldest.")
        return queue_view(self._settings.queue, query.get("run", ""), state, order, after)

    def _skipped(self, query: Query) -> dict[str, Any]:
        since, until = (_number(query, name) if query.get(name) else None for name in ("since", "until"))
        after = decode_cursor(query["after"], *SKIPPED_CURSOR) if query.get("after") else ()
        try:
            page_query = SkippedQuery(*_branch(query), SKIPPED_ROWS + 1, after, since, until)
            return skipped_view(*self._readers.skipped(self._settings, page_query))
        except LedgerError as error:  # a page beside a store alone has no ledger: the rest of the view is as it should be
            return {**skipped_view((), {}), "problem": str(error)}

    def _tokenizer_directories(self, hash_: str) -> Iterator[Path]:
        yield from filter(None, (self._settings.engine.model, self._settings.trainer.model))
        yield from (Path(row["Path"]) for row in self.store.rows(_CHECKPOINTS, {"hash": hash_}))


def _steps_of(query: Query) -> tuple[str, str, list[str], StepOrder]:
    """Return policy, branch, metrics and order of a table of steps."""
    after, order = query.get("after"), query.get("order") or "desc"
    if order not in {"asc", "desc"}:
        raise ValueError(f"order = {order[:80]!r}: give asc or desc.")
    chosen = StepOrder(query.get("sort", ""), order == "desc", decode_cursor(after, *STEP_CURSOR) if after else None)
    return *_branch(query), query.get("metrics", "").split(","), chosen


def _branch(query: Query) -> tuple[str, str]:
    return _required(query, "policy"), _required(query, "branch")


def _place(query: Query) -> CallPlace:
    choice = _number(query, "choice", most=_MOST_CHOICE) if query.get("choice") else 0
    return CallPlace(_required(query, "rollout"), _required(query, "trace"), _required(query, "span"), choice)


def _call_row(text: str) -> Mapping[str, Any]:
    """Return a call from TRACE.SPAN.CHOICE.NANOSECONDS, as the list of a rollout's spans has them."""
    trace, span, *numbers = ([*text.split("."), "", "", ""])[:4]
    choice, nanoseconds = _natural(numbers[0], _MOST_CHOICE), _natural(numbers[1])
    if choice is None or nanoseconds is None:
        raise ValueError(f"call = {text[:80]!r} is not TRACE.SPAN.CHOICE.NANOSECONDS.")
    return {"TraceId": trace, "SpanId": span, "ChoiceIndex": choice, "Timestamp": datetime.fromtimestamp(nanoseconds / 1e9, UTC)}


def _number(query: Query, name: str, most: int = 2**63) -> int:
    text = _required(query, name)
    if (number := _natural(text, most)) is None:
        raise ValueError(f"{name} = {text[:80]!r} is no number from 0 to {most}.")
    return number


def _natural(text: str, most: int = 2**63) -> int | None:
    """Return the number that a text writes. None: it writes none from 0 to `most`."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 19 and int(text) <= most else None


def _required(query: Query, name: str) -> str:
    value = query.get(name, "")
    if not value:
        raise ValueError(f"the address lacks {name}.")
    return value
