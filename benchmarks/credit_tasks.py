"""Two small tasks in which it matters to which call a reward is credited.

In: the model's replies. Out: the agent's observations and rewards. Invariant: a prompt is the whole state, so that nothing but the policy
decides what a call is worth.

`Flow`: a goal is reached over four pages; on each one of five tools works, which one depends on goal and page. A right tool leads to the
next page, a wrong one gives an error. Six calls at most; the only reward is 1 or 0 at the end. `Inbox`: eight tickets one after the other,
each of one of eight kinds; a kind needs one of four tools. Every call is accepted, and graded 1 or 0. In both a reply that is no tool's
name earns 0 and ends the rollout.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

TOOLS = ("login", "search", "open", "edit", "save")
GOALS = ("refund", "cancel", "order", "invoice")
PAGES = ("home", "list", "item", "form")
KINDS = (*PAGES, "cart", "bill", "gate", "desk")
"""Kinds of tickets, equally many for each of four tools: with seven kinds, the tool that is right for only one is never learned in
about one seed of six."""
LOOK = "look"
"""A tool that only reads: it never fails, and leads nowhere."""
RESPELLED = "_"
"""Prefix of a tool's name in another token of the same text, as many tokenizers have one for a word after a space and one without."""
OK, ERROR = "ok", "error"
WORDS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "tool", "inbox", OK, ERROR, LOOK),
    *(*TOOLS, *(RESPELLED + tool for tool in TOOLS), *GOALS, *KINDS),
)


@dataclass(frozen=True, slots=True)
class State:
    """State of a rollout."""

    page: int
    """Number of pages, or tickets, that are done."""
    status: str = OK
    """Result of the previous call: ok or error."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Result of one call."""

    state: State
    """State after the call."""
    tool: str | None
    """Tool that ran. None: the reply was not the name of a tool."""
    grade: float | None
    """Reward of the call itself. None: it has none."""
    done: bool


class Task(Protocol):
    """Interface of the two tasks."""

    name: str
    group: int
    """Rollouts that share a baseline."""
    limit: int
    """Calls a rollout, at most."""
    final: bool
    """True if a rollout's only reward comes at its end: 1 for success, else 0."""
    entropy: float
    """Weight of the entropy that the loss rewards."""

    def goals(self, rng: random.Random, count: int) -> list[tuple[str, ...]]:
        """Return the goals of `count` groups, or of the next multiple of the number of goals."""
        ...

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """Return the words of the prompt; their number is the same in every state."""
        ...

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """Return the result of a reply of two words."""
        ...

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """Return the share of a rollout's task that was done, from 0 to 1."""
        ...

    def demonstration(self, rng: random.Random) -> tuple[list[str], list[str]]:
        """Return a prompt of a random state, and a well-formed reply that is independent of it."""
        ...


@dataclass(frozen=True)
class Flow:
    """A goal over four pages."""

    name: str = "flow"
    group: int = 64
    limit: int = 6
    final: bool = True
    entropy: float = 0.0
    look: bool = False
    """True if the task has the tool that only reads."""
    respelled: bool = False
    """True if the model may write a tool's name with either of two tokens."""

    def goals(self, rng: random.Random, count: int) -> list[tuple[str, ...]]:
        """Return each of the four goals equally often."""
        return [(goal,) for goal in GOALS] * -(-count // len(GOALS))

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """Return the goal, the page and the result of the previous call."""
        return _chat(goal[0], PAGES[state.page], state.status)

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """Return the result of a call: on page j, for goal i, tool i + j (modulo five) leads to the next page."""
        tool = _tool(reply, TOOLS if not self.look else (*TOOLS, LOOK))
        if tool is None:
            return Turn(state, None, None, done=True)
        if tool == TOOLS[(GOALS.index(goal[0]) + state.page) % len(TOOLS)]:
            return Turn(State(state.page + 1), tool, None, done=state.page + 1 == len(PAGES))
        return Turn(State(state.page, OK if tool == LOOK else ERROR), tool, None, done=False)

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """Return 1 if the last page is done, else 0."""
        return float(turns[-1].state.page == len(PAGES))

    def demonstration(self, rng: random.Random) -> tuple[list[str], list[str]]:
        """Return a prompt of a random page and status, with a random tool."""
        prompt = self.prompt([rng.choice(GOALS)], State(rng.randrange(len(PAGES)), rng.choice((OK, ERROR))))
        tool = rng.choice(TOOLS if not self.look else (*TOOLS, LOOK))
        return prompt, [RESPELLED + tool if self.respelled and rng.random() < 0.5 else tool, WORDS[2]]


@dataclass(frozen=True)
class Inbox:
    """A queue of graded tickets."""

    name: str = "inbox"
    group: int = 16
    limit: int = 8
    final: bool = False
    tools: tuple[str, ...] = TOOLS[:4]
    kinds: int = len(KINDS)
    """Number of kinds of tickets: the first ones of `KINDS`."""
    entropy: float = 0.003
    """trainer.loss.entropy_coef, of every arm: with none, a tool that is given up early comes back late or never, in a seed of twenty or
    so."""

    def goals(self, rng: random.Random, count: int) -> list[tuple[str, ...]]:
        """Return a queue of tickets for each group."""
        return [tuple(rng.choices(KINDS[: self.kinds], k=self.limit)) for _ in range(count)]

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """Return the prompt with the ticket's kind."""
        return _chat("inbox", goal[state.page])

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """Return the result of a call: a ticket of kind i needs tool i modulo four."""
        tool = _tool(reply, self.tools)
        if tool is None:
            return Turn(state, None, 0.0, done=True)
        right = tool == self.tools[KINDS.index(goal[state.page]) % len(self.tools)]
        return Turn(State(state.page + 1), tool, float(right), done=state.page + 1 == self.limit)

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """Return the share of tickets that were done with the right tool."""
        return sum(turn.grade or 0.0 for turn in turns) / len(goal)

    def demonstration(self, rng: random.Random) -> tuple[list[str], list[str]]:
        """Return a prompt of a random kind, with a random tool."""
        return self.prompt([rng.choice(KINDS[: self.kinds])], State(0)), [rng.choice(self.tools), WORDS[2]]


def text_of(word: str) -> str:
    """Return the text of a word's token; two spellings have the same text."""
    return word.removeprefix(RESPELLED)


def _chat(asked: str, *seen: str) -> list[str]:
    start, end = WORDS[1:3]
    return [start, "user", asked, end, start, "tool", *seen, end, start, "assistant"]


def _tool(reply: Sequence[str], tools: Sequence[str]) -> str | None:
    name = text_of(reply[0])
    return name if name in tools and reply[1] == WORDS[2] else None
