"""One training run of the benchmark of two policies: one rollout, two agents, two trainers.

In: a seed, how many steps. Out: a `Result`. Invariant: the two trainers share a store, a builder's work and a ledger's file, and nothing
else: each has its policy, its selection, its versions and its optimizer, and finds the same rollouts by itself.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import mean
from typing import Any

from clickhouse_connect.driver.client import Client

from benchmarks.credit_sampling import Sampled, Sampler
from benchmarks.credit_spans import Author, Served
from benchmarks.in_process import build, clocked, own_store, send, train_step, training
from benchmarks.two_policies_task import AGENTS, Desk, work, write_agent_model
from span_processors.otlp_http import Poster
from spangrad.settings import BuilderSettings, GatewaySettings, Selection, Settings, StoreSettings, TrainerSettings
from spangrad.settings.trainer_learning import CreditSettings, OptimSettings, SamplingSettings
from spangrad.settings.trainer_service import CheckpointSettings
from spangrad.store.clickhouse import connect
from trainer.ledger.recovery import newest_version
from trainer.loop import Trainer
from transition_builder.builder import Builder

GROUPS = 4
"""Groups of rollouts in a training step."""
FRESH_ROLLOUTS = 1024
"""Number of rollouts on which the policies are measured before the first step and after the last; none of them is trained."""
BOTH = "both"
"""Name of a success beside those of the agents: the share of tickets in which both were right."""


@dataclass
class Result:
    """Result of one run."""

    seed: int
    group: int
    steps: int
    begun: dict[str, float] = field(default_factory=dict[str, float])
    """Success of fresh rollouts by the models that training began with: of each agent, and of both."""
    final: dict[str, float] = field(default_factory=dict[str, float])
    """Success of the same rollouts by the last versions."""
    success: dict[str, list[float]] = field(default_factory=dict[str, list[float]])
    """Success of the rollouts that each step trains."""
    gap: float = 0.0
    """The largest |rollout logprob - trainer logprob| of all steps, in nats."""
    sampled: int = 0
    calls: int = 0
    checked: dict[str, int] = field(default_factory=dict[str, int])
    """Counts from the store that must be 0."""
    lineage: dict[str, dict[str, int]] = field(default_factory=dict[str, dict[str, int]])
    """Policy -> numbers of versions, of rollouts and calls that lineage leads to from them, and of spans of those rollouts."""
    seconds: dict[str, float] = field(default_factory=dict[str, float])
    """Seconds by stage, summed over all steps."""

    def json(self) -> dict[str, Any]:
        """Return the result as a JSON object."""
        return asdict(self)


def run(desk: Desk, seed: int, steps: int, directory: Path, on_step: Callable[[Result], None] = lambda _: None) -> Result:
    """Train both policies from fresh models, in a fresh store.

    Args:
        desk: the task.
        seed: random seed of the models, of sampling and of the tickets.
        steps: number of optimizer steps of each policy.
        directory: directory for everything that the run writes.
        on_step: called with the result so far, after each step.
    """
    result = Result(seed, desk.group, steps, success={name: [] for name in (*AGENTS, BOTH)})
    samplers: dict[str, Sampler] = {}
    for place, agent in enumerate(AGENTS):
        write_agent_model(directory / "models" / agent, desk, agent, seed)
        samplers[agent] = Sampler(directory / "models" / agent, 2 * seed + place + 77)
    fresh = desk.goals(random.Random(seed + 5), max(1, FRESH_ROLLOUTS // desk.group))
    result.begun = successes(desk, work(desk, fresh, samplers))
    run_id = f"desk-{seed}"
    with own_store(directory) as store, closing(connect(store)) as client, ExitStack() as stack:
        settings = {agent: _settings(agent, store, directory, run_id) for agent in AGENTS}
        trainers = {agent: stack.enter_context(training(settings[agent], client, samplers[agent])) for agent in AGENTS}
        # What is built does not depend on who trains: one builder serves both.
        _steps(desk, seed, trainers, samplers, Builder(settings[AGENTS[0]]), result, on_step)
        account(result, client, run_id)
    result.final = successes(desk, work(desk, fresh, samplers))
    return result


def _steps(
    desk: Desk,
    seed: int,
    trainers: Mapping[str, Trainer],
    samplers: Mapping[str, Sampler],
    builder: Builder,
    result: Result,
    on_step: Callable[[Result], None],
) -> None:
    settings, clock = trainers[AGENTS[0]].settings, result.seconds
    rng, author = random.Random(seed + 1000), Author(settings.trainer.run_id, desk, seed)
    poster = Poster(f"{settings.store.otlp_endpoint}/v1/traces", {}, None)
    for step in range(result.steps):
        with clocked(clock, "sample"):
            rollouts = work(desk, desk.goals(rng, GROUPS), samplers)
        with clocked(clock, "send"):
            send(poster, author.bodies(rollouts, step, {agent: _served(one) for agent, one in trainers.items()}))
        with clocked(clock, "build"):
            build(builder, len(rollouts))
        for name, share in successes(desk, rollouts).items():
            result.success[name].append(share)
        result.sampled += len(rollouts)
        result.calls += sum(len(one.calls) for one in rollouts)
        for trainer in trainers.values():
            with clocked(clock, "train"):
                version = train_step(trainer)
            result.gap = max(result.gap, version.metrics["logprob_gap_max"])
        on_step(result)


def _served(trainer: Trainer) -> Served:
    newest = newest_version(trainer.ledger)
    return Served(trainer.settings.trainer.policy, newest.version, newest.tokenizer_hash)


def successes(desk: Desk, rollouts: Sequence[Sampled]) -> dict[str, float]:
    """Return means over rollouts: of each agent's own success, and of both."""
    own_shares = {agent: mean(desk.own_success(agent, one.turns()) for one in rollouts) for agent in AGENTS}
    return own_shares | {BOTH: mean(desk.success(one.goal, one.turns()) for one in rollouts)}


