-- What became of the calls of each agent: those of committed batches, and those that the builder left out.
SELECT t.AgentName AS Agent, t.Policy AS Policy, 'trained' AS Fate, count() AS Calls
FROM spangrad.transitions AS t
INNER JOIN spangrad.batches AS b ON b.RunId = t.RunId AND b.RolloutId = t.RolloutId AND b.Attempt = t.Attempt
WHERE t.RunId = 'text_to_sql'
GROUP BY Agent, Policy
UNION ALL
SELECT d.AgentName AS Agent, d.Policy AS Policy, d.Reason AS Fate, count() AS Calls
FROM spangrad.drops AS d
INNER JOIN spangrad.batches AS b ON b.RunId = d.RunId AND b.RolloutId = d.RolloutId AND b.Attempt = d.Attempt
WHERE d.RunId = 'text_to_sql' AND d.CallId != ''
GROUP BY Agent, Policy, Fate
ORDER BY Agent, Fate
