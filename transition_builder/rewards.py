"""What was said about a rollout, as rewards, and which call each of them goes to.

In: evaluations (events and logs `gen_ai.evaluation.result`), tool spans, and placed calls, all of final attempts.
Out: rows of otel.rewards, rollouts whose rewards cannot be trusted, and each kept call's rewards. Invariant: the
rewards of a rollout's transitions sum to the rollout's rewards; a missing or non-finite reward is never read as 0.

Targets. An evaluation on a call's own span (the gateway's, or the openai-level span of the same call: then the last
call below it, its first choice), or one that names a response id, is that call's. Any other is the rollout's.

Precedence. For one target and one name the first source in RewardSource's order wins: runner (an event on the attempt's
root), evaluation_event (an event on any other span), evaluation_log; the others' rows are not rewards. Within the winning
source a span that repeats itself is believed the last time; different spans add up. AIR rows add up as well.

AIR, tool errors. A failed tool call rewards the call that caused it: the call whose answer asked for that tool call id,
where both spans say so; else, of the calls that precede it by sequence numbers and are not inside some other tool, one of
the same agent before others, one with the nearest common ancestor before others, the latest before earlier ones.
"""

from __future__ import annotations

import hashlib
import json

import numpy as np
import polars as pl

from spangrad import semconv
from spangrad.settings import BuilderSettings
from spangrad.types import RewardSource
from transition_builder import lineage
from transition_builder.dialects import openinference
from transition_builder.frames import REWARDS, conform, empty
from transition_builder.lineage import Forest

AIR_TOOL_ERROR = "tool_error"
"""Name of the rewards that AIR's rule for failed tools gives."""
_PRECEDENCE = {source.value: rank for rank, source in enumerate(RewardSource)}
_ATTEMPT = ["RunId", "RolloutId", "Attempt"]
_SPAN = ["TraceId", "SpanId"]


def evaluations(rows: pl.DataFrame, rollouts: pl.DataFrame, calls: pl.DataFrame, nodes: pl.DataFrame) -> pl.DataFrame:
    """Winning evaluations as REWARDS rows; Value is null where the score is no finite number.

    Args:
        rows: resolved evaluation rows of final attempts.
        rollouts: ROLLOUTS.
        calls: placed canonical calls (Order) of final attempts.
        nodes: the spans that `calls` refer to by Node and ClientNode.
    """
    root = rollouts.select("RunId", "RolloutId", *_SPAN).with_columns(is_root=pl.lit(True))
    said = (
        rows.join(root, on=["RunId", "RolloutId", *_SPAN], how="left")
        .join(rollouts.select("RunId", "RolloutId", pl.col("Mode").alias("root_mode")), on=["RunId", "RolloutId"])
        .with_columns(
            Name=openinference.attribute(semconv.EVALUATION_NAME).fill_null(semconv.REWARD_NAME),
            score=openinference.attribute(semconv.EVALUATION_SCORE),
            ResponseId=openinference.attribute(semconv.GEN_AI_RESPONSE_ID),
            Mode="root_mode",
            Source=pl.when(pl.col("RowKind") == "evaluation_log")
            .then(pl.lit(RewardSource.EVALUATION_LOG.value))
            .when(pl.col("is_root"))
            .then(pl.lit(RewardSource.RUNNER.value))
            .otherwise(pl.lit(RewardSource.EVALUATION_EVENT.value)),
            RuleHash=pl.lit(""),
        )
        .filter(pl.col("score").is_not_null())
    )
    by_span, by_response = _targets(calls, nodes)
    target = pl.coalesce("by_span", "by_response", pl.lit(""))
    value = pl.col("score").cast(pl.Float64, strict=False)
    source = pl.col("Source").replace_strict(_PRECEDENCE, return_dtype=pl.Int64)
    aimed = (
        said.join(by_span, on=[*_ATTEMPT, *_SPAN], how="left")
        .join(by_response, on=[*_ATTEMPT, "ResponseId"], how="left")
        .with_columns(CallId=target, Value=pl.when(value.is_finite()).then(value), rank=source)
        .filter(pl.col("rank") == pl.col("rank").min().over(*_ATTEMPT, "CallId", "Name"))
        .sort("Timestamp", "Choice")
        .unique([*_ATTEMPT, "CallId", "Name", *_SPAN], keep="last", maintain_order=True)
    )
    return conform(aimed, REWARDS)


