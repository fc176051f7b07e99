"""The rollouts dashboard: attempts, model calls, tools, durations, tokens and rewards over time.

In: attempts and calls, and the rollouts, tool calls and rewards of a dataset. Out: a dashboard over time, and a table of rollouts.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, stat

from dashboards import links, variables
from dashboards.panels import Panel, figure, in_one_row, over_time, rows, second_axis, steps
from dashboards.queries import ATTEMPTS, CALLS, CHOSEN, TOOL_CALLS
from dashboards.variables import chosen

_FAILED_CALL = "(ErrorType != '' OR HttpStatus >= 400 OR Aborted)"


def build() -> dashboard.Dashboard:
    """Return the rollouts dashboard."""
    page = (
        links.begin("rollouts", "what agents did, how long it took, what it cost and what it earned")
        .with_variable(variables.source())
        .with_variable(variables.run())
        .with_variable(variables.mode())
        .with_variable(_policies())
        .with_variable(variables.dataset())
    )
    for panel in in_one_row(_figures()):
        page = page.with_panel(panel)
    page = page.with_row(dashboard.Row("Rollouts"))
    for panel in (_outcomes(), _durations()):
        page = page.with_panel(panel)
    page = page.with_row(dashboard.Row("Policy calls"))
    for panel in (_tokens(), _latency(), _errors(), _speed()):
        page = page.with_panel(panel)
    page = page.with_row(dashboard.Row("Rewards beside tools"))
    for panel in (_rewards(), _tool_latency(), _tool_errors(), _tool_runs(), _tool_advantages()):
        page = page.with_panel(panel)
    return page.with_row(dashboard.Row("Which")).with_panel(_table())


def _policies() -> dashboard.QueryVariable:
    sql = """
        SELECT Policy FROM spangrad.calls
        WHERE $__timeFilter(Timestamp)
        GROUP BY Policy
        ORDER BY max(Timestamp) DESC, Policy"""
    return variables.some_of("policy", "policy", "Policies that answered in the chosen time.", sql)


def _figures() -> list[stat.Panel]:
    failed = steps("green", orange=0.01, red=0.05)
    return [
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
    ]


def _outcomes() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, if(Failure = '', 'ended', Failure) AS outcome, count() AS attempts
        FROM {ATTEMPTS}
        GROUP BY time, outcome
        ORDER BY time, outcome"""
    return over_time(
        "Attempts by outcome",
        sql,
        "short",
        "Attempts at rollouts, by how they ended; failures by the runner's word for them.",
        stacked=True,
    )


def _durations() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, quantile(0.5)(Duration) AS p50, quantile(0.95)(Duration) AS p95, max(Duration) AS longest
        FROM {ATTEMPTS}
        GROUP BY time
        ORDER BY time"""
    return over_time("Duration of attempts", sql, "ns", "From the begin of an attempt's root span to its end, evaluation included.")


def _tokens() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, sum(length(PromptIds)) AS prompts, sum(length(ResponseIds)) AS responses
        FROM {CALLS}
        GROUP BY time
        ORDER BY time"""
    return over_time("Tokens", sql, "short", "Tokens that the engine read and sampled. Calls without token ids count as 0.", stacked=True)


def _latency() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, quantile(0.5)(Duration) AS p50, quantile(0.95)(Duration) AS p95,
            quantile(0.99)(Duration) AS p99
        FROM {CALLS}
        GROUP BY time
        ORDER BY time"""
    return over_time("Latency of calls", sql, "ns", "From the gateway's request to the last byte of the answer.")


def _errors() -> Panel:
    name = "multiIf(ErrorType != '', ErrorType, Aborted, 'aborted', concat('HTTP ', toString(HttpStatus)))"
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, {name} AS error, count() AS calls
        FROM {CALLS} AND {_FAILED_CALL}
        GROUP BY time, error
        ORDER BY time, error"""
    return over_time(
        "Failed calls by error", sql, "short", "Calls with an error, a refusal, or a client that left (aborted).", stacked=True
    )


def _speed() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, sum(length(ResponseIds)) / ($__interval_s) AS sampled, count() / ($__interval_s) AS calls
        FROM {CALLS}
        GROUP BY time
        ORDER BY time"""
    panel = over_time(
        "Tokens and calls a second", sql, "short", "Sampled tokens a second over all engines, and calls a second beside them."
    )
    return second_axis(panel, "calls", "ops")


def _rewards() -> Panel:
    sql = f"""
        SELECT $__timeInterval(IngestedAt) AS time, concat(Name, ', ', Source) AS reward, avg(Value) AS value
        FROM spangrad.rewards
        WHERE {CHOSEN} AND $__timeFilter(IngestedAt)
        GROUP BY time, reward
        ORDER BY time, reward"""
    return over_time(
        "Rewards",
        sql,
        "short",
        "Mean of each reward, by its name and who gave it, at the time that the builder wrote it down.",
        signed=True,
    )


def _tool_latency() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, ToolName AS tool, quantile(0.95)(Duration) AS p95
        FROM {TOOL_CALLS}
        GROUP BY time, tool
        ORDER BY time, tool"""
    return over_time("Latency of tools, p95", sql, "ns", "Tool calls of the chosen dataset, by the tool's name.")


def _tool_errors() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, ToolName AS tool, avg(Failed) AS failed
        FROM {TOOL_CALLS}
        GROUP BY time, tool
        ORDER BY time, tool"""
    return over_time("Failed tool runs", sql, "percentunit", "Share of a tool's calls that failed.", at_most=1)


def _tool_runs() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, ToolName AS tool, count() AS runs
        FROM {TOOL_CALLS}
        GROUP BY time, tool
        ORDER BY time, tool"""
    return over_time("Tool runs", sql, "short", "How often agents ran each tool.", stacked=True)


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
