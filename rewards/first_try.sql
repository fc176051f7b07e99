-- 1 for a rollout in which every tool that ran, ran well; 0 for one in which any failed. Says 0 where it means 0: a rollout without a row has no
-- reward, and is not trained.
SELECT RunId, RolloutKey AS RolloutId, Attempt,
    toFloat64(countIf(StatusCode = 'Error' AND Attributes['openinference.span.kind'] = 'TOOL') = 0) AS Value
FROM otel.v_spans
WHERE RolloutKey IN {rollouts:Array(String)}
    AND Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
GROUP BY RunId, RolloutId, Attempt