def tool_errors(nodes: pl.DataFrame, tree: Forest, calls: pl.DataFrame, rollouts: pl.DataFrame, spec: BuilderSettings) -> pl.DataFrame:
    """AIR's rewards for failed tools, as REWARDS rows: one for each failed tool call that some call caused.

    Args:
        nodes: described, resolved spans.
        tree: over the same nodes.
        calls: placed canonical calls (AgentName, Order) of final attempts.
        rollouts: ROLLOUTS of the rollouts that may have rewards.
        spec: names the tools that count, and the reward.
    """
    if spec.tool_error_reward is None:
        return empty(REWARDS)
    failed = (
        nodes.select(*_ATTEMPT, *_SPAN, "IsTool", "ToolFailed", "ToolName", "ToolCallId")
        .with_row_index("tool")
        .join(rollouts.select(*_ATTEMPT, "Mode"), on=_ATTEMPT)
        .filter(pl.col("IsTool") & pl.col("ToolFailed"))
    )
    if spec.tool_error_tools:
        failed = failed.filter(pl.col("ToolName").is_in(spec.tool_error_tools))
    failed = failed.sort("tool").with_columns(pl.col("tool").cast(pl.Int64), pl.int_range(pl.len()).alias("tool_row"))
    spans = (
        calls.sort("Choice")
        .unique([*_ATTEMPT, *_SPAN], keep="first", maintain_order=True)
        .with_columns(pl.int_range(pl.len()).alias("call_row"))
    )
    if failed.is_empty() or spans.is_empty():
        return empty(REWARDS)
    tools, callers = failed["tool"].to_numpy(), spans["Node"].to_numpy()
    asked = _asked(nodes, spans)
    pairs = failed.join(spans.select(*_ATTEMPT, "Order", "AgentName", "Node", "CallId", "call_row"), on=_ATTEMPT)
    place = lineage.paths(nodes, tree, np.concatenate([tools, callers]))
    tool_paths = place.take(pairs["tool_row"].to_numpy())
    call_paths = place.take(pairs["call_row"].to_numpy() + len(tools))
    common = tree.common_depth(pairs["tool"].to_numpy(), pairs["Node"].to_numpy())
    enclosing = tree.nearest(nodes["IsTool"].to_numpy())[pairs["Node"].to_numpy()]
    agents = lineage.agent_names(nodes, tree, tree.parent[tools]).to_frame("tool_agent").with_row_index("tool_row")
    causes = (
        pairs.with_columns(
            pl.Series("precedes", lineage.precedes(call_paths, tool_paths)),
            pl.Series("common", common),
            pl.Series("inside_other_tool", tree.depth[enclosing] > common),
        )
        .join(agents.with_columns(pl.col("tool_row").cast(pl.Int64)), on="tool_row")
        .join(asked, on=["call_row", "ToolCallId"], how="left")
        .with_columns(pl.col("asked").fill_null(False))
        .filter(pl.col("asked") | (pl.col("precedes") & ~pl.col("inside_other_tool")))
        .with_columns(same_agent=pl.col("AgentName") == pl.col("tool_agent"))
        .sort("tool_row", "asked", "same_agent", "common", "Order")
        .unique("tool_row", keep="last", maintain_order=True)
    )
    return conform(
        causes.with_columns(
            Name=pl.lit(AIR_TOOL_ERROR),
            Value=pl.lit(spec.tool_error_reward),
            Source=pl.lit(RewardSource.AIR.value),
            RuleHash=pl.lit(rule_hash(spec)),
        ),
        REWARDS,
    )


