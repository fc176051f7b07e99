"""The training dashboard: returns, losses, batches and log-probability gaps by policy version, and the drops.

In: steps and trained calls, and the transitions and drops of a dataset. Out: a dashboard over policy versions of one branch.
"""

from __future__ import annotations

from grafana_foundation_sdk.builders import dashboard

from dashboards import links, variables
from dashboards.panels import Panel, bars, figure, in_one_row, over_time, over_versions, rows, steps
from dashboards.queries import CHOSEN, OF_BRANCH, STEPS, TRAINED, by_time, by_version, metric
from dashboards.variables import is_
from spangrad.types import POLICY_FAILURES

_STAGES = ("build", "idle", "load", "credit", "lease", "forward", "backward", "settle", "collect", "checkpoint", "publish")
_MASKED = ("unknown_version", "stale", "other_tokenizer", "greedy", "too_long", "truncated")
_RETURNS = f"(SELECT Version, GroupId, any(Return) AS Return FROM {TRAINED} GROUP BY Version, RunId, GroupId, RolloutId)"
_DROPS = f"spangrad.drops\nWHERE {CHOSEN} AND $__timeFilter(IngestedAt)"


def build() -> dashboard.Dashboard:
    """Return the training dashboard."""
    return links.layout(
        "training",
        "what each policy version learned, on what, and how well that agreed with the engine",
        (
            *(variables.policy(), variables.branch(), variables.dataset(), variables.run(), variables.mode()),
            *(variables.reward(), variables.success()),
        ),
        {
            "": _figures(),
            "Learning": _learning(),
            "The step": [*_losses(), *_lengths(), *_times()],
            "What was not trained": _untrained(),
            "Versions": [_versions()],
        },
    )


def _figures() -> list[Panel]:
    of_branch = f"FROM spangrad.policy_versions WHERE {OF_BRANCH} AND $__timeFilter(IngestedAt)"
    return in_one_row(
        figure("Newest version", f"SELECT max(Version) AS version FROM {STEPS}", "none", "The newest committed version of the branch."),
        figure(
            "Its batch's return",
            f"SELECT argMax({metric('mean_return')}, Version) AS return FROM {STEPS}",
            "none",
            "Mean weighted return of the rollouts that the newest version was trained on.",
            decimals=3,
        ),
        figure(
            "Largest mean logprob gap",
            f"SELECT max({metric('logprob_gap_mean')}) AS gap FROM {STEPS}",
            "sci",
            "Largest mean |rollout logprob - trainer logprob| (nats) of any step in the chosen time. Rows beyond trainer.alarms.logprob are"
            " skipped, and are not in it.",
        ),
        figure("Rollouts trained", f"SELECT sum({metric('rollouts')}) AS rollouts FROM {STEPS}", "short", "Rollouts in committed batches."),
        figure(
            "Held-out success",
            f"SELECT argMaxIf(Metrics['validate_success'], Version, mapContains(Metrics, 'validate_success')) AS success FROM {STEPS}",
            "percentunit",
            "Share of held-out rollouts that succeeded, of the newest version that was evaluated.",
            decimals=1,
        ),
        figure(
            "Steps without change",
            f"SELECT countIf({metric('updated')} = 0) AS steps FROM {STEPS}",
            "none",
            "Versions whose weights are their parent's, because every advantage of the batch was 0.",
            thresholds=steps("green", orange=1),
        ),
        figure(
            "Orphaned versions",
            f"SELECT countIf(Status = 'orphaned') AS versions {of_branch}",
            "none",
            "Versions that a crash left without a commit: their numbers stay taken, their rollouts are free again.",
            thresholds=steps("green", orange=1),
        ),
        figure(
            "Rewards gamed",
            f"SELECT countIf(Metrics['gaming_alarm'] > 0) AS versions FROM {STEPS}",
            "none",
            "Versions at which the trainer's alarm reported that the return rises while success does not.",
            thresholds=steps("green", red=1),
        ),
    )


