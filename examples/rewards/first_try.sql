-- 1 for a rollout in which every tool that ran, ran well; 0 for one in which any failed. Says 0 where it means 0: a rollout without a row has no
-- reward, and is not trained. Tools need not name their rollout: rollout_spans finds them by their trace.
SELECT RunId, RolloutId, Attempt,
    toFloat64(countIf(StatusCode = 'Error' AND Attributes['openinference.span.kind'] = 'TOOL') = 0) AS Value
FROM spangrad.rollout_spans
WHERE RolloutId IN {rollouts:Array(String)} AND RowKind = 'span'
    AND TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId IN {rollouts:Array(String)})
    AND Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
GROUP BY RunId, RolloutId, Attempt
