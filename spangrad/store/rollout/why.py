"""An explanation of one rollout in sentences: its state, the result for each call and the reason, and what it waits for.

In: a `Record`, and the settings of the builder and the trainer. Out: lines of text. Invariant: every statement follows from the store or
from a ledger that can be read; for a fact that only another process knows, the text names the log or file that holds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from spangrad import semconv
from spangrad.settings import Settings
from spangrad.store.rollout.record import UNKNOWN_MODEL_CALL, Build, Conclusion, Record, Span, counted, titled
from spangrad.types import Mode, remedy

_SHORT = 8
ALREADY_TRAINED = "already_trained"
"""Name for a rollout that was built again, or by another specification, after a branch had trained it: see spangrad.already_trained."""
LEDGER = "ledger.db"
"""File name of the trainer's ledger in trainer.directory."""


def explain(record: Record, settings: Settings) -> list[str]:
    """Return lines that explain a rollout of at least one span; if several runs have a rollout of this id, one after the other.

    The builder's settings tell its waiting times, and the trainer's the groups that it trains.
    """
    runs = sorted({span.run for span in record.spans} - {""}) or [""]
    lines = list[str]()
    for run in runs:
        record_of_run = record.of_run(run)
        lines += ["", *_of_run(record_of_run, settings)] if lines else _of_run(record_of_run, settings)
    return lines


def _of_run(record: Record, settings: Settings) -> list[str]:
    spans = list({span.key: span for span in reversed(record.spans)}.values())
    roots = sorted((span for span in spans if span.is_root), key=lambda span: span.attempt)
    lines = [_summary(record, spans, roots), *_attempts(roots), _arrived(record, spans, roots), *_roles(record, settings)]
    if not record.builds:
        return [*lines, _awaited(record, spans, roots, settings)]
    for build in record.builds:
        lines += [*_built(build, spans), *_trained(build, record, settings)]
    return lines


def _summary(record: Record, spans: Sequence[Span], roots: Sequence[Span]) -> str:
    modes = sorted({span.mode for span in spans} - {""})
    run = next((span.run for span in spans if span.run), "")
    of_run = f" of run {run}" if run else ""
    if roots:
        last = roots[-1].attributes
        size = last.get(semconv.GROUP_SIZE, "")
        task = f"task {last[semconv.TASK_ID]}, " if semconv.TASK_ID in last else ""
        group = f"group {last[semconv.GROUP_ID]}{f' of {size}' if size else ''}, " if semconv.GROUP_ID in last else ""
        mode = f" (mode {', '.join(modes)})" if modes else ""
        return f"Rollout {record.rollout}{of_run}{mode}: {task}{group}{counted(len(roots), 'attempt')}."
    if run and modes:
        return f"Rollout {record.rollout}{of_run} (mode {', '.join(modes)}): a runner announced it, and no root span of it has arrived."
    named = any(span.names_rollout for span in spans)
    known = "its spans name it" if named else "it is known by its session, conversation or trace"
    return f"Rollout {record.rollout}{of_run}: no runner announced it ({known}), so it counts as mode {Mode.PRODUCTION.value}."


def _attempts(roots: Sequence[Span]) -> Iterable[str]:
    for root in roots:
        failure = root.attributes.get(semconv.ROLLOUT_FAILURE, "")
        message = " ".join(root.message.split())[:200]
        outcome = f"failed: {failure}{f' ({message})' if message else ''}" if failure else "ended well"
        yield f"Attempt {root.attempt} {outcome}{', and counts.' if root.is_final else ', and was tried again.'}"


def _arrived(record: Record, spans: Sequence[Span], roots: Sequence[Span]) -> str:
    """Return a sentence on the spans and calls that have arrived, and on those that are missing."""
    final = next((root for root in reversed(roots) if root.is_final), None)
    recorded = [span for span in spans if span.scope == semconv.GATEWAY_SCOPE]
    given = [reward for reward in dict.fromkeys(record.rewards) if reward.source in {"event", "log"}]
    rewards = ", ".join(f"{reward.title} = {reward.value} ({reward.source})" for reward in given) or "none arrived"
    there = f"{counted(len(spans), 'span')} arrived"
    if final is None:
        return f"{there}, {counted(len(recorded), 'call')} of the gateway among them. Evaluations: {rewards}."
    of_final = sum(span.attempt == final.attempt for span in recorded)
    answered = final.attributes.get(semconv.ROLLOUT_CALLS)
    if answered is None:
        calls = "; no gateway counted its calls, so that it is complete once it is quiet"
    else:
        absent = int(answered) - of_final
        arrival_text = f"{absent} of them did not arrive" if absent > 0 else "all of them arrived"
        calls = f"; the gateway answered {counted(int(answered), 'call')} of attempt {final.attempt}, and {arrival_text}"
    return f"{there}{calls}. Evaluations: {rewards}."