def _learning() -> list[Panel]:
    succeeded = f"""
        SELECT Sampled AS version, avg(Succeeded) AS success, count() AS rollouts
        FROM (
            SELECT max(Version) AS Sampled,
                sum(arraySum(arrayFilter((value, name) -> name = ${{reward:singlequote}}, `Rewards.Value`, `Rewards.Name`))) >= ${{success}}
                    AS Succeeded
            FROM spangrad.transitions
            WHERE {CHOSEN} AND $__timeFilter(Timestamp) AND {is_("Policy", "policy")}
                AND Version IN (SELECT Version FROM spangrad.policy_versions WHERE {OF_BRANCH})
            GROUP BY RunId, RolloutId)
        GROUP BY version
        ORDER BY version"""
    failures = ", ".join(f"Metrics['failed_share_{reason}'] AS {reason}" for reason in sorted(POLICY_FAILURES))
    return [
        over_versions(
            "Success, by the version that sampled",
            succeeded,
            "percentunit",
            "Share of the chosen modes' rollouts whose reward reached the chosen value. Held-out rollouts: choose the mode validate.",
            at_most=1,
            right=("rollouts", "short"),
        ),
        over_versions(
            "Return of the batch that made the version",
            by_version("avg(Return) AS mean, quantile(0.1)(Return) AS p10, quantile(0.9)(Return) AS p90", _RETURNS),
            "short",
            "Sum of a rollout's rewards, weighted by trainer.credit.reward_weights, over the rollouts of the batch.",
        ),
        over_versions(
            "Advantage of calls",
            by_version("avg(abs(Advantage)) AS advantage, avg(Advantage = 0) AS flat", TRAINED),
            "short",
            "advantage: mean size of what the loss used. flat: share of calls whose advantage is 0, as where all rollouts of a group have"
            " the same return; they teach nothing.",
            right=("flat", "percentunit"),
        ),
        over_versions(
            "Staleness of the calls",
            by_version("avg(Staleness) AS mean, max(Staleness) AS largest", TRAINED),
            "none",
            "Committed versions of the branch between the one that sampled a call and the one that it was trained into; 0 is on-policy."
            " trainer.sampling.max_staleness bounds it.",
        ),
        over_versions(
            "Failed rollouts of the batch",
            f"SELECT Version AS version, {metric('failed_share')} AS failed, {failures} FROM {STEPS} ORDER BY version",
            "percentunit",
            "Share of the batch's rollouts whose attempt failed, and of those the ones that the policy caused, by reason. Above"
            " trainer.alarms.failed_share the trainer warns.",
            at_most=1,
        ),
    ]


def _losses() -> list[Panel]:
    return [
        over_versions(
            "Logprob gap",
            f"""
            SELECT Version AS version, {metric("logprob_gap_max")} AS largest, {metric("logprob_gap_p99")} AS p99,
                {metric("logprob_gap_mean")} AS mean
            FROM {STEPS}
            ORDER BY version""",
            "sci",
            "|rollout logprob - trainer logprob| (nats) of a step's tokens, before the weights move. For calls of the trained version it is"
            " rounding, for those of earlier ones what the policy has moved since. Rows are judged by mean and p99"
            " (trainer.alarms.logprob), never by the largest, which grows with the batch.",
            logarithmic=True,
        ),
        over_versions(
            "Loss and gradient",
            f"SELECT Version AS version, {metric('loss')} AS loss, {metric('grad_norm')} AS norm FROM {STEPS} ORDER BY version",
            "short",
            "The policy's loss, and the gradient's norm before clipping (trainer.optim.clip_grad).",
        ),
        over_versions(
            "Clipping and KL",
            f"""
            SELECT Version AS version, {metric("clip_low")} AS low, {metric("clip_high")} AS high, {metric("ppo_kl")} AS kl
            FROM {STEPS}
            ORDER BY version""",
            "percentunit",
            "low, high: share of tokens whose ratio lies below the lower bound, or above the upper one, and is clipped. kl: PPO's estimate"
            " of the step's change of policy.",
            right=("kl", "short"),
        ),
        over_versions(
            "Entropy and spread",
            f"""
            SELECT Version AS version, {metric("entropy")} AS entropy, {metric("advantage_std")} AS advantages,
                {metric("return_std")} AS returns
            FROM {STEPS}
            ORDER BY version""",
            "short",
            "entropy: of the policy at the trained tokens, in nats; where it nears 0, nothing is tried any more. advantages, returns:"
            " standard deviations over the batch.",
            right=("entropy", "short"),
        ),
    ]


def _lengths() -> list[Panel]:
    return [
        over_versions(
            "Length of responses",
            f"""
            SELECT Version AS version, {metric("response_tokens_mean")} AS mean, {metric("response_tokens_p95")} AS p95,
                {metric("truncated_share")} AS truncated
            FROM {STEPS}
            ORDER BY version""",
            "short",
            "Tokens of a call's response. truncated: share of responses that were cut at their limit of tokens"
            " (trainer.sampling.truncated).",
            right=("truncated", "percentunit"),
        ),
        over_versions(
            "Tokens of the step",
            f"SELECT Version AS version, {metric('tokens')} AS processed, {metric('trained_tokens')} AS trained FROM {STEPS}"
            " ORDER BY version",
            "short",
            "processed: prompts and responses that went through the model. trained: those with a loss.",
        ),
        over_versions(
            "Speed of the step",
            f"SELECT Version AS version, {metric('tokens_per_second')} AS tokens, {metric('mfu')} AS mfu FROM {STEPS} ORDER BY version",
            "short",
            "tokens: processed a second of training. mfu: share of the GPUs' peak, where verl knows it.",
            right=("mfu", "percentunit"),
        ),
    ]


