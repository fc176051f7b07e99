"""Agents, chains and tools around spans. Invariant: spans of one name directly inside each other are one agent."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import polars as pl
import pyarrow as pa

from spangrad import semconv
from transition_builder.calls.forest import Indices, Mask, SpanForest, chains, follow
from transition_builder.dialects.conventions.gateway import IS_GATEWAY

_NO_AGENT = -1


@dataclass(frozen=True, slots=True)
class Agents:
    """Agents and tools around spans; entries for all nodes and the virtual root above them."""

    agent: Indices
    """Agent's span that each node lies in or is, the outermost of those that are one agent; the forest's size where there is none."""
    around: Indices
    """Agent in which a node's agent lies."""
    name: Indices
    """Number of the agent's name."""
    tool: Indices
    """Tool call that each node lies in or is."""

    @classmethod
    def of(cls, nodes: pl.DataFrame, forest: SpanForest, call_like: Mask) -> Agents:
        """Find the agents; spans of calls (`call_like`) may name their agent, but are none."""
        names = nodes["AgentName"].set(pl.Series(call_like), None)
        name = names.rank("dense").cast(pl.Int64).fill_null(_NO_AGENT).extend_constant(_NO_AGENT, 1).to_numpy()
        nearest, tool = forest.nearest(name[:-1] != _NO_AGENT), forest.nearest(nodes["IsTool"].to_numpy())
        outside = nearest[forest.parent]
        nested = (name != _NO_AGENT) & (name[outside] == name) & (tool[outside] == tool)
        agent = follow(np.where(nested, outside, np.arange(forest.size + 1)))[nearest]
        return cls(agent, agent[forest.parent[agent]], name, tool)

    def alike(self, left: Indices, right: Indices) -> Mask:
        """Return whether two agents have one name and lie in the same agent."""
        return (self.name[left] == self.name[right]) & (self.around[left] == self.around[right])


def agent_names(nodes: pl.DataFrame, forest: SpanForest, spans: Indices) -> pl.Series:
    """Return the names of the agents that the given spans belong to.

    The nearest ancestor that names an agent; else the outermost CHAIN (LangGraph's plain graphs); else the
    service of the nearest span that is neither the gateway's nor the runner's root; else of the nearest at all.
    """
    searches = [
        (forest.nearest, pl.col("AgentName").is_not_null(), "AgentName"),
        (forest.outermost, pl.col("IsChain"), "SpanName"),
        (forest.nearest, ~IS_GATEWAY & (pl.col("SpanName") != semconv.ROOT_SPAN_NAME), "ServiceName"),
        (forest.nearest, ~IS_GATEWAY, "ServiceName"),
    ]
    names = pl.repeat(None, len(spans), dtype=pl.String, eager=True)
    for search, marked, column in searches:
        if not names.has_nulls():
            break
        at = search(nodes.select(marked).to_series().to_numpy())[spans]
        names = names.zip_with(names.is_not_null(), nodes[column].extend_constant(None, 1)[at])
    return names.fill_null("")


def components(nodes: pl.DataFrame, forest: SpanForest, member: Mask, tops: Indices) -> pl.Series:
    """Return the names of the agents, chains and tools around each call, outermost first; `tops` are the outermost spans of the calls."""
    around = nodes.select(pl.col("IsChain") | pl.col("IsTool") | pl.col("AgentName").is_not_null()).to_series().to_numpy() & ~member
    enclosing = forest.enclosing(around)
    places, place_of = np.unique(enclosing[tops], return_inverse=True)
    at = chains(places, enclosing)[:, ::-1]
    inside = at != forest.size
    own = pl.when("IsTool").then("ToolName").otherwise("AgentName")
    names = nodes[["IsTool", "ToolName", "AgentName", "SpanName"]][at[inside]].select(pl.coalesce(own, "SpanName")).to_series()
    return listed(names, np.nonzero(inside)[0], len(places))[place_of]


def listed(names: pl.Series, owner: Indices, owners: int) -> pl.Series:
    """Return the names of each of so many owners, in their order."""
    ends = np.cumsum(np.bincount(owner, minlength=owners))
    return pl.Series(pa.LargeListArray.from_arrays(np.append(0, ends), names[np.argsort(owner, kind="stable")].to_arrow()))
