"""Actions carried out: by the queue's HTTP API, by the span store's receiver, and by the commands of the trainers' ledger.

In: requests. Out: a sentence on what was done. Invariant: an action that the store could not write down is not begun.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, assert_never

from page.actions.records import receiver_of, record_action, send_record
from page.actions.requests import (
    CancelRequest,
    CollectRequest,
    LabelRequest,
    PinRequest,
    PlayRequest,
    PublishRequest,
    Request,
    RestoreRequest,
    RetryRequest,
    RollbackRequest,
    UnpinRequest,
)
from page.play.sessions import PlaySessions, StartPlay
from page.reading import PageStore
from spangrad import semconv
from spangrad.errors import QueueError, SpangradError, StoreError
from spangrad.http.json_http import ask
from spangrad.http.service import queue_service
from spangrad.settings import Settings

_ANSWER_SECONDS = 30.0
_ATTEMPT_OF_SPAN = """
SELECT RunId, Mode, Attempt FROM spangrad.rollout_spans
WHERE RolloutId = {rollout:String} AND TraceId = {trace:String} AND SpanId = {span:String} AND RowKind = 'span' LIMIT 1
"""
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ActionCommands:
    """Changes by commands that need the trainers' ledger or the builder, which the page does not import; each returns a sentence.

    Raises:
        SpangradError: it cannot be done; nothing was changed unless the sentence says so.
    """

    publish: Callable[[Settings, PublishRequest], str]
    roll_back: Callable[[Settings, RollbackRequest], str]
    pin: Callable[[Settings, PinRequest | UnpinRequest], str]
    restore: Callable[[Settings, RestoreRequest], str]
    collect: Callable[[Settings, CollectRequest], str]
    start_play: StartPlay


class ActionRunner:
    """Runner of actions, which records each in the store before and after."""

    def __init__(self, settings: Settings, store: PageStore, commands: ActionCommands, plays: PlaySessions) -> None:
        self._settings = settings
        self._store = store
        self._commands = commands
        self._plays = plays
        self._receiver = receiver_of(settings.store)

    def run(self, request: Request, address: str) -> str:
        """Carry out an action of the person at a network address; return a sentence on what was done.

        Raises:
            SpangradError: it could not be written down, or not be done.
        """
        id_ = uuid.uuid4().hex
        record_action(self._receiver, id_, request, address, "asked", "")
        try:
            sentence = self._done(request)
        except Exception as error:
            known = isinstance(error, SpangradError | ValueError)
            self._conclude(id_, request, address, "failed", str(error) if known else "an error of the page itself, which its log has")
            raise
        return f"{sentence}{self._conclude(id_, request, address, 'done', sentence)}"

    def _conclude(self, id_: str, request: Request, address: str, outcome: str, sentence: str) -> str:
        """Write down what came of an action; return what the person is told beside it where the store does not take that."""
        try:
            record_action(self._receiver, id_, request, address, outcome, sentence)
        except StoreError as error:  # the action itself is over: its own outcome matters more
            log.warning("action %s is %s, and that could not be written down: %s", id_, outcome, error)
            return f" Its outcome could not be written down: {error}"
        return ""

    def _done(self, request: Request) -> str:
        match request:
            case PublishRequest():
                return self._commands.publish(self._settings, request)
            case RollbackRequest():
                return self._commands.roll_back(self._settings, request)
            case PinRequest() | UnpinRequest():
                return self._commands.pin(self._settings, request)
            case RestoreRequest():
                return self._commands.restore(self._settings, request)
            case CollectRequest():
                return self._commands.collect(self._settings, request)
            case PlayRequest():
                return self._plays.begin_from_thread(request)
            case CancelRequest():
                counts = self._queue("/v1/cancel", {"rollout_ids": request.rollout_ids})
                return f"cancelled: {counts['queued']} that were queued, {counts['running']} that were running."
            case RetryRequest():
                return f"queued again: {self._queue('/v1/retry', {'rollout_ids': request.rollout_ids})['queued']}."
            case LabelRequest():
                return self._label(request)
            case _:
                assert_never(request)

    def _queue(self, path: str, body: Mapping[str, object]) -> Any:
        if self._settings.queue.url is None:
            raise QueueError("queue.url is not set: the page reaches no queue. Set it to that of `spangrad queue`.")
        return ask(queue_service(self._settings.queue.url, self._settings.queue.token), "POST", path, body, seconds=_ANSWER_SECONDS)

    def _label(self, request: LabelRequest) -> str:
        if not math.isfinite(request.value):
            raise ValueError(f"value = {request.value} is no finite number.")
        place = {"rollout": request.rollout, "trace": request.trace, "span": request.span}
        rows = self._store.rows(_ATTEMPT_OF_SPAN, place)
        if not rows:
            missing = StoreError(f"the store holds no span {request.trace}/{request.span} of rollout {request.rollout!r}.")
            missing.http_status = 404
            raise missing
        facts = {
            semconv.RUN_ID: rows[0]["RunId"],
            semconv.ROLLOUT_MODE: rows[0]["Mode"],
            semconv.ROLLOUT_ID: request.rollout,
            semconv.ROLLOUT_ATTEMPT: str(rows[0]["Attempt"]),
            semconv.EVALUATION_NAME: request.name,
            semconv.EVALUATION_SCORE: request.value,
            semconv.EVALUATION_EXPLANATION: request.comment,
            semconv.USER_NAME: request.author,
        }
        send_record(self._receiver, semconv.EVALUATION_EVENT, facts, trace=request.trace, span=request.span)
        return f"{request.name} = {request.value:g} is in the store: the builder makes a new revision of {request.rollout} with it."
