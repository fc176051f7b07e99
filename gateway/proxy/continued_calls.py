"""Conversations whose calls continue one another by their tokens: what engines read and sampled, kept for the next call.

In: calls that carry the header `x-spangrad-continues`. Out: the field of a request with which the engine begins the prompt by the tokens of
the call before (`gateway.vllm_plugin.continuation`). Invariant: a call continues one of its own attempt alone; where that is not known any
more, or was answered by another gateway, its prompt is rendered as any other.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import msgspec

from gateway.recorder.record import CallFacts
from gateway.vllm_plugin.continuation import FIRST, REQUEST_FIELD, Continued, Rendered
from spangrad.http.announcements import AttemptKey
from spangrad.semconv import CONTINUES_HEADER

KEPT_BYTES = 256 * 2**20
"""Memory for calls that may be continued; the ones that ended first are forgotten first. A call of 10,000 tokens takes 54 kB."""


class ContinuedCalls:
    """Calls that may be continued."""

    def __init__(self, kept_bytes: int = KEPT_BYTES) -> None:
        self._kept_bytes = kept_bytes
        self._fields: OrderedDict[tuple[str, AttemptKey | None], bytes] = OrderedDict()
        """Value of the request's field, by the id of the response and the attempt."""
        self._size = 0

    def fields(self, headers: Mapping[str, str], attempt: AttemptKey | None) -> dict[str, Any]:
        """Return the fields that a call's headers add to its request; empty where it is of no conversation."""
        response_id = headers.get(CONTINUES_HEADER)
        if response_id is None:
            return {}
        field = self._fields.get((response_id, attempt))
        return {REQUEST_FIELD: FIRST.field() if field is None else msgspec.Raw(field)}

    def keep(self, facts: CallFacts) -> None:
        """Keep a call that has ended, if a later one may continue it."""
        answer = facts.answer
        rendered = answer.engine.rendered if answer.engine else None
        if rendered is None or answer.id is None or len(answer.prompts) != 1 or len(answer.choices) != 1:
            return
        ids = [*answer.prompts[0], *answer.ordered()[0].token_ids]
        field = msgspec.json.encode(Continued(ids, Rendered(*rendered)).field())
        key = answer.id, facts.context.attempt
        # A client may give several calls one id: the last counts, and is the newest.
        self._size += len(field) - len(self._fields.pop(key, b""))
        self._fields[key] = field
        while self._size > self._kept_bytes:
            self._size -= len(self._fields.popitem(last=False)[1])
