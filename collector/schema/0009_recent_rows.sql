-- Indexes for questions about what is recent, and about the rollouts of one page: they read that, and not the history.

-- Attempts are sorted by run; a look at an hour asks for what arrived in it, or ran in it.
ALTER TABLE spangrad_internal.attempts ADD INDEX IF NOT EXISTS idx_ingested IngestedAt TYPE minmax GRANULARITY 1;

ALTER TABLE spangrad_internal.attempts MATERIALIZE INDEX IF EXISTS idx_ingested;

ALTER TABLE spangrad_internal.attempts ADD INDEX IF NOT EXISTS idx_began Timestamp TYPE minmax GRANULARITY 1;

ALTER TABLE spangrad_internal.attempts MATERIALIZE INDEX IF EXISTS idx_began;

-- Calls are sorted by rollout; lanes over time ask for those of some steps.
ALTER TABLE spangrad_internal.calls ADD INDEX IF NOT EXISTS idx_began Timestamp TYPE minmax GRANULARITY 1;

ALTER TABLE spangrad_internal.calls MATERIALIZE INDEX IF EXISTS idx_began;

-- Ids of rollouts are ordered by time. Of 200 ids a Bloom filter believes a fifth of all granules to hold one; their bounds tell better.
ALTER TABLE spangrad_internal.builds ADD INDEX IF NOT EXISTS idx_rollout_bounds RolloutId TYPE minmax GRANULARITY 1;

ALTER TABLE spangrad_internal.builds MATERIALIZE INDEX IF EXISTS idx_rollout_bounds;

ALTER TABLE spangrad_internal.batches ADD INDEX IF NOT EXISTS idx_rollout_bounds RolloutId TYPE minmax GRANULARITY 1;

ALTER TABLE spangrad_internal.batches MATERIALIZE INDEX IF EXISTS idx_rollout_bounds;