def _roles(record: Record, settings: Settings) -> Iterable[str]:
    """Yield a sentence on the roles of the run's rewards, and on those that the trainer counts."""
    if record.roles:
        chosen = settings.trainer.credit.reward_roles
        counts = f"those of {', '.join(chosen)} and everybody's" if chosen else "all of them"
        yield f"Rewards of the run are of the roles {', '.join(record.roles)}; the trainer, as it is set up here, counts {counts}."


def _awaited(record: Record, spans: Sequence[Span], roots: Sequence[Span], settings: Settings) -> str:
    """Return a sentence on what a rollout that is not built yet waits for."""
    spec = settings.builder
    silence = f"{max(0.0, (record.now - record.last_arrival).total_seconds()):.0f} s" if record.now and record.last_arrival else "some time"
    waiting_time = f"builder.incomplete_after_seconds ({spec.incomplete_after_seconds:g} s)"
    is_named = any(span.run and span.mode and span.names_rollout for span in spans)
    final = next((root for root in reversed(roots) if root.is_final), None)
    if final is not None:
        if absent := _missing_facts(record, spans, roots, final, awaited=spec.waits_for_reward):
            wait = f"it waits for {' and '.join(absent)}, at most {waiting_time} after its end"
            return f"It is not built yet: {wait}; the newest span arrived {silence} ago."
        return "It is not built yet, and nothing that it needs is missing: the next `spangrad build` takes it. Is a builder running?"
    if is_named:
        wait = f"it waits for its runner's final root span, until it has been silent for {waiting_time}"
        return f"It is not built yet: {wait}; it has been for {silence}."
    if not any(span.kind in {"gateway", "llm", "engine", UNKNOWN_MODEL_CALL} for span in spans):
        return "It is not built: nothing in it calls a model, as far as any dialect knows."
    open_traces = {(span.trace, span.parent) for span in spans if span.parent} - {span.key for span in spans}
    wait = (
        f"{waiting_time}, because the parent of some span has not arrived"
        if open_traces
        else f"builder.quiet_seconds ({spec.quiet_seconds:g} s)"
    )
    return f"It is not built yet: it waits to be silent for {wait}; it has been for {silence}. Then the next `spangrad build` takes it."


def _missing_facts(record: Record, spans: Sequence[Span], roots: Sequence[Span], final: Span, *, awaited: bool) -> list[str]:
    absent = list[str]()
    for root in roots:
        there = sum(span.scope == semconv.GATEWAY_SCOPE and span.attempt == root.attempt for span in spans)
        missing = int(root.attributes.get(semconv.ROLLOUT_CALLS) or 0) - there
        if missing > 0:
            absent.append(f"{counted(missing, 'call')} of attempt {root.attempt}")
    seen = {root.attempt for root in roots}
    if roots_missing := [str(number) for number in range(final.attempt) if number not in seen]:
        absent.append(f"the root span of attempt {', '.join(roots_missing)}")
    awaited = awaited and not final.attributes.get(semconv.ROLLOUT_FAILURE)
    if awaited and not any(reward.source in {"event", "log"} for reward in record.rewards):
        absent.append("a reward")
    return absent


def _built(build: Build, spans: Sequence[Span]) -> list[str]:
    at = f" at {build.built_at:%Y-%m-%d %H:%M:%S} UTC" if build.built_at else ""
    dataset = f"dataset {build.dataset}, " if build.dataset else ""
    named = [conclusion for conclusion in build.conclusions if conclusion.span]
    what = f"{counted(len(named), 'call')}: {counted(build.transitions, 'transition')}, {counted(len(named) - build.transitions, 'drop')}"
    lines = [f"It is built ({dataset}specification {build.spec}, revision {build.revision}){at}, attempt {build.attempt} counting. {what}."]
    names = {span.key: span.name for span in spans}
    lines += [f"- {_call(conclusion, names)}: {_conclusion_text(conclusion)}" for conclusion in named]
    lines += [f"- The rollout itself: {_conclusion_text(conclusion)}" for conclusion in build.conclusions if not conclusion.span]
    reasons = dict.fromkeys(conclusion.reason for conclusion in build.conclusions if conclusion.reason)
    lines += [f"{reason}: {remedy(reason)}" for reason in reasons if remedy(reason)]
    return lines


def _call(conclusion: Conclusion, names: dict[tuple[str, str], str]) -> str:
    choice = f", choice {conclusion.choice}" if conclusion.choice else ""
    agent = f" by {conclusion.agent}" if conclusion.agent else ""
    name = names.get((conclusion.trace, conclusion.span), "not here")
    return f"Attempt {conclusion.attempt}, span {conclusion.span[:_SHORT]} ({name}{choice}){agent}"


