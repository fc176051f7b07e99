"""Calls of rollouts, reconstructed from their spans: the steps of docs/concepts/calls.md, in its order.

Invariant: a call that the gateway recorded is the gateway's, and nothing that it saw is counted a second time; choices of one call share
their place; places do not depend on other rollouts among the spans.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl

from transition_builder import dialects
from transition_builder.calls import causes, retries, span_matching
from transition_builder.calls.agents import Agents, agent_names, components
from transition_builder.calls.branches import branches, parents
from transition_builder.calls.call_groups import CallGroups
from transition_builder.calls.forest import Indices, Mask, SpanForest
from transition_builder.calls.order import Clocks, order, paths
from transition_builder.calls.preceding import NO_CALL, Events, came_before
from transition_builder.schemas import ATTEMPT, CALLS, CHOICE, NAMING, SPAN

UNKNOWN = "unknown"
"""Convention of a call that no dialect reads."""
_CANONICAL = [
    *ATTEMPT,
    *(name for name in CALLS if name not in {*NAMING, "Mode"}),
    *("Convention", "Unfinished", "ByGateway", "Node", "ClientNode", "Innermost"),
]


@dataclass(frozen=True, slots=True)
class Reconstructed:
    """Calls and tool calls with their places."""

    calls: pl.DataFrame
    """CALLS of attempts, a row a choice, and Convention, Unfinished, ByGateway;
    Node (of the call's span), Innermost (of its innermost span), ClientNode (of the innermost client span above a gateway span, or
    framework span where there is no client; the number of spans: neither, or no gateway);
    Retried (another retry under the same client span was used), DuplicateOf (the CallId of the same call, recorded twice), Dropped
    (a sender withheld attributes of one of the spans);
    AgentName, Order (from 0 in each attempt), ParentCallId (empty: none), Branch, Components (names of the agents, chains and tools around
    the call, outermost first) and Tools (names of the tools that it caused to run, in order)."""
    caused: pl.DataFrame
    """A row a tool call, by attempt and in order: Tool (the node of its outermost span), Nodes (of all its spans), RunId, RolloutId,
    Attempt, TraceId, SpanId, ToolName, ToolFailed, ToolCallId, ToolArguments, ToolResult (null: not recorded), Duration (of its
    outermost span, in nanoseconds), AgentName (the agent that ran it), CallId (of the first choice of the call that caused it; empty
    where none did), Asked (whether that call requested it by its id)."""


def reconstruct(nodes: pl.DataFrame, recorded: pl.DataFrame, answers: pl.DataFrame, dropped: pl.DataFrame) -> Reconstructed:
    """Reconstruct the calls of all attempts.

    Args:
        nodes: described, resolved spans of all attempts; the gateway's calls are among them.
        recorded: the gateway's calls, canonical and resolved.
        answers: ANSWERS of (at least) the `uncovered` spans that may hold some.
        dropped: DROPPED.
    """
    answers = answers.unique(CHOICE, keep="first", maintain_order=True) if answers.height else answers
    forest = SpanForest.of_spans(nodes)

    # One call of many spans
    gateway = _nodes_of(recorded, nodes)
    groups = CallGroups.of(nodes, forest, gateway)
    forest, groups, absorbed = span_matching.link(nodes, forest, groups, recorded, answers)
    choices = _choices(nodes, groups, absorbed, recorded.with_columns(Node=gateway), answers)
    tools = causes.tool_calls(nodes, forest, groups.member)

    # Order: events are calls and tool calls, sorted by attempt and place; a call's number is its place among the calls.
    clocks, unsorted = Clocks.of(nodes), _events(choices, tools)
    path = paths(forest, clocks, unsorted["Node"].to_numpy())
    sort = order(clocks, path, unsorted)
    path, (attempt, is_call, row, span, leaf) = (
        path[sort],
        (unsorted[name].to_numpy()[sort] for name in ("Number", "IsCall", "Row", "Node", "Innermost")),
    )
    calls, ran = np.flatnonzero(is_call), np.flatnonzero(~is_call)
    number = np.zeros(forest.size, dtype=np.int64)
    number[span[calls]] = np.arange(len(calls))
    call_of_row, tools = number[choices["Node"].to_numpy()], tools[row[ran]]

    # Retries and duplicates
    innermost = leaf[calls]
    outcome = choices.select("ResponseId", failed=retries.failed(), good=~retries.failed() & ~pl.col("Aborted"))[row[calls]]
    retried = retries.unused(nodes, groups, innermost, outcome, answers)
    duplicate_of = retries.duplicates(choices, groups.chained(innermost)[call_of_row], forest.size)
    useful = np.zeros(len(sort), dtype=np.bool_)
    useful[calls] = ~retried & (~outcome["failed"] & (duplicate_of[row[calls]] == "")).to_numpy()
    event_of_span = np.full(forest.size + 1, NO_CALL)
    event_of_span[innermost] = calls
    event_of_span = event_of_span[groups.owners(innermost, ~retried)]

    # Agents, what came before, parents and branches
    agents = Agents.of(nodes, forest, groups.member)
    outermost = np.where(is_call, np.append(groups.roots, forest.size)[span], span)
    events = Events.of(forest, clocks, agents, path, outermost, attempt, is_call, useful)
    before = came_before(forest, clocks, agents, events)
    number_of_event = np.append(np.where(is_call, np.cumsum(is_call) - 1, NO_CALL), NO_CALL)
    in_order = events.take(calls)
    by_call = np.lexsort((choices["ChoiceIndex"].to_numpy(), call_of_row))
    first_choice = np.searchsorted(call_of_row[by_call], np.arange(len(calls)))
    parent, parent_row, continues = parents(in_order, number_of_event[before[calls]], choices, by_call, first_choice)
    branch = branches(forest, agents, in_order, parent, continues)

    # Causes of tool calls
    asked = causes.asked_by_id(nodes, tools, ran, attempt, event_of_span)
    cause = np.where(asked == NO_CALL, before[ran], asked)
    caused = tools.with_columns(
        AgentName=agent_names(nodes, forest, forest.parent[tools["Tool"].to_numpy()]),
        CallId=_gathered(choices["CallId"], np.append(by_call[first_choice], NO_CALL)[number_of_event[cause]]),
        Asked=asked != NO_CALL,
    )

    places = pl.DataFrame(
        {
            "Retried": retried,
            "Dropped": np.isin(calls, event_of_span[_nodes_of(dropped, nodes)]),
            "AgentName": agent_names(nodes, forest, span[calls]),
            "Order": np.arange(len(calls)) - in_order.first,
            "ParentCallId": _gathered(choices["CallId"], parent_row),
            "Branch": branch,
            "Components": components(nodes, forest, groups.member, outermost[calls]),
            "Tools": _tools(caused["ToolName"], number_of_event[cause], len(calls)),
        }
    )
    return Reconstructed(choices.with_columns(*places[call_of_row], DuplicateOf=duplicate_of), caused)


def _nodes_of(spans: pl.DataFrame, nodes: pl.DataFrame) -> Indices:
    """Return the nodes of spans, in their order; spans that are none of them are left out."""
    index = nodes.select(SPAN).with_row_index("node")
    return spans.select(SPAN).join(index, on=SPAN, maintain_order="left")["node"].cast(pl.Int64).to_numpy()


def _choices(nodes: pl.DataFrame, groups: CallGroups, absorbed: Mask, recorded: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Return the canonical calls, a row a choice: those of the gateway, and those of groups without it."""
    facts = {"Convention": pl.lit("gateway"), "Unfinished": pl.lit(False), "Innermost": "Node"}
    choices = recorded.with_columns(ClientNode=groups.representatives(recorded["Node"].to_numpy()), **facts).select(_CANONICAL)
    innermost = groups.calls(absorbed)
    if not len(innermost):
        return choices
    holds_ids = np.zeros(nodes.height, dtype=np.bool_)
    holds_ids[_nodes_of(answers.filter(pl.col("PromptIds").list.len() > 0), nodes)] = True
    named = groups.id_spans(innermost, holds_ids)
    spans = nodes[named].with_columns(
        Convention=pl.when(pl.Series(groups.suspect[innermost])).then(pl.lit(UNKNOWN)).otherwise("Convention"),
        Node=named,
        Innermost=innermost,
        ClientNode=pl.lit(nodes.height, pl.Int64),
    )
    return pl.concat([choices, dialects.calls(spans, answers).select(_CANONICAL)], how="vertical_relaxed")


