"""The rollouts dashboard: attempts, model calls, tools, durations, tokens and rewards over time.

In: rollout_spans, calls, rewards, and the transitions of a dataset. Out: a dashboard over time, and a table of rollouts.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard, stat

from dashboards import links, variables
from dashboards.panels import Panel, beside, figure, over_time, rows, steps
from dashboards.queries import CHOSEN, IS_TOOL, TOOL_NAME, calls, newest, roots, tools
from dashboards.variables import chosen, is_
from spangrad import semconv

_FAILURE = f"Attributes['{semconv.ROLLOUT_FAILURE}']"
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
    for panel in beside(_figures()):
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
        SELECT Policy FROM spangrad_internal.calls
        WHERE $__timeFilter(Timestamp)
        GROUP BY Policy
        ORDER BY max(Timestamp) DESC, Policy"""
    return variables.some_of("policy", "policy", "Policies that answered in the chosen time.", sql)


def _figures() -> list[stat.Panel]:
    failed = steps("green", orange=0.01, red=0.05)
    return [
        figure(
            "Attempts",
            f"SELECT count() AS attempts FROM {roots('TraceId')}",
            "short",
            "Attempts at rollouts that began in the chosen time.",
        ),
        figure(
            "Failed attempts",
            f"SELECT avg(Failure != '') AS failed FROM {roots(f'{_FAILURE} AS Failure')}",
            "percentunit",
            "Share that ended with a failure: a crash, a timeout, an invalid output.",
            thresholds=failed,
            decimals=1,
        ),
        figure("Calls", f"SELECT count() AS calls FROM {calls('TraceId')}", "short", "Choices of policy calls."),
        figure(
            "Failed calls",
            f"SELECT avg(Failed) AS failed FROM {calls(f'{_FAILED_CALL} AS Failed')}",
            "percentunit",
            "Share of calls with an error, a refusal, or a client that left.",
            thresholds=failed,
            decimals=1,
        ),
        figure(
            "Sampled tokens",
            f"SELECT sum(Tokens) AS tokens FROM {calls('length(ResponseIds) AS Tokens')}",
            "short",
            "Tokens in the responses of policy calls.",
        ),
        figure(
            "Call latency, p95",
            f"SELECT quantile(0.95)(Duration) AS latency FROM {calls('Duration')}",
            "ns",
            "From the gateway's request to the last byte of the answer.",
        ),
    ]


def _outcomes() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, if(Failure = '', 'ended', Failure) AS outcome, count() AS attempts
        FROM {roots(f"Timestamp, {_FAILURE} AS Failure")}
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
        FROM {roots("Timestamp, Duration")}
        GROUP BY time
        ORDER BY time"""
    return over_time("Duration of attempts", sql, "ns", "From the begin of an attempt's root span to its end, evaluation included.")


def _tokens() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, sum(Read) AS prompts, sum(Sampled) AS responses
        FROM {calls("Timestamp, length(PromptIds) AS Read, length(ResponseIds) AS Sampled")}
        GROUP BY time
        ORDER BY time"""
    return over_time("Tokens", sql, "short", "Tokens that the engine read and sampled. Calls without token ids count as 0.", stacked=True)


def _latency() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, quantile(0.5)(Duration) AS p50, quantile(0.95)(Duration) AS p95,
            quantile(0.99)(Duration) AS p99
        FROM {calls("Timestamp, Duration")}
        GROUP BY time
        ORDER BY time"""
    return over_time("Latency of calls", sql, "ns", "From the gateway's request to the last byte of the answer.")


def _errors() -> Panel:
    name = "multiIf(ErrorType != '', ErrorType, Aborted, 'aborted', HttpStatus >= 400, concat('HTTP ', toString(HttpStatus)), 'none')"
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, Error AS error, count() AS calls
        FROM {calls(f"Timestamp, {name} AS Error")}
        WHERE Error != 'none'
        GROUP BY time, error
        ORDER BY time, error"""
    return over_time(
        "Failed calls by error", sql, "short", "Calls with an error, a refusal, or a client that left (aborted).", stacked=True
    )


def _speed() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, sum(Tokens) / ($__interval_s) AS sampled, count() / ($__interval_s) AS calls
        FROM {calls("Timestamp, length(ResponseIds) AS Tokens")}
        GROUP BY time
        ORDER BY time"""
    panel = over_time(
        "Tokens and calls a second", sql, "short", "Sampled tokens a second over all engines, and calls a second beside them."
    )
    return links.second_axis(panel, "calls", "ops")


def _rewards() -> Panel:
    sql = f"""
        SELECT $__timeInterval(IngestedAt) AS time, concat(Name, ', ', Source) AS reward, avg(Value) AS value
        FROM (
            SELECT * EXCEPT (BuildSpec, Revision, Content, IngestedAt), min(r.IngestedAt) AS IngestedAt
            FROM spangrad.rewards AS r
            WHERE {chosen("RunId", "run")} AND {chosen("Mode", "mode")} AND $__timeFilter(r.IngestedAt)
            GROUP BY ALL)
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
        SELECT $__timeInterval(Timestamp) AS time, Tool AS tool, quantile(0.95)(Duration) AS p95
        FROM {tools(f"Timestamp, Duration, {TOOL_NAME} AS Tool")}
        GROUP BY time, tool
        ORDER BY time, tool"""
    return over_time("Latency of tools, p95", sql, "ns", "Spans of tools that agents ran, by the tool's name.")


def _tool_errors() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, Tool AS tool, avg(Failed) AS failed
        FROM {tools(f"Timestamp, StatusCode = 'Error' AS Failed, {TOOL_NAME} AS Tool")}
        GROUP BY time, tool
        ORDER BY time, tool"""
    return over_time("Failed tool runs", sql, "percentunit", "Share of a tool's spans with an error status.", at_most=1)


