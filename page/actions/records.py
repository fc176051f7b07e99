"""Records of actions: log records in the span store, so that SQL reads who changed what, and when.

In: requests, outcomes. Out: log records of event `spangrad.action`; rows for the page. Invariant: what was asked is in the store before
anything is changed; what came of it is a second record with the same id.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import msgspec

from page.actions.requests import Request
from page.cursors import cut_page, decode_cursor
from page.reading import PageStore
from spangrad import semconv
from spangrad.errors import StoreError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService
from spangrad.settings import StoreSettings

SERVICE = "spangrad-page"
ROWS = 200
"""Number of actions of a page of their list."""
_ANSWER_SECONDS = 10.0
_OUTCOME = f"LogAttributes['{semconv.ACTION_OUTCOME}']"
_ACTIONS = f"""
SELECT LogAttributes['{semconv.ACTION_ID}'] AS Id, toUnixTimestamp64Milli(min(Timestamp)) AS AskedMs,
    any(LogAttributes['{semconv.ACTION_NAME}']) AS Action, any(LogAttributes['{semconv.USER_NAME}']) AS Author,
    any(LogAttributes['{semconv.CLIENT_ADDRESS}']) AS Address, any(LogAttributes['{semconv.ACTION_ARGUMENTS}']) AS Arguments,
    argMax({_OUTCOME}, {_OUTCOME} != 'asked') AS Outcome, argMax(Body, {_OUTCOME} != 'asked') AS Sentence
FROM otel.otel_logs
WHERE ServiceName = {{service:String}} AND EventName = {{event:String}}
GROUP BY Id HAVING (AskedMs, Id) < ({{asked_ms:Int64}}, {{id:String}})
ORDER BY AskedMs DESC, Id DESC LIMIT {{most:UInt32}}
"""
Value = str | float


def receiver_of(store: StoreSettings) -> RemoteService:
    """Return the store's receiver of records, by OTLP."""
    remedy = "Start it with `spangrad store`, or set store.otlp_endpoint."
    return RemoteService("the span store's receiver", store.otlp_endpoint, store.token, StoreError, remedy)


def send_record(
    receiver: RemoteService, event: str, attributes: Mapping[str, Value], *, body: str = "", trace: str = "", span: str = ""
) -> None:
    """Send one record, on a span if its ids are given (in hexadecimal), and wait until the store has it; empty attributes are left out.

    Raises:
        StoreError: the store does not answer, or refuses.
    """
    now = str(time.time_ns())
    record = {"timeUnixNano": now, "observedTimeUnixNano": now, "eventName": event, "traceId": trace, "spanId": span}
    record |= {"body": {"stringValue": body}, "attributes": _attributes(attributes)}
    scope = {"scope": {"name": "spangrad.page"}, "logRecords": [record]}
    resource = {"attributes": _attributes({"service.name": SERVICE})}
    ask(receiver, "POST", "/v1/logs", {"resourceLogs": [{"resource": resource, "scopeLogs": [scope]}]}, seconds=_ANSWER_SECONDS)


def record_action(receiver: RemoteService, id_: str, request: Request, address: str, outcome: str, sentence: str) -> None:
    """Write to the store that an action was asked for, is done or has failed, with a sentence on it.

    Raises:
        StoreError: the store does not answer, or refuses.
    """
    arguments = {name: value for name, value in msgspec.to_builtins(request).items() if name not in {"action", "author"}}
    rollouts = arguments.get("rollout_ids") or [arguments.get("rollout", "")]
    facts = {
        semconv.ACTION_ID: id_,
        semconv.ACTION_NAME: str(type(request).__struct_config__.tag),
        semconv.ACTION_ARGUMENTS: msgspec.json.encode(arguments).decode(),
        semconv.ACTION_OUTCOME: outcome,
        semconv.ROLLOUT_ID: rollouts[0] if len(rollouts) == 1 else "",
        semconv.USER_NAME: request.author,
        semconv.CLIENT_ADDRESS: address,
    }
    send_record(receiver, semconv.ACTION_EVENT, facts, body=sentence)


def actions_view(store: PageStore, after: str) -> dict[str, Any]:
    """Return a page of the actions, the newest first, each with author, arguments and outcome, and the cursor of what follows.

    The page begins after the cursor of the page before; empty: with the newest.

    Raises:
        ValueError: the cursor is none of this list.
    """
    asked_ms, id_ = decode_cursor(after, int, str) if after else (2**62, "")
    place = {"asked_ms": asked_ms, "id": id_, "most": ROWS + 1}
    rows = store.rows(_ACTIONS, {"service": SERVICE, "event": semconv.ACTION_EVENT, **place})
    shown, following = cut_page(rows, ROWS, lambda row: (row["AskedMs"], row["Id"]))
    return {"rows": shown, "after": following}


def _attributes(attributes: Mapping[str, Value]) -> list[dict[str, Any]]:
    """Return attributes as OTLP's JSON has them."""
    given = ((name, value) for name, value in attributes.items() if value != "")
    return [{"key": name, "value": {"stringValue" if isinstance(value, str) else "doubleValue": value}} for name, value in given]
