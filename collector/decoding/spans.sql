-- From messages, as the engine parsed them, to rows. Texts are those of collector/otlp/values.py; what would need more of its rules makes
-- a span `Odd`: nested lists and pairs, numbers that are written otherwise here, keys given twice, events and links, dropped
-- parts, ids of a wrong length, times that no row can hold.
WITH
    (string, bool, int, double, bytes, strings, ints) -> concat(
        string,
        multiIf(isNull(bool), '', bool, 'true', 'false'),
        ifNull(toString(int), ''),
        ifNull(toString(double), ''),
        base64Encode(bytes),
        if(empty(strings), '', concat('[', arrayStringConcat(
            arrayMap((s, i) -> if(isNull(s), toString(assumeNotNull(i)), toJSONString(assumeNotNull(s))), strings, ints), ','), ']'))
    ) AS value_text,
    (pairs, double, strings, ints) -> isNotNull(pairs)
        OR isNotNull(double) AND double != 0 AND NOT abs(double) BETWEEN 1e-5 AND 1e15
        OR arrayExists((s, i) -> isNull(s) AND isNull(i) OR match(ifNull(s, ''), '[\\x00-\\x1f\\x7f]'), strings, ints) AS is_odd
SELECT
    fromUnixTimestamp64Nano(toInt64(start)) AS Timestamp,
    if(trace_id = repeat('\0', 16), '', lower(hex(trace_id))) AS TraceId,
    if(span_id = repeat('\0', 8), '', lower(hex(span_id))) AS SpanId,
    if(parent_span_id = repeat('\0', 8), '', lower(hex(parent_span_id))) AS ParentSpanId,
    trace_state AS TraceState,
    name AS SpanName,
    if(kind BETWEEN 0 AND 5, ['Unspecified', 'Internal', 'Server', 'Client', 'Producer', 'Consumer'][kind + 1], '') AS SpanKind,
    service AS ServiceName,
    resource_map AS ResourceAttributes,
    scope_name AS ScopeName,
    scope_version AS ScopeVersion,
    mapSort(CAST((keys, arrayMap(value_text, strings, bools, ints, doubles, bytes, lists, int_lists)), 'Map(LowCardinality(String), String)'))
        AS SpanAttributes,
    end - start AS Duration,
    if(code BETWEEN 0 AND 2, ['Unset', 'Ok', 'Error'][code + 1], '') AS StatusCode,
    message AS StatusMessage,
    number AS Resource, scope AS Scope, place AS Place,
    length(trace_id) NOT IN (0, 16) OR length(span_id) NOT IN (0, 8) OR length(parent_span_id) NOT IN (0, 8)
        OR start > 9223372036854775807 OR dropped_attributes + dropped_events + dropped_links > 0
        OR notEmpty(events) OR notEmpty(links) OR length(arrayDistinct(keys)) != length(keys)
        OR arrayExists(is_odd, pairs, doubles, lists, int_lists) AS Odd
FROM (
    SELECT number, service, resource_map, scope, scope_name, scope_version,
        span.1 AS place, span.2 AS trace_id, span.3 AS span_id, span.4 AS parent_span_id, span.5 AS trace_state, span.6 AS name,
        span.7 AS kind, span.8 AS start, span.9 AS end, span.10 AS keys, span.11 AS strings, span.12 AS bools, span.13 AS ints,
        span.14 AS doubles, span.15 AS bytes, span.16 AS lists, span.17 AS int_lists, span.18 AS pairs,
        span.19 AS dropped_attributes, span.20 AS events, span.21 AS dropped_events, span.22 AS links, span.23 AS dropped_links,
        span.24 AS message, span.25 AS code
    FROM (
        -- Functions in place of ARRAY JOIN, which would copy every text.
        SELECT number, service, resource_map, scopes.1 AS scope, scopes.2 AS scope_name, scopes.3 AS scope_version,
            arrayJoin(arrayZip(
                scopes.4, scopes.5, scopes.6, scopes.7, scopes.8, scopes.9, scopes.10, scopes.11, scopes.12, scopes.13, scopes.14,
                scopes.15, scopes.16, scopes.17, scopes.18, scopes.19, scopes.20, scopes.21, scopes.22, scopes.23, scopes.24, scopes.25,
                scopes.26, scopes.27, scopes.28
            )) AS span
        FROM (
            SELECT number, service, CAST((`resource.key`, `resource.value`), 'Map(LowCardinality(String), String)') AS resource_map,
                arrayJoin(arrayZip(
                    arrayEnumerate(`scopes.scope.name`),
                    `scopes.scope.name`,
                    `scopes.scope.version`,
                    arrayMap(names -> arrayEnumerate(names), `scopes.spans.name`),
                    `scopes.spans.trace_id`,
                    `scopes.spans.span_id`,
                    `scopes.spans.parent_span_id`,
                    `scopes.spans.trace_state`,
                    `scopes.spans.name`,
                    `scopes.spans.kind`,
                    `scopes.spans.start`,
                    `scopes.spans.end`,
                    `scopes.spans.attributes.key`,
                    `scopes.spans.attributes.value.string`,
                    `scopes.spans.attributes.value.bool`,
                    `scopes.spans.attributes.value.int`,
                    `scopes.spans.attributes.value.double`,
                    `scopes.spans.attributes.value.bytes`,
                    `scopes.spans.attributes.value.list.items.string`,
                    `scopes.spans.attributes.value.list.items.int`,
                    `scopes.spans.attributes.value.pairs`,
                    `scopes.spans.dropped_attributes`,
                    `scopes.spans.events.time`,
                    `scopes.spans.dropped_events`,
                    `scopes.spans.links.trace_id`,
                    `scopes.spans.dropped_links`,
                    `scopes.spans.status.message`,
                    `scopes.spans.status.code`
                )) AS scopes
            FROM parsed
        )
    )
)