def rule_hash(spec: BuilderSettings) -> str:
    """Hash of AIR's rule for failed tools: the first 16 hex digits of SHA-256 of its canonical JSON."""
    rule = {"rule": AIR_TOOL_ERROR, "reward": spec.tool_error_reward, "tools": sorted(spec.tool_error_tools)}
    return hashlib.sha256(json.dumps(rule, sort_keys=True).encode()).hexdigest()[:16]


def spread(rewards: pl.DataFrame, placed: pl.DataFrame) -> pl.DataFrame:
    """Give every reward to a kept call: CallId and the lists `Rewards.Name`, `.Value`, `.Source`, for calls that got any.

    The rollout's own go to its last kept call; those of a dropped call to the nearest earlier kept one, else to the
    first. Rewards of rollouts that keep no call go nowhere.

    Args:
        rewards: REWARDS rows.
        placed: all calls of final attempts with RunId, RolloutId, Attempt, CallId, Order, Choice and Kept.
    """
    position = pl.struct("Order", "Choice", "CallId").rank("dense").over(_ATTEMPT).cast(pl.Int64)
    calls = placed.with_columns(at=position)
    kept = calls.filter("Kept").select(*_ATTEMPT, "at", pl.col("CallId").alias("target")).sort("at")
    first = kept.unique(_ATTEMPT, keep="first", maintain_order=True).select(*_ATTEMPT, pl.col("target").alias("first"))
    beyond = 2**62
    return (
        rewards.join(calls.select(*_ATTEMPT, "CallId", "at"), on=[*_ATTEMPT, "CallId"], how="left")
        .with_columns(pl.col("at").fill_null(beyond))
        .sort("at")
        .join_asof(kept, on="at", by=_ATTEMPT, strategy="backward", check_sortedness=False)
        .join(first, on=_ATTEMPT)
        .with_columns(CallId=pl.coalesce("target", "first"), rank=pl.col("Source").replace_strict(_PRECEDENCE, return_dtype=pl.Int64))
        .sort("rank", "Name", *_SPAN)
        .group_by("CallId", maintain_order=True)
        .agg(pl.col(name).alias(f"Rewards.{name}") for name in ("Name", "Value", "Source"))
    )


def _targets(calls: pl.DataFrame, nodes: pl.DataFrame) -> tuple[pl.DataFrame, pl.DataFrame]:
    """Calls by the spans that are theirs, and by their response ids: the latest call, its first choice."""
    latest = calls.sort("Order", "Choice", descending=[True, False])
    client = nodes.select(*_SPAN).with_row_index("ClientNode").with_columns(pl.col("ClientNode").cast(pl.Int64))
    own = latest.select(*_ATTEMPT, *_SPAN, pl.col("CallId").alias("by_span"))
    through = (
        latest.drop(*_SPAN)
        .join(client, on="ClientNode", maintain_order="left")
        .select(*_ATTEMPT, *_SPAN, pl.col("CallId").alias("by_span"))
    )
    by_span = pl.concat([own, through]).unique([*_ATTEMPT, *_SPAN], keep="first", maintain_order=True)
    by_response = (
        latest.filter(pl.col("ResponseId") != "")
        .select(*_ATTEMPT, "ResponseId", pl.col("CallId").alias("by_response"))
        .unique([*_ATTEMPT, "ResponseId"], keep="first", maintain_order=True)
    )
    return by_span, by_response


def _asked(nodes: pl.DataFrame, spans: pl.DataFrame) -> pl.DataFrame:
    """Tool call ids that each call's answer asked for: call_row, ToolCallId, asked."""
    client = pl.when(pl.col("ByGateway")).then("ClientNode").otherwise("Node")
    asked = openinference.asked_tools(nodes).join(nodes.select(*_SPAN).with_row_index("node"), on=_SPAN)
    return (
        spans.sort("Order")
        .select("call_row", node=client)
        .join(asked.with_columns(pl.col("node").cast(pl.Int64)), on="node")
        .unique(["node", "ToolCallId"], keep="last", maintain_order=True)
        .select("call_row", "ToolCallId", pl.lit(True).alias("asked"))
    )
