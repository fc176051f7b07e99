"""Texts of calls, read from their spans, and rollouts of a part as conversations.

Invariant: a call without a usable text is counted with its reason, once; a span or a log record that was delivered twice is read once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from spangrad.settings import Selection
from spangrad.store.clickhouse import constant, store_errors
from transition_builder.dialects.messages import Dialogue, Message
from transition_builder.dialects.texts import ATTRIBUTES, EVENTS, NoTextError, RedactedError, SpanText, read
from transition_builder.export.conversations import Conversation, of_messages
from transition_builder.export.reading import ExportReader, GroupSlice
from transition_builder.export.tally import LeftOut

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

_SPANS_A_QUERY = 100
_SLACK_NS = 1_000_000_000
_LOG_SLACK_NS = 3_600_000_000_000
"""Longest time between the start of a span and a log record on it, in nanoseconds."""

_QUERY = """
WITH {traces} AS traces, {spans} AS spans
SELECT TraceId, SpanId, mapFilter((k, v) -> match(k, {attributes}), SpanAttributes) AS Attributes,
    arrayFilter(name -> match(name, {events}), Events.Name) AS Names,
    arrayFilter((one, name) -> match(name, {events}), Events.Attributes, Events.Name) AS Bodies
FROM otel.otel_traces
PREWHERE Timestamp BETWEEN fromUnixTimestamp64Nano({first}) AND fromUnixTimestamp64Nano({last}) AND TraceId IN traces AND SpanId IN spans
LIMIT 1 BY TraceId, SpanId
"""
_LOGS = """
WITH {traces} AS traces, {spans} AS spans
SELECT TraceId, SpanId, if(EventName != '', EventName, LogAttributes['event.name']) AS Name, LogAttributes, Body
FROM otel.otel_logs
PREWHERE Timestamp BETWEEN fromUnixTimestamp64Nano({first}) AND fromUnixTimestamp64Nano({last}) AND TraceId IN traces AND SpanId IN spans
WHERE match(Name, {events})
ORDER BY Timestamp, Name != 'gen_ai.system.message', Name = 'gen_ai.choice'
LIMIT 1 BY TraceId, SpanId, Timestamp, Name, Body, mapKeys(LogAttributes), mapValues(LogAttributes)
"""

_Key = tuple[str, str]
"""Trace and span."""
_Place = tuple[int, str, str]
"""Start of a span in nanoseconds since 1970, its trace, and the span."""


@dataclass(frozen=True, slots=True)
class CallText:
    """Call and its dialogue."""

    call: dict[str, Any]
    """Row of `GroupSlice.calls`."""
    dialogue: Dialogue


@dataclass(frozen=True, slots=True)
class RolloutTexts:
    """Calls of a rollout that have a text."""

    rollout: dict[str, Any]
    """Row of `GroupSlice.rollouts`."""
    call_texts: list[CallText]
    """Calls with a text, in order."""
    whole: bool
    """True if the call that the rollout began with is among them."""

    def conversations(self) -> list[tuple[Conversation, list[dict[str, Any]]]]:
        """Return the calls with messages, merged, each conversation with its rows of `GroupSlice.calls`."""
        with_messages = [call_text for call_text in self.call_texts if not isinstance(call_text.dialogue.prompt, str)]
        merged = of_messages([_messages(call_text.dialogue) for call_text in with_messages])
        return [(conversation, [with_messages[at].call for at in conversation.calls]) for conversation in merged]


def rollout_texts(reader: ExportReader, part: GroupSlice, *, keep_cut: bool = False) -> Iterator[RolloutTexts]:
    """Yield the rollouts of a part that have a text; `keep_cut` keeps responses that ended at their token limit."""
    rollouts = list(part.by_rollout())
    dialogues = iter(read_dialogues(reader.client, [call for _, calls in rollouts for call in calls]))
    for rollout, calls in rollouts:
        call_texts: list[CallText] = []
        whole = has_beginning(reader, calls)
        for index, call in enumerate(calls):
            result = next(dialogues)
            if isinstance(result, Dialogue) and (result.cut or call["FinishReason"] == "length") and not keep_cut:
                result = LeftOut.CUT_SHORT
            if isinstance(result, Dialogue):
                call_texts.append(CallText(call, result))
            else:
                reader.tally.count_left_out(result)
                whole = whole and index > 0
        if call_texts:
            yield RolloutTexts(rollout, call_texts, whole)


def has_beginning(reader: ExportReader, calls: list[dict[str, Any]]) -> bool:
    """Return whether the first of a rollout's calls is the one that it began with, which may have been dropped.

    A selection begins with the first of the calls that it names.
    """
    return calls[0]["Turn"] == 0 or reader.request.selection != Selection()


def about(reader: ExportReader, rollout: dict[str, Any], calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the metadata of a row: its dataset, rollout and calls."""
    return {
        "dataset": str(reader.dataset),
        "run": rollout["RunId"],
        "mode": rollout["Mode"],
        "task": rollout["TaskId"],
        "group": rollout["GroupId"],
        "rollout": rollout["RolloutId"],
        "attempt": rollout["Attempt"],
        "build_spec": reader.dataset.build_spec,
        "revision": calls[0]["Revision"],
        "return": rollout["Return"],
        "agents": list(dict.fromkeys(call["AgentName"] for call in calls)),
        "calls": [call["CallId"] for call in calls],
        "tokenizers": sorted({call["TokenizerHash"] for call in calls if call["TokenizerHash"]}),
    }


