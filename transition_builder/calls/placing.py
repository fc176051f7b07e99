"""Placement of every call in its rollout: its agent, order, parent, branch, surrounding components, and the tools that it caused.

In: joined calls and their spans. Out: the same calls with AgentName, Order, ParentCallId, Branch, Components and Tools, and the tool calls
with their causes. Invariant: choices of one call share all of them; places do not depend on other rollouts in the batch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder.calls import branches, causes, lineage
from transition_builder.calls.before import NO_CALL, Agents, CallHistory
from transition_builder.calls.branches import Lists
from transition_builder.calls.join import Joined
from transition_builder.calls.lineage import Forest, Indices, Mask
from transition_builder.calls.retries import failed
from transition_builder.schemas import ATTEMPT, SPAN


@dataclass(frozen=True, slots=True)
class Placed:
    """Calls and tool calls with their places."""

    calls: pl.DataFrame
    """Canonical calls with AgentName, Order (from 0 in each attempt), ParentCallId (empty: none), Branch, Components (names of the agents,
    chains and tools around the call, outermost first) and Tools (names of the tools that it caused to run, in order)."""
    caused: pl.DataFrame
    """A row a tool call, by attempt and in order: Tool (the node of its outermost span), Nodes (of all its spans), RunId, RolloutId,
    Attempt, TraceId, SpanId, ToolName, ToolFailed, ToolCallId, ToolArguments, ToolResult (null: not recorded), Duration (of its
    outermost span, in nanoseconds), AgentName (the agent that ran it), CallId (of the first choice of the call that caused it; empty
    where none did), Asked (whether that call requested it by its id)."""


def place(nodes: pl.DataFrame, joined: Joined) -> Placed:
    """Place the calls of all attempts.

    Args:
        nodes: described, resolved spans.
        joined: of the same nodes.
    """
    tree, span_clocks = joined.tree, lineage.clocks(nodes)
    tools, outer = causes.tool_spans(nodes, tree, joined.call_like)
    runs = causes.facts(nodes, tools, outer)
    spans, first, span_of = np.unique(joined.calls["Node"].to_numpy(), return_index=True, return_inverse=True)
    many = len(spans)
    slim = joined.calls.select(
        *ATTEMPT, *SPAN, "TopNode", "ByGateway", counts=~failed() & ~pl.col("Retried") & (pl.col("DuplicateOf") == "")
    )[first]
    things = pl.concat([slim.select(*ATTEMPT, *SPAN), runs.select(*ATTEMPT, *SPAN)])
    attempt = _numbered(things.select(ATTEMPT))
    where = lineage.paths(nodes, tree, np.concatenate([spans, tools]), span_clocks)
    recorded = np.append(slim["ByGateway"].to_numpy(), np.zeros(len(tools), dtype=np.bool_))
    rank = lineage.order(attempt, where, recorded, things, np.arange(len(attempt)) < many)

    # From here on calls are numbered in the order of attempts, and of time.
    sort = np.lexsort((rank[:many], attempt[:many]))
    row_of_span = np.empty(many, dtype=np.int64)
    row_of_span[sort] = np.arange(many)
    agents = Agents.of(nodes, tree, joined.call_like)
    calls = agents.things(tree, span_clocks, slim["TopNode"].to_numpy()[sort], attempt[sort], where.take(sort))
    past = CallHistory.of(tree, agents, calls, slim["counts"].to_numpy()[sort], int(attempt.max(initial=-1)) + 1, tools)

    row = row_of_span[span_of]
    choices = np.lexsort((joined.calls["Choice"].to_numpy(), row))
    starts = np.flatnonzero(np.diff(row[choices], prepend=-1))
    prompts, responses = (Lists.of(joined.calls[name]).take(choices) for name in ("PromptIds", "ResponseIds"))
    call_tree = branches.build_call_tree(past, prompts, responses, starts)

    key = attempt * (len(attempt) + 1) + rank
    until = np.searchsorted(key[sort], key[many:])
    cause, by_id = NO_CALL * np.ones(len(tools), dtype=np.int64), np.zeros(len(tools), dtype=np.bool_)
    if len(tools) and many:
        row_of = np.full(tree.size + 1, NO_CALL, dtype=np.int64)
        row_of[spans] = row_of_span
        ran = agents.things(tree, span_clocks, tools, attempt[many:], where.take(np.arange(many, len(attempt))))
        asked = causes.asked(nodes, runs, ran.attempt, until, row_of[np.append(joined.call_of, tree.size)[: tree.size]], attempt[sort])
        by_id = asked != NO_CALL
        cause = np.where(by_id, asked, past.latest(ran, until, ended=False))

    names = joined.calls["CallId"].gather(choices)
    caused = runs.with_columns(
        lineage.agent_names(nodes, tree, tree.parent[tools]),
        _gathered(names, np.where(cause == NO_CALL, NO_CALL, starts[cause] if many else cause)).alias("CallId"),
        Asked=pl.Series(by_id, dtype=pl.Boolean),
    )[np.lexsort((rank[many:], attempt[many:]))]
    placed = joined.calls.with_columns(
        lineage.agent_names(nodes, tree, spans).gather(span_of),
        _components(nodes, tree, joined.call_like, slim["TopNode"].to_numpy()).gather(span_of),
        _gathered(names, call_tree.choice[row]).alias("ParentCallId"),
        _tools(caused, joined.calls["CallId"].gather(choices[starts])).gather(row),
        Order=row - past.first[attempt[span_of]],
        Branch=call_tree.branch[row],
    )
    return Placed(placed, caused)


def _numbered(attempts: pl.DataFrame) -> Indices:
    """Return a number for each attempt, from 0."""
    index = attempts.unique(maintain_order=True).with_row_index("attempt")
    return attempts.join(index, on=ATTEMPT, how="left", maintain_order="left")["attempt"].cast(pl.Int64).to_numpy()


def _gathered(names: pl.Series, at: Indices) -> pl.Series:
    """Return the names at the given places, empty for NO_CALL."""
    if not len(names):
        return pl.Series([""]).new_from_index(0, len(at))
    return names.gather(pl.Series(at, dtype=pl.Int64).replace(NO_CALL, None).cast(pl.UInt32)).fill_null("")


def _tools(caused: pl.DataFrame, calls: pl.Series) -> pl.Series:
    """Return the names of the tools that each of the calls caused to run."""
    ran = caused.lazy().filter(pl.col("CallId") != "").group_by("CallId").agg(pl.col("ToolName").fill_null("").alias("Tools"))
    frame = calls.alias("CallId").to_frame().lazy().join(ran, on="CallId", how="left", maintain_order="left")
    return frame.select(pl.col("Tools").fill_null([])).collect().to_series()


def _components(nodes: pl.DataFrame, tree: Forest, call_like: Mask, tops: Indices) -> pl.Series:
    """Return the names of the agents, chains and tools around each of the spans, outermost first."""
    named = nodes.select("IsChain", "IsTool", IsAgent=pl.col("AgentName").is_not_null())
    around = (named["IsChain"] | named["IsTool"] | named["IsAgent"]).to_numpy() & ~call_like
    nearest = tree.nearest(around)
    places, which = np.unique(nearest[tree.parent[tops]], return_inverse=True)
    levels = [places]
    while (levels[-1] != tree.size).any():
        levels.append(nearest[tree.parent[levels[-1]]])
    # Every call has a row, and those without a name around them an empty list.
    at = np.stack(levels[::-1], axis=1)
    inside = at != tree.size
    place, _ = np.nonzero(inside)
    own = pl.when("IsTool").then("ToolName").otherwise(pl.coalesce("AgentName", "SpanName"))
    text = nodes.select("IsTool", "ToolName", "AgentName", "SpanName")[at[inside]].select(pl.coalesce(own, "SpanName"))
    lists = text.with_columns(place=place).group_by("place", maintain_order=True).agg(pl.all())
    names = pl.DataFrame({"place": np.arange(len(places))}).join(lists, on="place", how="left", maintain_order="left")
    return names.to_series(1).fill_null([]).gather(which).alias("Components")
