-- Shorter answers are better: a hundredth of a point for every token that the rollout's calls sampled.
SELECT s.RunId AS RunId, s.RolloutId AS RolloutId, s.Attempt AS Attempt, -sum(length(c.ResponseIds)) / 100 AS Value
FROM spangrad.calls AS c
INNER JOIN spangrad.rollout_spans AS s ON c.TraceId = s.TraceId AND c.SpanId = s.SpanId
WHERE s.RolloutId IN {rollouts:Array(String)} AND s.RowKind = 'span'
    AND c.TraceId IN (SELECT TraceId FROM spangrad.rollout_traces WHERE RolloutId IN {rollouts:Array(String)})
    AND c.Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
    AND s.Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
GROUP BY RunId, RolloutId, Attempt
