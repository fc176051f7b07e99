"""The engine's decoding of OTLP to rows, and Python's: the same rows, whatever is sent.

Both stage into the same real engine, in this process; only the decoder differs.
"""

from __future__ import annotations

import itertools
import struct
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import AnyValue, ArrayValue, InstrumentationScope, KeyValue, KeyValueList
from opentelemetry.proto.resource.v1.resource_pb2 import Resource
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, ScopeSpans, Span, Status

from collector.database import EmbeddedDatabase
from collector.otlp.requests import TraceBody, trace_body
from collector.otlp.rows import encode_traces
from collector.write import span_staging
from collector.write.ingest import Refused
from collector.write.span_staging import SpanStaging
from tests.support.otlp import traces
from tests.support.servers import migrated_engine

NEVER = 10**9
START = 1_760_000_000_000_000_000
_numbers = itertools.count(1)


class Decoders:
    """Commits requests by either decoder, and reads the rows that they left."""

    def __init__(self, engine: EmbeddedDatabase) -> None:
        self._handles = [engine.handle(), *(engine.handle(schema_files=True) for _ in range(3))]
        self.asking, by_engine, by_python, apart = self._handles
        self.staging = {"engine": SpanStaging(by_engine, 1), "python": SpanStaging(by_python, NEVER), "apart": SpanStaging(apart, 1)}

    def close(self) -> None:
        """Close every handle: another engine may be opened in this process then."""
        for handle in self._handles:
            handle.close()

    def commit(self, decoder: str, requests: Sequence[ExportTraceServiceRequest]) -> tuple[list[Refused], list[list[str]]]:
        """Commit requests by one decoder; return the refusals of each request, and all its rows as text."""
        refused, names = self._send(decoder, requests)
        return refused, self._rows(names)

    def _send(self, decoder: str, requests: Sequence[ExportTraceServiceRequest]) -> tuple[list[Refused], list[str]]:
        bodies, names = list[TraceBody](), list[str]()
        for request in requests:
            names.append(f"route {next(_numbers)}")
            named = ExportTraceServiceRequest.FromString(request.SerializeToString())
            for resource in named.resource_spans:
                resource.resource.attributes.add(key="route").value.string_value = names[-1]
            bodies.append(trace_body(named, named.SerializeToString()))
        self.staging[decoder].commit(bodies)
        return [body.refused for body in bodies], names

    def _rows(self, names: Sequence[str]) -> list[list[str]]:
        route, others = "ResourceAttributes['route']", "mapFilter((k, v) -> k != 'route', ResourceAttributes)"
        sql = f"""SELECT {route}, hex(toString(tuple(* EXCEPT ResourceAttributes, {others}))) AS row FROM otel.otel_traces
            WHERE {route} IN ({", ".join(map(repr, names))}) ORDER BY row"""
        rows: dict[str, list[str]] = {name: [] for name in names}
        for line in self.asking.query(sql).body.decode().splitlines():
            name, row = line.split("\t")
            rows[name].append(bytes.fromhex(row).decode())
        return [*rows.values()]

    def require_same(self, *requests: ExportTraceServiceRequest) -> list[Refused]:
        """Commit requests, together, by both decoders; compare."""
        (by_engine, names), (by_python, others) = (self._send(decoder, requests) for decoder in ("engine", "python"))
        assert by_engine == by_python
        rows = self._rows([*names, *others])
        assert rows[: len(names)] == rows[len(names) :]
        assert list(map(len, rows[: len(names)])) == [
            spans(sent) - refused.count for sent, refused in zip(requests, by_engine, strict=True)
        ]
        return by_engine


@pytest.fixture(scope="module")
def decoders(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Decoders]:
    with migrated_engine(tmp_path_factory.mktemp("decoding") / "data") as engine:
        decoders = Decoders(engine)
        yield decoders
        decoders.close()


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that receives the number of spans of each call of Python's encoder."""
    counts: list[int] = []

    def encode(*args: Any) -> Any:
        rows = encode_traces(*args)
        counts.append(rows.count)
        return rows

    monkeypatch.setattr(span_staging, "encode_traces", encode)
    return counts