def _settings(agent: str, store: StoreSettings, directory: Path, run_id: str) -> Settings:
    """Return settings of a policy of the agent's name, trained on the calls that the agent made and its model answered."""
    return Settings(
        store=store,
        gateway=GatewaySettings(),
        builder=BuilderSettings(),
        trainer=TrainerSettings(
            run_id=run_id,
            policy=agent,
            selection=Selection(agents=agent),
            model=directory / "models" / agent,
            directory=directory / "policies",
            sampling=SamplingSettings(groups_per_batch=GROUPS),
            credit=CreditSettings(scheme="own", baseline="turn"),
            optim=OptimSettings(learning_rate=1e-3),
            max_tokens_per_device=1 << 16,  # a step is one micro-batch
            checkpoint=CheckpointSettings(keep=1),
        ),
    )


_FOREIGN = """
SELECT count() FROM spangrad.lineage AS l
INNER JOIN (SELECT TransitionId, AgentName, Policy FROM spangrad.transitions WHERE RunId = %(run)s) AS t ON l.TransitionId = t.TransitionId
WHERE t.AgentName != l.Policy OR t.Policy != l.Policy
"""
"""Calls that a version leads to and another agent made, or another policy answered. A policy has its agent's name."""

_OTHERWISE_COUNTED = """
SELECT count() FROM (
    SELECT v.Policy, v.Version, any(v.Metrics['transitions']) AS Trained, uniqExact(t.TransitionId) AS Own
    FROM spangrad.policy_versions AS v
    INNER JOIN spangrad.batches AS b ON b.Policy = v.Policy AND b.Branch = v.Branch AND b.Version = v.Version
    INNER JOIN spangrad.transitions AS t ON t.RunId = b.RunId AND t.RolloutId = b.RolloutId AND t.Attempt = b.Attempt
        AND t.AgentName = v.Policy
    WHERE b.RunId = %(run)s
    GROUP BY v.Policy, v.Version
    HAVING Trained != Own)
"""
"""Versions whose trainer stepped on more or fewer calls than its own agent's in the rollouts of the batch."""

_NOT_ONCE = """
SELECT count() FROM (
    SELECT Policy, RolloutId FROM spangrad.batches WHERE RunId = %(run)s GROUP BY Policy, RolloutId HAVING uniqExact(BatchId) != 1)
"""
"""Rollouts that are in several committed batches of a policy."""

_ROLLOUTS = """
SELECT v.Policy, uniqExact(v.Version), groupUniqArray(b.RolloutId)
FROM spangrad.policy_versions AS v
INNER JOIN spangrad.batches AS b ON b.Policy = v.Policy AND b.Branch = v.Branch AND b.Version = v.Version
WHERE b.RunId = %(run)s
GROUP BY v.Policy ORDER BY v.Policy
"""
"""The rollouts that a policy's versions lead to: those, too, in which its agent never spoke, since another one ended them."""

_SPANS = """
SELECT groupUniqArray((TraceId, SpanId)) FROM spangrad.rollout_spans
WHERE RunId = %(run)s AND RolloutId IN (SELECT RolloutId FROM spangrad.batches WHERE RunId = %(run)s AND Policy = %(policy)s)
"""

_LED = """
SELECT groupUniqArray(CallId) FROM spangrad.lineage
WHERE Policy = %(policy)s AND CallId IN (SELECT CallId FROM spangrad.transitions WHERE RunId = %(run)s)
"""
"""The calls that a policy's versions lead to."""

_CALLS = """
SELECT
    (SELECT groupUniqArray(CallId) FROM spangrad.transitions WHERE RunId = %(run)s),
    (SELECT uniqExact(CallId) FROM spangrad.drops WHERE RunId = %(run)s)
"""


def account(result: Result, client: Client, run_id: str) -> None:
    """Set the lineage and the checks of the result from SQL queries on the store."""

    def rows(query: str, **more: str) -> Sequence[Sequence[Any]]:
        return client.query(query, parameters={"run": run_id, **more}).result_rows

    trained = {policy: (versions, set(rollouts)) for policy, versions, rollouts in rows(_ROLLOUTS)}
    spans = {policy: set(rows(_SPANS, policy=policy)[0][0]) for policy in trained}
    calls = {policy: set(rows(_LED, policy=policy)[0][0]) for policy in trained}
    ((transitions, drops),) = rows(_CALLS)
    result.lineage = {
        policy: {"versions": versions, "rollouts": len(rollouts), "calls": len(calls[policy]), "spans": len(spans[policy])}
        for policy, (versions, rollouts) in trained.items()
    }
    result.checked = {
        "foreign_calls": rows(_FOREIGN)[0][0] + len(set.intersection(*calls.values())),
        "otherwise_counted": rows(_OTHERWISE_COUNTED)[0][0],
        "not_once": rows(_NOT_ONCE)[0][0],
        "untrained": sum(abs(result.sampled - len(rollouts)) for _, rollouts in trained.values()),
        "other_spans": len(set.union(*spans.values()) - set.intersection(*spans.values())),
        "untrained_calls": len(set(transitions) - set.union(*calls.values())),
        "unaccounted": abs(result.calls - len(transitions) - drops),
        "drops": drops,
        "missing_policies": len(AGENTS) - len(trained),
    }
