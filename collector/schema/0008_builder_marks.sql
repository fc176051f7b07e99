-- Where a builder goes on that is started again.

-- Times before which nothing arrived that a specification's builders have still to build: one that starts reads from the newest on.
CREATE TABLE IF NOT EXISTS spangrad_internal.builder_marks (
    BuildSpec LowCardinality(String) CODEC(ZSTD(1)),
    Since DateTime64(6) COMMENT 'What waits has arrived later' CODEC(ZSTD(1)),
    Builder LowCardinality(String) COMMENT 'That wrote it' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY BuildSpec;