def _messages(dialogue: Dialogue) -> tuple[list[Message], Message, list[dict[str, Any]]]:
    assert not isinstance(dialogue.prompt, str)
    assert not isinstance(dialogue.reply, str)
    return dialogue.prompt, dialogue.reply, dialogue.tools


def read_dialogues(client: Client, calls: Sequence[Mapping[str, Any]]) -> list[Dialogue | LeftOut]:
    """Return the dialogue of each call, in their order; log records are read for spans that hold none."""
    # Starts to a microsecond, as Python holds times.
    places = [(int(call["Timestamp"].timestamp() * 1_000_000) * 1000, call["TraceId"], call["SpanId"]) for call in calls]
    rows = _rows(client, _QUERY, places, _SLACK_NS)
    contents = {(row[0], row[1]): SpanText(row[2], list(zip(row[3], row[4], strict=True))) for row in rows}
    dialogues = [_dialogue(contents.get(place[1:]), call["ChoiceIndex"]) for place, call in zip(places, calls, strict=True)]
    silent = [at for at, dialogue in enumerate(dialogues) if dialogue is LeftOut.NO_TEXT and places[at][1:] in contents]
    records = _records(client, [places[at] for at in silent])
    for at in silent:
        if events := records.get(places[at][1:]):
            span = contents[places[at][1:]]
            dialogues[at] = _dialogue(SpanText(span.attributes, [*span.events, *events]), calls[at]["ChoiceIndex"])
    return dialogues


def _dialogue(span: SpanText | None, choice: int) -> Dialogue | LeftOut:
    if span is None:
        return LeftOut.NO_TEXT
    try:
        return read(span, choice)
    except RedactedError:
        return LeftOut.REDACTED_TEXT
    except NoTextError:
        return LeftOut.NO_TEXT
    except (TypeError, ValueError, LookupError, AttributeError, RecursionError):
        # UnreadableError, or another: spans of other senders may hold anything.
        return LeftOut.UNREADABLE_TEXT


def _records(client: Client, spans: Collection[_Place]) -> dict[_Key, list[tuple[str, Mapping[str, str]]]]:
    """Return the log records on spans that hold texts, as events."""
    events: dict[_Key, list[tuple[str, Mapping[str, str]]]] = {}
    for trace, span, name, attributes, body in _rows(client, _LOGS, spans, _LOG_SLACK_NS):
        events.setdefault((trace, span), []).append((name, {**attributes, "body": body}))
    return events


def _rows(client: Client, query: str, spans: Collection[_Place], slack: int) -> Iterator[Sequence[Any]]:
    """Yield the rows that a query has of spans; they may be at most `slack` nanoseconds younger than the starts of those."""
    ordered = sorted(set(spans))
    for start in range(0, len(ordered), _SPANS_A_QUERY):
        among = ordered[start : start + _SPANS_A_QUERY]
        filled = query.format(
            traces=constant(dict.fromkeys(trace for _, trace, _ in among)),
            spans=constant(dict.fromkeys(span for _, _, span in among)),
            attributes=_regular(ATTRIBUTES),
            events=_regular(EVENTS),
            first=among[0][0] - _SLACK_NS,
            last=among[-1][0] + slack,
        )
        with store_errors(client):
            rows = client.query(filled).result_rows
        yield from rows


def _regular(expression: str) -> str:
    """Return a regular expression as a SQL literal."""
    return "unhex('" + expression.encode().hex() + "')"