def spans(request: ExportTraceServiceRequest) -> int:
    return sum(len(scope.spans) for resource in request.resource_spans for scope in resource.scope_spans)


def request(*given: Span, resource: Resource | None = None, scope: InstrumentationScope | None = None) -> ExportTraceServiceRequest:
    scope_spans = ScopeSpans(scope=scope, spans=given)
    return ExportTraceServiceRequest(resource_spans=[ResourceSpans(resource=resource, scope_spans=[scope_spans])])


def span(name: str = "s", **fields: Any) -> Span:
    return Span(trace_id=bytes(range(16)), span_id=bytes(range(8)), name=name, start_time_unix_nano=START, **fields)


def attribute(key: str, **value: Any) -> KeyValue:
    return KeyValue(key=key, value=AnyValue(**value))


def strings(*texts: str) -> ArrayValue:
    return ArrayValue(values=[AnyValue(string_value=text) for text in texts])


ORDINARY = [
    attribute("text", string_value="é \u2028 <>& \U0001f600 \x00\x01\x7f"),
    attribute("no text", string_value=""),
    attribute("true", bool_value=True),
    attribute("false", bool_value=False),
    attribute("int", int_value=-(2**63)),
    attribute("zero", int_value=0),
    attribute("one", double_value=1.0),
    attribute("tenth", double_value=0.1),
    attribute("minus zero", double_value=-0.0),
    attribute("ids", bytes_value=struct.pack("<3I", 1, 70000, 2**32 - 1)),
    attribute("no bytes", bytes_value=b""),
    attribute("nothing"),
    attribute("reasons", array_value=strings("stop", "", 'a"/\\é\u2028<')),
    attribute("lengths", array_value=ArrayValue(values=[AnyValue(int_value=3), AnyValue(string_value="x")])),
    KeyValue(key="no value"),
]


def test_span_staging_ordinary_spans_are_decoded_by_database(decoders: Decoders, counted: list[int]) -> None:
    scope = InstrumentationScope(name="scope", version="1")
    resource = Resource(
        attributes=[*ORDINARY, attribute("service.name", string_value="agent"), attribute("odd", double_value=float("nan"))]
    )
    bodies = [
        request(
            span("a", attributes=ORDINARY, kind=3, status=Status(code=Status.STATUS_CODE_ERROR, message="bad")),
            span("b"),
            resource=resource,
            scope=scope,
        )
    ]
    bodies += [request(Span(), Span(trace_id=bytes(16), span_id=bytes(8)), span(kind=99)), ExportTraceServiceRequest()]  # type: ignore[arg-type]

    _, rows = decoders.commit("engine", bodies)
    assert counted == []

    assert rows == decoders.commit("python", bodies)[1]
    assert counted == [2, 3, 0]


ODD = {
    "pairs": [attribute("k", kvlist_value=KeyValueList(values=[attribute("z", int_value=1), attribute("a", bytes_value=b"\1")]))],
    "list in a list": [attribute("k", array_value=ArrayValue(values=[AnyValue(array_value=strings("a"))]))],
    "doubles in a list": [attribute("k", array_value=ArrayValue(values=[AnyValue(double_value=1.5)]))],
    "nothing in a list": [attribute("k", array_value=ArrayValue(values=[AnyValue()]))],
    "empty list": [attribute("k", array_value=ArrayValue())],
    "control characters in a list": [attribute("k", array_value=strings("a\x01\x0b\x1f\x7f"))],
    "NaN": [attribute("k", double_value=float("nan"))],
    "infinity": [attribute("k", double_value=float("-inf"))],
    "tiny": [attribute("k", double_value=1.5e-7)],
    "huge": [attribute("k", double_value=1e22)],
    "twice": [attribute("k", string_value="2"), attribute("k", string_value="1"), attribute("a", string_value="0")],
}