def _conclusion_text(conclusion: Conclusion) -> str:
    if conclusion.reason:
        detail = f" ({conclusion.detail})" if conclusion.detail else ""
        convention = f", reported by {conclusion.convention}" if conclusion.convention else ""
        return f"dropped as {conclusion.reason}{detail}{convention}."
    given = (f"{titled(name, role)} = {value:g} ({source})" for name, value, source, role in conclusion.rewards)
    rewards = ", ".join(given) or "no reward of its own"
    return f"transition, turn {conclusion.turn}, sampled by policy {conclusion.policy} version {conclusion.version}; {rewards}."


def _trained(build: Build, record: Record, settings: Settings) -> list[str]:
    used = [batch for batch in record.trained if batch.spec == build.spec]
    if used:
        lines = list[str]()
        for batch in used:
            orphaned = ", which is orphaned" if batch.status == "orphaned" else ""
            lines.append(
                f"It is trained: batch {batch.batch} made version {batch.version} of policy {batch.policy} "
                f"(branch {batch.branch}){orphaned}."
            )
            if batch.revision != build.revision:
                since = f"that was revision {batch.revision}; what came since changes no version: a rollout is trained once."
                lines.append(f"{ALREADY_TRAINED}: {since}")
        return lines
    trainer = settings.trainer
    of_branch = (batch for batch in record.trained if (batch.policy, batch.branch) == (trainer.policy, trainer.branch))
    if first := next((batch for batch in of_branch if batch.status != "orphaned"), None):
        trained = f"built by specification {first.spec}, it helped to make version {first.version} of policy {first.policy}"
        return [f"{ALREADY_TRAINED}: {trained}, and branch {first.branch} trains no rollout twice."]
    trained_by = ", ".join(sorted({f"{batch.policy} version {batch.version}" for batch in record.trained}))
    also = f" (As another specification built it, it helped to make {trained_by}.)" if trained_by else ""
    return [f"It is not trained: {reason}{also}" for reason in _untrained(build, record, settings)]


def _untrained(build: Build, record: Record, settings: Settings) -> list[str]:
    """Return the reasons why no policy version was trained on the rollout."""
    trainer = settings.trainer
    mode = next((span.mode for span in record.spans if span.mode), Mode.PRODUCTION.value)
    if build.skipped:
        return [
            f"the trainer of policy {policy} (branch {branch}) skipped its group as {reason}{f': {detail}' if detail else '.'} "
            f"`spangrad train skipped` names the remedy; `spangrad train restore {build.group}` brings the group back."
            for policy, branch, reason, detail in build.skipped
        ]
    if not build.transitions:
        return ["it left no transitions."]
    if mode == Mode.GREEDY:
        return [f"it is greedy: what the other rollouts of its group {build.group} are compared with (trainer.credit.estimator = 'remax')."]
    if mode not in trainer.modes:
        return [f"trainer.modes takes {', '.join(trainer.modes)} only, and this is {mode}."]
    if not build.group_size:
        return ["the size of its group is unknown, so that the group is never complete."]
    if build.group_built < build.group_size:
        return [f"its group {build.group} has {build.group_built} of {counted(build.group_size, 'rollout')} built so far."]
    if build.spec != settings.builder.spec and trainer.dataset is None:
        return ["the trainer, as it is set up here, takes what the present builder settings make, which is another specification."]
    return [_ready(build, record, settings)]


def _ready(build: Build, record: Record, settings: Settings) -> str:
    trainer = settings.trainer
    versions = (item.version for item in build.conclusions if item.version is not None and item.policy == trainer.policy)
    newest = max(versions, default=None)
    if newest is None:
        return f"none of its transitions is of policy {trainer.policy}, which the trainer, as it is set up here, trains."
    ledger = "trainer.ledger_url" if trainer.ledger_url else trainer.directory / LEDGER
    skip_text = f"If `spangrad train` has skipped it, the reason is in its log and its ledger ({ledger})."
    if record.ledger_silent:
        skip_text = f"Whether a trainer has skipped its group is not known: {record.ledger_silent}"
    # As the trainer counts: committed versions, whose numbers have gaps; a group with a fresh call is trained.
    since = sum(version > newest for version in record.committed.get((trainer.policy, trainer.branch), ()))
    if since > trainer.sampling.max_staleness:
        staleness_text = f"its newest call was sampled by version {newest}, and {counted(since, 'version')} followed that"
        return f"it is stale: {staleness_text} (trainer.sampling.max_staleness = {trainer.sampling.max_staleness}). {skip_text}"
    return f"its group is whole and waits for `spangrad train`. {skip_text}"
