-- A reward of single calls: an answer that was cut at its greatest length costs a tenth of a point. Calls without a row have no such reward.
SELECT RunId, RolloutKey AS RolloutId, Attempt, CallId, -0.1 AS Value
FROM otel.v_calls
WHERE FinishReason = 'length'
    AND RolloutKey IN {rollouts:Array(String)}
    AND Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
