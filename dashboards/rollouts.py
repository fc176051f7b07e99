"""The rollouts dashboard: attempts, model calls, tools, durations, tokens and rewards over time.

In: attempts and calls, and the rollouts, tool calls and rewards of a dataset. Out: a dashboard over time, and a table of rollouts.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards import links, variables
from dashboards.panels import Panel, figure, in_one_row, over_time, rows, steps
from dashboards.queries import ATTEMPTS, CALLS, CHOSEN, TOOL_CALLS, by_time
from dashboards.variables import chosen

_FAILED_CALL = "(ErrorType != '' OR HttpStatus >= 400 OR Aborted)"


def build() -> dashboard.Dashboard:
    """Return the rollouts dashboard."""
    return links.layout(
        "rollouts",
        "what agents did, how long it took, what it cost and what it earned",
        (variables.run(), variables.mode(), _policies(), variables.dataset()),
        {"": _figures(), "Rollouts": _attempts(), "Policy calls": _calls(), "Rewards beside tools": _tools(), "Which": [_table()]},
    )


def _policies() -> dashboard.QueryVariable:
    sql = """
        SELECT Policy FROM spangrad.calls
        WHERE $__timeFilter(Timestamp)
        GROUP BY Policy
        ORDER BY max(Timestamp) DESC, Policy"""
    return variables.some_of("policy", "policy", "Policies that answered in the chosen time.", sql)


def _figures() -> list[Panel]:
    failed = steps("green", orange=0.01, red=0.05)
    return in_one_row(
        figure(
            "Attempts",
            f"SELECT count() AS attempts FROM {ATTEMPTS}",
            "short",
            "Attempts at rollouts that began in the chosen time.",
        ),
        figure(
            "Failed attempts",
            f"SELECT avg(Failure != '') AS failed FROM {ATTEMPTS}",
            "percentunit",
            "Share that ended with a failure: a crash, a timeout, an invalid output.",
            thresholds=failed,
            decimals=1,
        ),
        figure("Calls", f"SELECT count() AS calls FROM {CALLS}", "short", "Choices of policy calls."),
        figure(
            "Failed calls",
            f"SELECT avg{_FAILED_CALL} AS failed FROM {CALLS}",
            "percentunit",
            "Share of calls with an error, a refusal, or a client that left.",
            thresholds=failed,
            decimals=1,
        ),
        figure(
            "Sampled tokens",
            f"SELECT sum(length(ResponseIds)) AS tokens FROM {CALLS}",
            "short",
            "Tokens in the responses of policy calls.",
        ),
        figure(
            "Call latency, p95",
            f"SELECT quantile(0.95)(Duration) AS latency FROM {CALLS}",
            "ns",
            "From the gateway's request to the last byte of the answer.",
        ),
    )


def _attempts() -> list[Panel]:
    durations = "quantile(0.5)(Duration) AS p50, quantile(0.95)(Duration) AS p95, max(Duration) AS longest"
    return [
        over_time(
            "Attempts by outcome",
            by_time("if(Failure = '', 'ended', Failure) AS outcome, count() AS attempts", ATTEMPTS, name="outcome"),
            "short",
            "Attempts at rollouts, by how they ended; failures by the runner's word for them.",
            stacked=True,
        ),
        over_time(
            "Duration of attempts",
            by_time(durations, ATTEMPTS),
            "ns",
            "From the begin of an attempt's root span to its end, evaluation included.",
        ),
    ]


def _calls() -> list[Panel]:
    error = "multiIf(ErrorType != '', ErrorType, Aborted, 'aborted', concat('HTTP ', toString(HttpStatus)))"
    latencies = "quantile(0.5)(Duration) AS p50, quantile(0.95)(Duration) AS p95,\n    quantile(0.99)(Duration) AS p99"
    return [
        over_time(
            "Tokens",
            by_time("sum(length(PromptIds)) AS prompts, sum(length(ResponseIds)) AS responses", CALLS),
            "short",
            "Tokens that the engine read and sampled. Calls without token ids count as 0.",
            stacked=True,
        ),
        over_time("Latency of calls", by_time(latencies, CALLS), "ns", "From the gateway's request to the last byte of the answer."),
        over_time(
            "Failed calls by error",
            by_time(f"{error} AS error, count() AS calls", f"{CALLS} AND {_FAILED_CALL}", name="error"),
            "short",
            "Calls with an error, a refusal, or a client that left (aborted).",
            stacked=True,
        ),
        over_time(
            "Tokens and calls a second",
            by_time("sum(length(ResponseIds)) / ($__interval_s) AS sampled, count() / ($__interval_s) AS calls", CALLS),
            "short",
            "Sampled tokens a second over all engines, and calls a second beside them.",
            right=("calls", "ops"),
        ),
    ]


def _tools() -> list[Panel]:
    rewards = f"spangrad.rewards\nWHERE {CHOSEN} AND $__timeFilter(IngestedAt)"
    return [
        over_time(
            "Rewards",
            by_time("concat(Name, ', ', Source) AS reward, avg(Value) AS value", rewards, name="reward", time="IngestedAt"),
            "short",
            "Mean of each reward, by its name and who gave it, at the time that the builder wrote it down.",
            signed=True,
        ),
        over_time(
            "Latency of tools, p95",
            by_time("ToolName AS tool, quantile(0.95)(Duration) AS p95", TOOL_CALLS, name="tool"),
            "ns",
            "Tool calls of the chosen dataset, by the tool's name.",
        ),
        over_time(
            "Failed tool runs",
            by_time("ToolName AS tool, avg(Failed) AS failed", TOOL_CALLS, name="tool"),
            "percentunit",
            "Share of a tool's calls that failed.",
            at_most=1,
        ),
        over_time(
            "Tool runs",
            by_time("ToolName AS tool, count() AS runs", TOOL_CALLS, name="tool"),
            "short",
            "How often agents ran each tool.",
            stacked=True,
        ),
        _tool_advantages(),
    ]


def _tool_advantages() -> Panel:
    sql = f"""
        SELECT t.ToolName AS tool, t.AgentName AS agent, count() AS runs, quantile(0.95)(t.Duration) AS p95, avg(t.Failed) AS failed,
            avg(c.Advantage) AS advantage
        FROM (SELECT * FROM {TOOL_CALLS}) AS t
        LEFT JOIN (
            SELECT CallId, avg(toNullable(Advantage)) AS Advantage
            FROM spangrad.trained_calls
            WHERE {chosen("Policy", "policy")} AND {chosen("RunId", "run")} AND {chosen("Mode", "mode")}
            GROUP BY CallId
        ) AS c ON c.CallId = t.CallId
        GROUP BY tool, agent
        ORDER BY tool, agent"""
    return rows(
        "Advantage beside tools",
        sql,
        "A row a tool and the agent that ran it. advantage: mean of what training gave the calls that caused its runs; none: no such call"
        " was trained.",
        units={"runs": "short", "p95": "ns", "failed": "percentunit", "advantage": "short"},
        height=8,
    )


def _table() -> Panel:
    sql = f"""
        SELECT a.RolloutId AS rollout, a.Timestamp AS began, a.RunId AS run, a.Mode AS mode, a.TaskId AS task, a.GroupId AS group,
            a.Attempt AS attempt, if(a.Failure = '', a.StatusCode, a.Failure) AS outcome, a.Duration AS duration, r.Return AS return,
            if(empty(r.ReturnsByRole), '', toString(r.ReturnsByRole)) AS roles,
            r.Calls AS calls, r.Drops AS dropped, r.InputTokens AS prompts, r.OutputTokens AS responses, r.ToolCalls AS tools,
            r.FailedToolCalls AS errors
        FROM (SELECT * FROM {ATTEMPTS} ORDER BY Timestamp DESC, RolloutId, Attempt LIMIT 200) AS a
        LEFT JOIN (
            SELECT RunId, RolloutId, Attempt, Return, ReturnsByRole, Calls, Drops, InputTokens,
                OutputTokens, ToolCalls, FailedToolCalls
            FROM spangrad.rollouts
            WHERE {CHOSEN}
        ) AS r ON r.RunId = a.RunId AND r.RolloutId = a.RolloutId AND r.Attempt = a.Attempt
        ORDER BY began DESC, rollout, attempt"""
    return rows(
        "Newest rollouts",
        sql,
        "The newest 200 attempts. return: sum of the raw rewards, and roles those of each role where rewards name some; none: not built for"
        " the chosen dataset, not the attempt that counts, without reward and transition, or of several roles."
        " A rollout leads to the spans it is made of and the versions it trained.",
        units={
            "began": "dateTimeAsIso", "attempt": "none", "duration": "ns", "return": "short", "calls": "short", "dropped": "short",
            "prompts": "short", "responses": "short", "tools": "short", "errors": "short",
        },
        links={"rollout": ("Its spans and versions", links.LINEAGE_OF_ROLLOUT)},
        alarms={"dropped": 1, "errors": 1},
        height=14,
    )  # fmt: skip
