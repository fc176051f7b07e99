"""What the critic is asked, and how its answers are read.

In: a prompt, and rollouts that were made with it. Out: messages for a chat model; a critique; an edited prompt. Invariant: an answer
that cannot be read is None, never a guess; no rollout takes more room than it was given.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence

from prompts.trials import Trial
from spangrad.client.prompt_store import TEXT_MOST

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
_ANSWER = re.compile(r"<prompt>(.*)</prompt>", re.DOTALL)


def ask_for_critique(prompt: str, trials: Sequence[Trial], characters: int) -> Messages:
    """Ask what is wrong with a prompt: the gradient, in words.

    Args:
        prompt: its text.
        trials: what was done with it, in the order in which they are shown.
        characters: that each of them may take.
    """
    runs = "\n\n".join(f"<run score={_score(trial)}>\n{_shortened(shown(trial, prompt), characters)}\n</run>" for trial in trials)
    return _messages(_CRITIC, f"<prompt>\n{prompt}\n</prompt>\n\n{runs}")


def ask_for_edit(prompt: str, critique: str) -> Messages:
    """Ask for a prompt in which the critique is heeded: the step against the gradient."""
    return _messages(_EDITOR, f"<prompt>\n{prompt}\n</prompt>\n\n<critique>\n{critique}\n</critique>")


def read_edit(answer: str) -> str | None:
    """The prompt of an answer. None: it has none that could be kept."""
    found = _ANSWER.search(answer)
    text = found[1].strip("\n") if found else ""
    return text if text.strip() and len(text) <= TEXT_MOST else None


def choose(trials: Sequence[Trial], count: int, dice: random.Random) -> list[Trial]:
    """Which rollouts a critique reads: some of the worse half, the worst first, and one of those that went better than all of these.

    Rollouts that failed count as the worst. Each edit draws anew, so that the critiques of a prompt differ.
    """
    ordered = sorted(trials, key=lambda one: (one.score is not None, one.score or 0.0, one.rollout_id))
    half = ordered[: max(1, (len(ordered) + 1) // 2)]
    bad = sorted(dice.sample(half, min(count, len(half))), key=ordered.index)
    worst = max((one.score for one in bad if one.score is not None), default=None)
    better = [one for one in ordered if one not in bad and one.score is not None and (worst is None or one.score > worst)]
    if not better or count == 1:
        return bad
    return [*bad[: count - 1], dice.choice(better)]


def shown(trial: Trial, prompt: str) -> str:
    """What was said in a rollout; a message that was there in an earlier call stands only there."""
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
