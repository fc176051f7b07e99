-- Shorter answers are better: a hundredth of a point for every token that the rollout's calls sampled.
SELECT RunId, RolloutKey AS RolloutId, Attempt, -sum(length(ResponseIds)) / 100 AS Value
FROM otel.v_calls
WHERE RolloutKey IN {rollouts:Array(String)}
    AND Timestamp BETWEEN {since:DateTime64(6)} AND {until:DateTime64(6)}
GROUP BY RunId, RolloutId, Attempt