def _times() -> list[Panel]:
    # Of the rollouts only what the batch itself waited for: from its first rollout's begin to its last one's end.
    seconds = f"""
        SELECT s.Version AS version, r.Seconds AS rollouts, {", ".join(f"s.{stage}" for stage in _STAGES)},
            s.train - ifNull(s.forward, 0) - ifNull(s.backward, 0) AS optimizer
        FROM (SELECT Version, {", ".join(f"{metric(f'seconds_{stage}')} AS {stage}" for stage in (*_STAGES, "train"))} FROM {STEPS}) AS s
        LEFT JOIN (
            SELECT b.Version AS Version,
                (max(toUnixTimestamp64Nano(a.Timestamp) + a.Duration) - min(toUnixTimestamp64Nano(a.Timestamp))) / 1e9 AS Seconds
            FROM spangrad.batches AS b
            INNER JOIN spangrad.attempts AS a ON a.RunId = b.RunId AND a.RolloutId = b.RolloutId AND a.Attempt = b.Attempt
            WHERE {OF_BRANCH} AND $__timeFilter(b.IngestedAt)
            GROUP BY Version
        ) AS r ON r.Version = s.Version
        ORDER BY version"""
    idle, step = metric("seconds_idle"), metric("seconds_step")
    masked = " + ".join(metric(f"masked_{reason}") for reason in _MASKED)
    sizes = f"""
        SELECT Version AS version, {metric("groups")} AS groups, {metric("rollouts")} AS rollouts, {metric("transitions")} AS transitions,
            {metric("sequences")} AS sequences, {masked} AS masked
        FROM {STEPS}
        ORDER BY version"""
    return [
        over_versions(
            "Seconds by stage",
            seconds,
            "s",
            "rollouts: from the first begin to the last end of the batch's rollouts. build: median time from a rollout's last span to its"
            " build. The others as the trainer measured them; idle: it waited for whole groups; settle: until the previous version was"
            " committed; collect: it copied weights and state to main memory. Rollouts and builds of the next batch overlap with all of"
            " them; checkpoint and publish are done beside the next step where rollouts may be older.",
            stacked=True,
        ),
        over_versions(
            "Idle shares",
            f"""
            SELECT Version AS version, {idle} / nullIf({idle} + {step}, 0) AS trainer, {metric("engine_idle")} AS engines,
                {metric("filtered_share")} AS filtered
            FROM {STEPS}
            ORDER BY version""",
            "percentunit",
            "trainer: share of the time in which it waited for whole groups. engines: share of the time since the version before in which"
            " an engine had no call in flight. filtered: share of groups with nothing to learn from, which the demand follows.",
        ),
        over_versions(
            "Size of the batch",
            sizes,
            "short",
            "sequences: rows after merging. masked: calls that are too old, too long, truncated or greedy, left out of the loss.",
        ),
    ]


def _untrained() -> list[Panel]:
    return [
        over_time(
            "Drops by reason",
            by_time("Reason AS reason, count() AS drops", _DROPS, name="reason", time="IngestedAt"),
            "short",
            "Policy calls, and rollouts without any, that the builder left out of training, by time. docs/reference/drops.md has the"
            " remedies.",
            stacked=True,
        ),
        bars(
            "Drops in the chosen time",
            f"SELECT Reason AS reason, count() AS drops\nFROM {_DROPS}\nGROUP BY reason\nORDER BY drops DESC, reason\nLIMIT 30",
            "short",
            "The same, counted by reason.",
            name="reason",
        ),
    ]


def _versions() -> Panel:
    sql = f"""
        SELECT Version AS version, IngestedAt AS committed, Mode AS mode, {metric("rollouts")} AS rollouts,
            {metric("mean_return")} AS return, {metric("logprob_gap_max")} AS gap, {metric("grad_norm")} AS norm,
            {metric("trained_tokens")} AS tokens, {metric("seconds_train")} AS train
        FROM {STEPS}
        ORDER BY version DESC
        LIMIT 500"""
    return rows(
        "Versions",
        sql,
        "The versions of the chosen time. A version leads to the batch, rollouts and spans that made it.",
        units={
            "version": "none", "committed": "dateTimeAsIso", "rollouts": "short", "return": "short", "gap": "sci", "norm": "short",
            "tokens": "short", "train": "s",
        },
        links={"version": ("What made it", links.LINEAGE_OF_VERSION)},
    )  # fmt: skip
