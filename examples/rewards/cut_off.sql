-- A reward of single calls: an answer that was cut at its greatest length costs a tenth of a point. Calls without a row have no such reward.
SELECT s.RunId AS RunId, s.RolloutId AS RolloutId, s.Attempt AS Attempt, c.CallId AS CallId, -0.1 AS Value
FROM spangrad.calls AS c
INNER JOIN spangrad.rollout_spans AS s ON c.TraceId = s.TraceId AND c.SpanId = s.SpanId
WHERE c.FinishReason = 'length' AND s.RolloutId IN {rollouts:Array(String)} AND s.RowKind = 'span'
    AND c.TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId IN {rollouts:Array(String)})
    AND c.Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
    AND s.Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
