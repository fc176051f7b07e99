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
from transition_builder.calls.agents import Agents, agent_names, components, listed
from transition_builder.calls.branches import branches, parents
from transition_builder.calls.call_groups import REQUEST, CallGroups
from transition_builder.calls.forest import SpanForest, nodes_of
from transition_builder.calls.order import Clocks, order
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
    """A row a tool call, by attempt and in order: Tool (the node of its outermost span), Nodes (of all its spans), ATTEMPT, SPAN, ToolName,
    ToolFailed, ToolCallId, ToolArguments, ToolResult (null: not recorded), Duration (of its outermost span, in nanoseconds), AgentName (the
    agent that ran it), CallId (of the first choice of the call that caused it; empty where none did), Asked (whether that call requested it
    by its id)."""


def reconstruct(nodes: pl.DataFrame, recorded: pl.DataFrame, answers: pl.DataFrame, dropped: pl.DataFrame) -> Reconstructed:
    """Reconstruct the calls of all attempts from their spans (described, resolved), those of the gateway among them.

    `recorded` are the gateway's calls, canonical and resolved; ANSWERS are of (at least) the `uncovered` spans that may hold some.
    """
    answers = answers.unique(CHOICE, keep="first", maintain_order=True) if answers.height else answers
    forest = SpanForest.of_spans(nodes)

    # One call of many spans
    gateway = nodes_of(recorded, nodes)
    forest, groups = span_matching.link(nodes, forest, CallGroups.of(nodes, forest, gateway), recorded, answers)
    choices = _choices(nodes, groups, recorded.with_columns(Node=gateway), answers)
    tools = causes.tool_calls(nodes, forest, groups.member)

    # Order: events are calls and tool calls, sorted by attempt and place.
    clocks, unsorted = Clocks.of(nodes, forest), _events(choices, tools)
    path = clocks.paths(unsorted["Node"].to_numpy())
    sort = order(clocks, unsorted, path)
    path = path[sort]
    attempt, is_call, span, leaf = (unsorted[name].to_numpy()[sort] for name in ("Number", "IsCall", "Node", "Innermost"))
    calls, ran = np.flatnonzero(is_call), np.flatnonzero(~is_call)
    innermost, tools = leaf[calls], tools[sort[ran] - len(calls)]
    event_of_span = np.full(forest.size + 1, NO_CALL)
    event_of_span[span[calls]] = calls
    event_of_row = event_of_span[choices["Node"].to_numpy()]
    by_event = np.lexsort((choices["ChoiceIndex"].to_numpy(), event_of_row))
    first_choice = np.searchsorted(event_of_row[by_event], np.arange(len(sort)))
    row_of_call = by_event[first_choice[calls]]  # that of its first choice, whichever came first

    # Retries and duplicates
    outcome = choices.select("ResponseId", failed=retries.failed(), good=~retries.failed() & ~pl.col("Aborted"))[row_of_call]
    duplicate_of = retries.duplicates(choices, groups.chained(leaf)[event_of_row], forest.size)
    retried, useful = np.zeros((2, len(sort)), dtype=np.bool_)
    retried[calls] = retries.unused(nodes, groups, innermost, outcome, answers)
    useful[calls] = ~retried[calls] & (~outcome["failed"] & (duplicate_of[row_of_call] == "")).to_numpy()
    event_of_span[innermost] = calls
    event_of_span = event_of_span[groups.owners(innermost, ~retried[calls])]

    # Agents, what came before, parents and branches
    agents = Agents.of(nodes, forest, groups.member)
    names = agent_names(nodes, forest, np.where(is_call, span, forest.parent[span]))
    outermost = span.copy()
    outermost[calls] = groups.outermost(span[calls])
    events = Events.of(forest, clocks, agents, path, outermost, attempt, is_call, useful)
    before = came_before(forest, clocks, agents, events)
    parent, parent_row, continues = parents(events, before, choices, by_event, first_choice)
    branch = branches(forest, agents, events, parent, continues)

    # Causes of tool calls
    asked = causes.asked_by_id(nodes, tools, ran, attempt, event_of_span)
    cause = np.where(asked == NO_CALL, before[ran], asked)
    first_row = np.full(len(sort) + 1, NO_CALL)
    first_row[calls] = row_of_call
    call_ids = choices["CallId"].extend_constant("", 1)
    caused = tools.with_columns(AgentName=names[ran], CallId=call_ids[first_row[cause]], Asked=asked != NO_CALL)

    number = np.cumsum(is_call) - is_call
    places = pl.DataFrame(
        {
            "Retried": retried,
            "Dropped": np.isin(np.arange(len(sort)), event_of_span[nodes_of(dropped, nodes)]),
            "AgentName": names,
            "Order": number - number[events.first],
            "ParentCallId": call_ids[parent_row],
            "Branch": branch,
        }
    )[event_of_row]
    around = components(nodes, forest, groups.member, outermost[event_of_row])
    is_caused = np.flatnonzero(cause != NO_CALL)
    ran_tools = listed(caused["ToolName"][is_caused].fill_null(""), cause[is_caused], len(sort))[event_of_row]
    return Reconstructed(choices.with_columns(*places, Components=around, Tools=ran_tools, DuplicateOf=duplicate_of), caused)


def _choices(nodes: pl.DataFrame, groups: CallGroups, recorded: pl.DataFrame, answers: pl.DataFrame) -> pl.DataFrame:
    """Return the canonical calls, a row a choice: those of the gateway, and those of groups without it."""
    facts = {"Convention": pl.lit("gateway"), "Unfinished": pl.lit(False), "Innermost": "Node"}
    choices = recorded.with_columns(ClientNode=groups.representatives(recorded["Node"].to_numpy()), **facts)[_CANONICAL]
    innermost = groups.calls()
    if not len(innermost):
        return choices
    named = groups.id_spans(innermost, groups.tree.mask(nodes_of(answers.filter(pl.col("PromptIds").list.len() > 0), nodes)))
    spans = nodes[named].with_columns(
        Convention=pl.when(pl.Series(groups.distance[innermost] == REQUEST)).then(pl.lit(UNKNOWN)).otherwise("Convention"),
        Node=named,
        Innermost=innermost,
        ClientNode=pl.lit(nodes.height, pl.Int64),
    )
    return pl.concat([choices, dialects.calls(spans, answers)[_CANONICAL]], how="vertical_relaxed")


def _events(choices: pl.DataFrame, tools: pl.DataFrame) -> pl.DataFrame:
    """Return a row a call, then a row a tool call in its order: ATTEMPT and its Number, SPAN, Node, Innermost, ByGateway, IsCall."""
    calls = choices.select(*ATTEMPT, *SPAN, "Node", "Innermost", "ByGateway", IsCall=pl.lit(True))
    ran = tools.select(*ATTEMPT, *SPAN, Node="Tool", Innermost="Tool", ByGateway=pl.lit(False), IsCall=pl.lit(False))
    events = pl.concat([calls.unique("Node", keep="first", maintain_order=True), ran])
    return events.with_columns(Number=pl.struct(ATTEMPT).rank("dense").cast(pl.Int64) - 1)
