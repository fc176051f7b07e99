-- From messages, as the engine parsed them, to rows. Texts are those of collector/values.py; what would need more of its rules makes
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
    SELECT number, service, CAST((`resource.key`, `resource.value`), 'Map(LowCardinality(String), String)') AS resource_map, scope, scope_name, scope_version, place, trace_id, span_id, trace_state, parent_span_id, name, kind,
        start, end, keys, strings, bools, ints, doubles, lists, int_lists, pairs, bytes, dropped_attributes, events, dropped_events,
        links, dropped_links, message, code
    FROM parsed
    ARRAY JOIN
        arrayEnumerate(`scopes.scope.name`) AS scope,
        `scopes.scope.name` AS scope_name,
        `scopes.scope.version` AS scope_version,
        arrayMap(names -> arrayEnumerate(names), `scopes.spans.name`) AS place,
        `scopes.spans.trace_id` AS trace_id,
        `scopes.spans.span_id` AS span_id,
        `scopes.spans.trace_state` AS trace_state,
        `scopes.spans.parent_span_id` AS parent_span_id,
        `scopes.spans.name` AS name,
        `scopes.spans.kind` AS kind,
        `scopes.spans.start` AS start,
        `scopes.spans.end` AS end,
        `scopes.spans.attributes.key` AS keys,
        `scopes.spans.attributes.value.string` AS strings,
        `scopes.spans.attributes.value.bool` AS bools,
        `scopes.spans.attributes.value.int` AS ints,
        `scopes.spans.attributes.value.double` AS doubles,
        `scopes.spans.attributes.value.list.items.string` AS lists,
        `scopes.spans.attributes.value.list.items.int` AS int_lists,
        `scopes.spans.attributes.value.pairs` AS pairs,
        `scopes.spans.attributes.value.bytes` AS bytes,
        `scopes.spans.dropped_attributes` AS dropped_attributes,
        `scopes.spans.events.time` AS events,
        `scopes.spans.dropped_events` AS dropped_events,
        `scopes.spans.links.trace_id` AS links,
        `scopes.spans.dropped_links` AS dropped_links,
        `scopes.spans.status.message` AS message,
        `scopes.spans.status.code` AS code
)
ARRAY JOIN
    place, trace_id, span_id, trace_state, parent_span_id, name, kind, start, end, keys, strings, bools, ints, doubles, lists, int_lists,
    pairs, bytes, dropped_attributes, events, dropped_events, links, dropped_links, message, code