def _events(choices: pl.DataFrame, tools: pl.DataFrame) -> pl.DataFrame:
    """Return a row a call and a row a tool call: ATTEMPT and its Number, SPAN, Node, Innermost, ByGateway, IsCall, Row (its first here)."""
    row = pl.int_range(pl.len(), dtype=pl.Int64)
    calls = choices.select(*ATTEMPT, *SPAN, "Node", "Innermost", "ByGateway", IsCall=pl.lit(True), Row=row)
    ran = tools.select(*ATTEMPT, *SPAN, Node="Tool", Innermost="Tool", ByGateway=pl.lit(False), IsCall=pl.lit(False), Row=row)
    events = pl.concat([calls.unique("Node", keep="first", maintain_order=True), ran])
    return events.with_columns(Number=pl.struct(ATTEMPT).rank("dense").cast(pl.Int64) - 1)


def _gathered(names: pl.Series, rows: Indices) -> pl.Series:
    """Return the names at the given rows, empty for NO_CALL."""
    places = pl.Series(rows, dtype=pl.Int64)
    return names.gather(places.set(places == NO_CALL, None)).fill_null("")


def _tools(names: pl.Series, cause: Indices, calls: int) -> pl.Series:
    """Return the names of the tools that each of the calls caused to run."""
    ran = pl.DataFrame({"cause": cause, "Tools": names.fill_null("")}).group_by("cause", maintain_order=True).agg("Tools")
    return pl.DataFrame({"cause": np.arange(calls)}).join(ran, on="cause", how="left", maintain_order="left")["Tools"].fill_null([])
