"""A rollout as a tree of spans for a terminal, with durations, tokens, rewards, and the transition or drop of each call.

In: the `Record` of one rollout. Out: a tree of rich. Invariant: every span occurs once, where spangrad/store/rollout/tree.py places it.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

from rich.text import Text
from rich.tree import Tree

from spangrad import semconv
from spangrad.store.rollout.record import Build, Call, Conclusion, Record, Reward, Span, counted, titled
from spangrad.store.rollout.tree import children

_SEPARATOR = " · "
_TOKEN_COUNTS = (
    (semconv.GEN_AI_INPUT_TOKENS, semconv.GEN_AI_OUTPUT_TOKENS),
    ("llm.token_count.prompt", "llm.token_count.completion"),
)
"""Pairs of attributes that hold a span's numbers of input and output tokens."""
_MESSAGE_LENGTH = 200


def draw(record: Record) -> Tree:
    """Return the rollout's tree; the root span of each attempt is a branch of the first level."""
    spans = {span.key: span for span in reversed(record.spans)}
    calls, rewards = defaultdict[tuple[str, str], list[Call]](list), defaultdict[tuple[str, str], list[Reward]](list)
    for call in sorted({(call.trace, call.span, call.choice): call for call in record.calls}.values(), key=lambda call: call.choice):
        calls[call.trace, call.span].append(call)
    for reward in dict.fromkeys(record.rewards):
        rewards[reward.trace, reward.span].append(reward)

    concluded = defaultdict[tuple[str, str], list[tuple[str, Conclusion]]](list)
    for build in record.builds:
        for conclusion in build.conclusions:
            concluded[conclusion.trace, conclusion.span].append((build.title if len(record.builds) > 1 else "", conclusion))

    below = children(spans)
    tree = Tree(_header(record, list(spans.values())), guide_style="dim")
    waiting: list[tuple[Tree, Span | None, tuple[str, str] | None]] = [(tree, None, None)]
    while waiting:
        branch, parent, key = waiting.pop()
        for child in below.get(key, ()):
            is_detached = parent is not None and child.parent != parent.span
            lost = parent is None and bool(child.parent)
            label = _label(child, calls[child.key], rewards[child.key], concluded[child.key], is_detached=is_detached or lost)
            waiting.append((branch.add(label), child, child.key))
    for where, those in (
        ("of the whole rollout", [("", "")]),
        ("of no span here", [key for key in rewards if key[1] and key not in spans]),
    ):
        if elsewhere := [reward for key in those for reward in rewards[key]]:
            tree.add(_joined([Text(where, "dim"), *map(_reward, elsewhere)]))
    unseen = [pair for key, pairs in concluded.items() if key[1] and key not in spans for pair in pairs]
    for title, conclusion in unseen:
        tree.add(_joined([Text(f"span {conclusion.span} is not here", "dim"), *_conclusions([(title, conclusion)])]))
    return tree


def _header(record: Record, spans: Sequence[Span]) -> Text:
    roots = sorted((span for span in spans if span.is_root), key=lambda span: span.attempt)
    facts = [_values(spans, "run"), _values(spans, "mode")]
    if roots:
        last = roots[-1].attributes
        size = last.get(semconv.GROUP_SIZE)
        facts.append(f"task {last[semconv.TASK_ID]}" if semconv.TASK_ID in last else "")
        facts.append(f"group {last[semconv.GROUP_ID]}{f' of {size}' if size else ''}" if semconv.GROUP_ID in last else "")
    tries = len({span.attempt for span in spans})
    facts.append(f"{tries} attempts" if tries > 1 else "")
    facts.append(_duration(sum(span.duration for span in roots) or max((span.duration for span in spans), default=0)))
    facts.append(counted(len(spans), "span"))
    if record.calls:
        calls = {(call.trace, call.span, call.choice): call for call in record.calls}.values()
        prompts = {(call.trace, call.span): call.prompt_tokens for call in calls}
        facts.append(f"{counted(len(prompts), 'call')} {_tokens(sum(prompts.values()), sum(call.response_tokens for call in calls))}")
    header = Text.assemble(("rollout ", "bold"), (record.rollout, "bold"), "\n", _SEPARATOR.join(fact for fact in facts if fact))
    if participants := _SEPARATOR.join(part for part in (_agents(record), _tools(spans)) if part):
        header.append(f"\n{participants}")
    for build in record.builds:
        header.append("\n")
        header.append_text(_built(build, len(record.builds) > 1))
    if not record.builds:
        header.append("\nnot built yet", "yellow")
    return header


def _agents(record: Record) -> str:
    """Return the agents of the rollout, each with its number of calls."""
    newest = record.builds[-1].conclusions if record.builds else ()
    by_span = {(conclusion.trace, conclusion.span): conclusion for conclusion in newest if conclusion.span}
    calls = Counter(conclusion.agent for conclusion in by_span.values() if conclusion.agent)
    names = dict.fromkeys([*calls, *(span.agent for span in record.spans if span.agent and span.kind in {"agent", "llm"})])
    agents = [f"{name} ({counted(calls[name], 'call')})" if calls[name] else name for name in names]
    return f"agents {', '.join(agents)}" if agents else ""


def _tools(spans: Sequence[Span]) -> str:
    """Return the tools that ran, each with its numbers of runs and of failures."""
    ran = Counter(span.tool or span.name for span in spans if span.kind == "tool")
    failed = Counter(span.tool or span.name for span in spans if span.kind == "tool" and span.status == "Error")
    tools = [
        f"{name}{f' x{times}' if times > 1 else ''}{f' ({failed[name]} failed)' if failed[name] else ''}" for name, times in ran.items()
    ]
    return f"tools {', '.join(tools)}" if tools else ""


