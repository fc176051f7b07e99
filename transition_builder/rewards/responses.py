"""Responses of calls, as text: read from their spans, and only when a rule needs them.

Invariant: a response that is not recorded, or that is of no known form, has no row; it is never read as an empty one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import polars as pl

from spangrad.settings import BuilderSettings
from spangrad.store.clickhouse import LONG, store_errors
from transition_builder.dialects import texts
from transition_builder.dialects.conventions.gateway import IS_GATEWAY
from transition_builder.frames import empty
from transition_builder.rewards.rules import columns
from transition_builder.schemas import RESPONSES, SPAN
from transition_builder.source.queries import span_constants

if TYPE_CHECKING:
    from transition_builder.source.queries import StoreReader

_SPANS_A_QUERY = 500
_SQL = f"""
SELECT TraceId, SpanId, {", ".join(f"SpanAttributes['{place}'] AS place_{at}" for at, place in enumerate(texts.RESPONSES))}
FROM otel.otel_traces
WHERE ServiceName IN {{services}} AND SpanName IN {{names}} AND TraceId IN {{traces}} AND SpanId IN {{spans}}
    AND Timestamp BETWEEN fromUnixTimestamp64Nano({{first}}) AND fromUnixTimestamp64Nano({{last}})
LIMIT 1 BY TraceId, SpanId
"""


def read(reader: StoreReader, spec: BuilderSettings, spans: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Read RESPONSES of the calls among SPANS; `answers` (ANSWERS) has those of calls that the gateway did not record.

    Nothing is read where no rule of the specification needs it.

    Raises:
        StoreError: the store does not answer, or refuses.
    """
    if columns.ANSWERS.isdisjoint(columns.used(spec)):
        return empty(RESPONSES)
    is_answered = pl.struct(SPAN).is_in(answers.select(pl.struct(SPAN)).to_series().implode())
    call_spans = spans.filter((pl.col("RowKind") == "span") & (IS_GATEWAY | is_answered)).unique(SPAN, maintain_order=True)
    rows = list[dict[str, Any]]()
    for batch in call_spans.sort("Timestamp").iter_slices(_SPANS_A_QUERY):
        with store_errors(reader.client):
            rows_read = reader.client.query(_SQL.format(**span_constants(batch)), settings=LONG).result_rows
        for trace, span, *places in rows_read:
            for choice, (text, calls) in texts.response(places).items():
                asked = [{"Name": name, "Arguments": arguments} for name, arguments in calls]
                rows.append({"TraceId": trace, "SpanId": span, "ChoiceIndex": choice, "Text": text, "ToolCalls": asked})
    return pl.DataFrame(rows, schema=dict(RESPONSES))
