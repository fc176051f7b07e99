-- Batches that were made of files (`spangrad finetune`): which files, by name and checksum. Rollouts that their rows came from are in spangrad_internal.batches.

-- Files that a committed batch was made of (training on files).
CREATE TABLE IF NOT EXISTS spangrad_internal.batch_files (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    BatchId String CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'That the batch made' CODEC(ZSTD(1)),
    Method LowCardinality(String) COMMENT 'sft or dpo' CODEC(ZSTD(1)),
    Run String COMMENT 'Files, settings and rows that belong to one run have one name' CODEC(ZSTD(1)),
    Step UInt64 COMMENT 'Optimiser steps of the run, this batch''s among them' CODEC(ZSTD(1)),
    Steps UInt64 COMMENT 'Of the whole run' CODEC(ZSTD(1)),
    Name String COMMENT 'Of the file, without its directory' CODEC(ZSTD(1)),
    Sha256 String COMMENT 'Of its contents, in hex' CODEC(ZSTD(1)),
    Bytes UInt64 CODEC(ZSTD(1)),
    Trained UInt64 COMMENT 'Examples of it that the batch trained, each once' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version, BatchId, Sha256);

CREATE VIEW IF NOT EXISTS spangrad.batch_files AS SELECT * FROM spangrad_internal.batch_files FINAL
COMMENT 'Files of committed batches, each once.';
