-- What training computed of each token of a call, apart from spangrad_internal.trained_calls, whose rows are narrow.

-- Tokens of the calls that a committed batch trained: arrays with a value each token of the response, in order.
CREATE TABLE IF NOT EXISTS spangrad_internal.trained_tokens (
    Policy LowCardinality(String) CODEC(ZSTD(1)),
    Branch LowCardinality(String) CODEC(ZSTD(1)),
    BatchId String CODEC(ZSTD(1)),
    Version UInt64 COMMENT 'That the batch made' CODEC(ZSTD(1)),
    RolloutId String CODEC(ZSTD(1)),
    CallId String CODEC(ZSTD(1)),
    TrainerLogprobs Array(Float32) COMMENT 'Logprobs (nats) under the weights that the step began with, at the call''s temperature; the importance ratio of a token is exp(this - the logprob that it was sampled with)' CODEC(ZSTD(1)),
    Entropies Array(Float32) COMMENT 'Entropies (nats) of the distributions that the tokens are from, under the same weights; empty: no pass of the step computed them' CODEC(ZSTD(1)),
    IngestedAt DateTime64(6) DEFAULT now64(6) CODEC(Delta(8), ZSTD(1))
) ENGINE = ReplacingMergeTree(IngestedAt)
ORDER BY (Policy, Branch, Version, BatchId, RolloutId, CallId)
SETTINGS index_granularity = 128;

CREATE VIEW IF NOT EXISTS spangrad.trained_tokens AS SELECT * FROM spangrad_internal.trained_tokens FINAL
COMMENT 'Tokens of trained calls, a row a call: the trainer''s logprobs and entropies at training time.';