@pytest.mark.parametrize("attributes", ODD.values(), ids=ODD)
def test_span_staging_odd_values_are_decoded_by_python(decoders: Decoders, counted: list[int], attributes: list[KeyValue]) -> None:
    others = request(span("before"), span("after", attributes=ORDINARY))
    decoders.require_same(others, request(span("ordinary"), span("odd", attributes=attributes)), others)

    empty_list = attributes == ODD["empty list"]
    assert counted[0] == (2 if empty_list else 1)
    assert len(counted) == 1 + 3


def test_span_staging_events_links_and_losses_are_decoded_by_python(decoders: Decoders, counted: list[int]) -> None:
    event = Span.Event(name="e", time_unix_nano=START, attributes=ORDINARY)
    link = Span.Link(trace_id=bytes(range(16)), span_id=bytes(range(8)), trace_state="a=b", attributes=ORDINARY)
    decoders.require_same(
        request(span("events", events=[event]), span("links", links=[link]), span("lost", dropped_attributes_count=2), span("plain"))
    )

    assert counted[0] == 3


def test_span_staging_unstorable_span_is_refused_by_both_decoders(decoders: Decoders) -> None:
    late = Span(name="late", start_time_unix_nano=2**63)
    short = Span(name="short", trace_id=b"\1")

    refused = decoders.require_same(request(span()), request(late, span("kept"), short), request(span()))

    reason = "span 'late': time 9223372036854775808 ns after 1970 is later than the year 2262"
    assert refused == [Refused(), Refused(2, reason), Refused()]


def test_span_staging_unknown_field_is_decoded_by_python(decoders: Decoders, counted: list[int]) -> None:
    body = trace_body(request(span()), request(span()).SerializeToString() + b"\x7a\x01x")

    assert body.wire is None
    decoders.staging["engine"].commit([body, trace_body(request(span()), request(span()).SerializeToString())])
    assert counted == [1]


def test_span_staging_sender_value_in_span_number_field_is_overridden(decoders: Decoders) -> None:
    # Field 1000 is ours: what a sender puts there comes before it, and loses.
    bodies: list[TraceBody] = []
    for name in ("first", "second"):
        (resource,) = request(span(name), resource=Resource(attributes=[attribute("numbered", string_value=name)])).resource_spans
        part = resource.SerializeToString() + b"\xc0\x3e\x05"
        wire = b"\x0a" + bytes([len(part)]) + part
        bodies.append(trace_body(ExportTraceServiceRequest.FromString(wire), wire))

    decoders.staging["engine"].commit(bodies)

    sql = "SELECT SpanName, ResourceAttributes['numbered'] FROM otel.otel_traces WHERE ResourceAttributes['numbered'] != '' ORDER BY 1"
    assert decoders.asking.query(sql).body == b"first\tfirst\nsecond\tsecond\n"


@pytest.mark.parametrize("seed", range(8))
def test_span_staging_random_requests_give_same_rows_by_both_decoders(decoders: Decoders, seed: int) -> None:
    decoders.require_same(*(traces(100 * seed + place, spans=40, odd=0.4) for place in range(5)))


def test_span_staging_values_of_5_megabytes_give_same_rows_by_both_decoders(decoders: Decoders, counted: list[int]) -> None:
    large = [attribute("text", string_value="é" * 2_500_000), attribute("bytes", bytes_value=bytes(range(256)) * 20_000)]
    decoders.require_same(
        request(span("ordinary", attributes=large)),
        request(span("listed", attributes=[attribute("k", array_value=strings("x" * 5_000_000))])),
    )

    assert counted == [1, 1]


