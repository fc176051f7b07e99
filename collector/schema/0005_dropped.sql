-- What senders kept back. A span over its SDK's limits (128 attributes, unless OTEL_SPAN_ATTRIBUTE_COUNT_LIMIT says otherwise)
-- arrives without its oldest attributes, and only a count tells so: the Collector's layout has no column for it.

-- Spans and log records of which their sender dropped a part, with counts.
CREATE TABLE IF NOT EXISTS spangrad_internal.dropped_attributes (
    Signal LowCardinality(String) COMMENT 'span or log' CODEC(ZSTD(1)),
    Timestamp DateTime64(9) CODEC(Delta(8), ZSTD(1)),
    ServiceName LowCardinality(String) CODEC(ZSTD(1)),
    ScopeName LowCardinality(String) CODEC(ZSTD(1)),
    Name LowCardinality(String) COMMENT 'Of the span, or the event that the record describes' CODEC(ZSTD(1)),
    TraceId String CODEC(ZSTD(1)),
    SpanId String CODEC(ZSTD(1)),
    Attributes UInt64 COMMENT 'Of the span itself, its events and its links' CODEC(ZSTD(1)),
    Events UInt64 CODEC(ZSTD(1)),
    Links UInt64 CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1)),
    INDEX idx_trace_id TraceId TYPE bloom_filter(0.001) GRANULARITY 1
) ENGINE = ReplacingMergeTree(IngestedAt)
PARTITION BY toYYYYMM(Timestamp)
ORDER BY (Signal, ServiceName, ScopeName, Name, Timestamp, TraceId, SpanId)
SETTINGS index_granularity = 1024;

CREATE VIEW IF NOT EXISTS spangrad.dropped_attributes AS
SELECT Signal, ServiceName, ScopeName, Name, count() AS Spans, sum(d.Attributes) AS Attributes, sum(d.Events) AS Events, sum(d.Links) AS Links,
    max(Timestamp) AS Last
FROM spangrad_internal.dropped_attributes AS d FINAL
GROUP BY Signal, ServiceName, ScopeName, Name
COMMENT 'What senders dropped, each span once.';
