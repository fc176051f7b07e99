"""Messages to the critic, and the parsing of its replies.

In: a prompt, and rollouts that used it. Out: messages for a chat model; a critique; an edited prompt. Invariant: a reply
that cannot be parsed is None, never a guess; no rollout takes more characters than its limit.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from prompts.trials import Trial
from spangrad.agent.prompt_store import TEXT_MOST

Messages = list[dict[str, str]]

_CRITIC = (
    "You improve the prompts of agents. An agent was run on tasks, and each run was scored. You are shown the agent's prompt and some of "
    "the runs, the worst ones first. Find out what in the prompt, or missing from it, led to the low scores. Name concrete causes that "
    "a change of the prompt can mend, each with the run that shows it. Do not write a new prompt."
)
_EDITOR = (
    "You improve the prompts of agents. You are shown a prompt and a critique of it. Write the whole prompt anew, so that what the "
    "critique names is mended, what works is kept, and nothing is said about the runs themselves: the prompt will be used on other tasks. "
    "Put the new prompt, and nothing else, between <prompt> and </prompt>."
)
SHOWN_CHARACTERS = 4000
"""Limit of the text of a rollout that a critique reads, in characters."""
_ANSWER = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)


def ask_for_critique(prompt: str, trials: Sequence[Trial]) -> Messages:
    """Build the request for a critique of a prompt, by rollouts in the order in which they are shown: the gradient, in words."""
    runs = "\n\n".join(f"<run score={_score(trial)}>\n{_shortened(shown(trial, prompt), SHOWN_CHARACTERS)}\n</run>" for trial in trials)
    return _messages(_CRITIC, f"<prompt>\n{prompt}\n</prompt>\n\n{runs}")


def ask_for_edit(prompt: str, critique: str) -> Messages:
    """Build the request for a prompt that heeds the critique: the step against the gradient."""
    return _messages(_EDITOR, f"<prompt>\n{prompt}\n</prompt>\n\n<critique>\n{critique}\n</critique>")


def read_edit(answer: str) -> str | None:
    """Return the prompt in a reply. None: it has none that could be stored."""
    match = _ANSWER.search(answer)
    text = match[1].strip("\n") if match else ""
    return text if text.strip() and len(text) <= TEXT_MOST else None


def choose(trials: Sequence[Trial], count: int, rng: random.Random) -> list[Trial]:
    """Choose the rollouts for a critique: some of the worse half, the worst first, and one that went better than all of these.

    Rollouts that failed count as the worst. Each edit draws anew, so that the critiques of a prompt differ.
    """
    ordered = sorted(trials, key=lambda trial: (trial.score is not None, trial.score or 0.0, trial.rollout_id))
    half = ordered[: max(1, (len(ordered) + 1) // 2)]
    bad = sorted(rng.sample(half, min(count, len(half))), key=ordered.index)
    worst = max((trial.score for trial in bad if trial.score is not None), default=None)
    better = [trial for trial in ordered if trial not in bad and trial.score is not None and (worst is None or trial.score > worst)]
    if not better or count == 1:
        return bad
    return [*bad[: count - 1], rng.choice(better)]


def shown(trial: Trial, prompt: str) -> str:
    """Return the messages of a rollout as text; a message that an earlier call contains is not repeated."""
    lines = [f"task: {trial.input}"]
    seen: set[str] = set()
    for exchange in trial.exchanges:
        for role, content in (*exchange.messages, ("reply", exchange.reply)):
            line = f"{role}: {content.replace(prompt, '[the prompt]')}"
            if line not in seen:
                seen.add(line)
                lines.append(line)
    if trial.failure:
        lines.append(f"it failed: {trial.failure}. {trial.detail}".rstrip())
    return "\n".join(lines)


def _messages(system: str, user: str) -> Messages:
    return [{"role": "system", "content": system}, {"role": "user", "content": user}]


def _score(trial: Trial) -> str:
    return "none" if trial.score is None else f"{trial.score:g}"


def _shortened(text: str, most: int) -> str:
    if len(text) <= most:
        return text
    half = (most - 5) // 2
    return f"{text[:half]} ... {text[len(text) - half :]}"