texts = st.text(max_size=30)
leaves = st.one_of(
    st.builds(AnyValue),
    st.builds(AnyValue, string_value=texts),
    st.builds(AnyValue, bool_value=st.booleans()),
    st.builds(AnyValue, int_value=st.integers(-(2**63), 2**63 - 1)),
    st.builds(AnyValue, double_value=st.floats()),
    st.builds(AnyValue, bytes_value=st.binary(max_size=20)),
)
values = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3).map(lambda items: AnyValue(array_value=ArrayValue(values=items))),
        st.dictionaries(texts, inner, max_size=3).map(
            lambda pairs: AnyValue(kvlist_value=KeyValueList(values=[KeyValue(key=key, value=value) for key, value in pairs.items()]))
        ),
    ),
    max_leaves=6,
)
attributes = st.lists(st.builds(KeyValue, key=texts, value=values), max_size=4)
random_spans = st.builds(
    Span,
    trace_id=st.sampled_from([b"", bytes(16), bytes(range(16))]),
    span_id=st.sampled_from([b"", bytes(8), bytes(range(8))]),
    trace_state=texts,
    name=texts,
    kind=st.integers(0, 5),
    start_time_unix_nano=st.integers(START, START + 10**12),
    end_time_unix_nano=st.integers(0, 2**64 - 1),
    attributes=attributes,
    status=st.builds(Status, code=st.integers(0, 2), message=texts),
)


@settings(
    max_examples=40,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(st.lists(st.tuples(st.lists(random_spans, max_size=6), attributes), min_size=1, max_size=3))
def test_span_staging_arbitrary_spans_give_same_rows_by_both_decoders(
    decoders: Decoders, given_requests: list[tuple[list[Span], list[KeyValue]]]
) -> None:
    decoders.require_same(*(request(*given_spans, resource=Resource(attributes=resource)) for given_spans, resource in given_requests))


def test_span_staging_few_spans_give_same_rows_by_a_table_in_memory(decoders: Decoders, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = [traces(seed, spans=10, odd=0.4) for seed in range(3)]
    held = decoders.commit("python", requests)
    monkeypatch.setattr(span_staging, "INLINE_BYTES", 0)
    assert decoders.commit("python", requests) == held


@pytest.mark.parametrize("decoder", ["apart", "python"])
def test_span_staging_failed_commit_leaves_no_rows(decoders: Decoders, decoder: str) -> None:
    staging = decoders.staging[decoder]
    good = request(span("good", attributes=[attribute("left", string_value="behind")]))
    decoders.asking.query("CREATE TABLE IF NOT EXISTS default.seen (n UInt8) ORDER BY n")
    throws = "SELECT throwIf(SpanAttributes['left'] = 'behind') AS n FROM otel.otel_traces"
    decoders.asking.query(f"CREATE MATERIALIZED VIEW default.throws TO default.seen AS {throws}")
    with pytest.raises(span_staging.EngineRefusedError):
        staging.commit([trace_body(good, good.SerializeToString())])
    decoders.asking.query("DROP VIEW default.throws")

    other = request(span("other", attributes=[attribute("left", string_value=f"alone {decoder}")]))
    staging.commit([trace_body(other, other.SerializeToString())])

    sql = f"SELECT groupArray(SpanName) FROM otel.otel_traces WHERE SpanAttributes['left'] = 'alone {decoder}'"
    assert decoders.asking.query(sql).body == b"['other']\n"


def test_dropped_attributes_are_counted_once(decoders: Decoders) -> None:
    lossy = span("lossy", dropped_attributes_count=3, dropped_events_count=1, events=[Span.Event(name="e", dropped_attributes_count=2)])
    body = request(lossy, span("whole"), resource=Resource(attributes=[attribute("service.name", string_value="forgetful")]))
    for decoder in ("engine", "python", "engine"):
        decoders.commit(decoder, [body])

    sql = (
        "SELECT Signal, ServiceName, Name, Spans, Attributes, Events, Links FROM spangrad.dropped_attributes"
        " WHERE ServiceName = 'forgetful'"
    )
    assert decoders.asking.query(sql).body == b"span\tforgetful\tlossy\t1\t5\t1\t0\n"