def _values(spans: Iterable[Span], what: str) -> str:
    values = sorted({str(getattr(span, what)) for span in spans} - {""})
    return f"{what} {', '.join(values)}" if values else ""


def _built(build: Build, several: bool) -> Text:
    text = Text(f"built{f' as {build.title}' if several else ''}: ")
    text.append(counted(build.transitions, "transition"), "green" if build.transitions else "")
    for (reason, detail), count in sorted(build.drops.items()):
        text.append(", ")
        text.append(f"{count} dropped as {reason}{f' ({detail})' if detail else ''}", "yellow")
    return text


def _label(
    span: Span, calls: Sequence[Call], rewards: Sequence[Reward], concluded: Sequence[tuple[str, Conclusion]], *, is_detached: bool
) -> Text:
    parts = [Text(span.name or "(no name)", "bold" if span.is_root else "")]
    parts += [Text(fact, "dim") for fact in _span_facts(span)]
    parts.append(Text(_duration(span.duration)))
    parts += _of_calls(calls) or _reported_tokens(span)
    parts += _status(span, calls)
    parts += [_reward(reward) for reward in rewards]
    parts += _conclusions(concluded)
    if is_detached:
        parts.append(Text("parent span is not here", "yellow"))
    return _joined(parts)


def _conclusions(concluded: Sequence[tuple[str, Conclusion]]) -> list[Text]:
    """Return the results of builds for a call: equal results of several choices as one text with their number."""
    texts = Counter[tuple[str, str]]()
    for title, conclusion in concluded:
        of_build = f" in {title}" if title else ""
        if conclusion.reason:
            texts[f"dropped as {conclusion.reason}{f' ({conclusion.detail})' if conclusion.detail else ''}{of_build}", "yellow"] += 1
        else:
            earned = "".join(f", {titled(name, role)} = {value:g} ({source})" for name, value, source, role in conclusion.rewards)
            agent = f" of {conclusion.agent}" if conclusion.agent else ""
            texts[f"transition, turn {conclusion.turn}{agent}{earned}{of_build}", "green"] += 1
    return [Text(f"→ {text}{f' x{count}' if count > 1 else ''}", style) for (text, style), count in texts.items()]


def _span_facts(span: Span) -> list[str]:
    """Return the attempt of a root span; the kind, agent and tool of any other span."""
    if span.is_root:
        return [f"attempt {span.attempt}", "final" if span.is_final else "tried again"]
    return [fact for fact in dict.fromkeys((span.kind, span.agent, span.tool)) if fact and fact != span.name]


def _of_calls(calls: Sequence[Call]) -> list[Text]:
    """Return the token counts, policy versions and finish reasons of a call's choices."""
    if not calls:
        return []
    first = calls[0]
    parts = [Text(_tokens(first.prompt_tokens, sum(call.response_tokens for call in calls)), "cyan")]
    if len(calls) > 1:
        parts.append(Text(f"{len(calls)} choices"))
    if first.policy or first.versions:
        versions = sorted({version for call in calls for version in call.versions})
        parts.append(Text(f"{first.policy} {'→'.join(f'v{version}' for version in versions)}".strip()))
    reasons = Counter(call.finish_reason for call in calls if call.finish_reason)
    parts += [Text(f"{reason}{f' x{count}' if count > 1 else ''}") for reason, count in reasons.items()]
    return parts


def _reported_tokens(span: Span) -> list[Text]:
    for sent, received in _TOKEN_COUNTS:
        if sent in span.attributes:
            return [Text(_tokens(span.attributes[sent], span.attributes.get(received, "?")), "cyan")]
    return []


def _status(span: Span, calls: Sequence[Call]) -> list[Text]:
    failed = next((call for call in calls if call.failed), None)
    failure = span.attributes.get(semconv.ROLLOUT_FAILURE, "")
    if span.status == "Error" or failed or failure:
        refused = f"HTTP {failed.http_status}" if failed and failed.http_status >= 400 else ""
        kind = failed.error if failed and failed.error != str(failed.http_status) else ""
        message = ": ".join(part for part in (failure, refused, kind, _shortened_message(span.message)) if part)
        return [Text(f"error{f': {message}' if message else ''}", "bold red")]
    if any(call.aborted for call in calls):
        return [Text("aborted", "bold red")]
    return [Text("ok", "green")] if span.status == "Ok" else []


def _shortened_message(message: str) -> str:
    """Return an error message without the traceback that OpenInference appends, shortened to _MESSAGE_LENGTH characters."""
    words = " ".join(message.partition("Traceback (")[0].split())
    return words if len(words) <= _MESSAGE_LENGTH else words[:_MESSAGE_LENGTH] + "…"


def _reward(reward: Reward) -> Text:
    return Text(f"{reward.title} = {reward.value} ({reward.source})", "magenta")


def _tokens(sent: object, received: object) -> str:
    return f"{sent}→{received} tokens"


def _duration(nanoseconds: int) -> str:
    """Return a duration with three significant digits, in hours, minutes, seconds, milliseconds or microseconds."""
    if not nanoseconds:
        return "0 s"
    units = (("h", 3600e9), ("min", 60e9), ("s", 1e9), ("ms", 1e6), ("µs", 1e3))
    unit, size = next((pair for pair in units if nanoseconds >= pair[1]), units[-1])
    value = nanoseconds / size
    return f"{value:.3g} {unit}" if value < 999.5 else f"{value:.0f} {unit}"  # from 999.5 on, three digits would need an exponent


def _joined(parts: Iterable[Text]) -> Text:
    return Text(_SEPARATOR, "dim").join(parts)