def _tool_runs() -> Panel:
    sql = f"""
        SELECT $__timeInterval(Timestamp) AS time, Tool AS tool, count() AS runs
        FROM {tools(f"Timestamp, {TOOL_NAME} AS Tool")}
        GROUP BY time, tool
        ORDER BY time, tool"""
    return over_time("Tool runs", sql, "short", "How often agents ran each tool.", stacked=True)


def _tool_advantages() -> Panel:
    sql = f"""
        SELECT t.ToolName AS tool, t.AgentName AS agent, count() AS runs, quantile(0.95)(t.Duration) AS p95, avg(t.Failed) AS failed,
            avg(c.Advantage) AS advantage
        FROM {newest("tool_calls", CHOSEN, "Timestamp")} AS t
        LEFT JOIN (
            SELECT CallId, avg(Advantage) AS Advantage
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
    columns = f"""RunId, Mode, RolloutKey, Attempt, Timestamp, Duration, StatusCode, {_FAILURE} AS Failure,
            Attributes['{semconv.TASK_ID}'] AS Task, Attributes['{semconv.GROUP_ID}'] AS Group"""
    # The engine evaluates a named subquery wherever it is named, an array once; only as a subquery's answer does it find rows by their key.
    sql = f"""
        WITH
            shown AS (SELECT * FROM {roots(columns)} ORDER BY Timestamp DESC, RolloutKey, Attempt LIMIT 200),
            (SELECT groupUniqArray(RolloutKey) FROM shown) AS keys
        SELECT r.RolloutKey AS rollout, r.Timestamp AS began, r.RunId AS run, r.Mode AS mode, r.Task AS task, r.Group AS group,
            r.Attempt AS attempt, if(r.Failure = '', r.StatusCode, r.Failure) AS outcome, r.Duration AS duration, t.Return AS return,
            c.Calls AS calls, c.Failed AS failed, c.Read AS prompts, c.Sampled AS responses, s.Runs AS tools, s.Failed AS errors,
            s.Took AS waited
        FROM shown AS r
        LEFT JOIN (
            SELECT RolloutKey, Attempt, count() AS Calls, countIf{_FAILED_CALL} AS Failed, sum(length(PromptIds)) AS Read,
                sum(length(ResponseIds)) AS Sampled
            FROM spangrad_internal.calls FINAL
            PREWHERE RolloutKey IN (SELECT arrayJoin(keys))
            GROUP BY RolloutKey, Attempt
        ) AS c ON c.RolloutKey = r.RolloutKey AND c.Attempt = r.Attempt
        LEFT JOIN (
            SELECT RolloutKey, Attempt, count() AS Runs, countIf(StatusCode = 'Error') AS Failed, sum(Duration) AS Took
            FROM spangrad_internal.rollout_spans FINAL
            PREWHERE RolloutKey IN (SELECT arrayJoin(keys)) AND RowKind = 'span'
            WHERE {IS_TOOL}
            GROUP BY RolloutKey, Attempt
        ) AS s ON s.RolloutKey = r.RolloutKey AND s.Attempt = r.Attempt
        LEFT JOIN (
            SELECT RunId, RolloutId, Attempt, toNullable(sum(arraySum(`Rewards.Value`))) AS Return
            FROM {newest("transitions", f"{is_('BuildSpec', 'dataset')} AND RolloutId IN (SELECT arrayJoin(keys))")}
            GROUP BY RunId, RolloutId, Attempt
        ) AS t ON t.RunId = r.RunId AND t.RolloutId = r.RolloutKey AND t.Attempt = r.Attempt
        ORDER BY began DESC, rollout, attempt"""
    return rows(
        "Newest rollouts",
        sql,
        "The newest 200 attempts. return: sum of the raw rewards that the chosen dataset has; none: not built, or dropped. waited: time in"
        " tools. A rollout leads to the spans it is made of and the versions it trained.",
        units={
            "began": "dateTimeAsIso", "attempt": "none", "duration": "ns", "return": "short", "calls": "short", "failed": "short",
            "prompts": "short", "responses": "short", "tools": "short", "errors": "short", "waited": "ns",
        },
        links={"rollout": ("Its spans and versions", links.LINEAGE_OF_ROLLOUT)},
        alarms={"failed": 1, "errors": 1},
        height=14,
    )  # fmt: skip
