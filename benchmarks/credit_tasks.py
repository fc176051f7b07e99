"""Two small tasks in which it matters which call is credited with what.

In: what the model says. Out: what the agent sees and what it earns. Invariant: a prompt is the whole state, so that nothing but the policy
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
"""As many for each of four tools: with seven, the tool that is right for one kind alone is lost for good in one seed of six or so."""
LOOK = "look"
"""A tool that only reads: it never fails, and leads nowhere."""
RESPELLED = "_"
"""Before a tool's name: another token of the same text, as many tokenizers have one for a word after a space and one without."""
OK, ERROR = "ok", "error"
WORDS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "user", "assistant", "tool", "inbox", OK, ERROR, LOOK),
    *(*TOOLS, *(RESPELLED + tool for tool in TOOLS), *GOALS, *KINDS),
)


@dataclass(frozen=True, slots=True)
class State:
    """Where a rollout is."""

    page: int
    """Pages, or tickets, behind it."""
    status: str = OK
    """What came of the call before."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What came of one call."""

    state: State
    """After it."""
    tool: str | None
    """That ran. None: the reply was none's name."""
    grade: float | None
    """The call's own reward. None: it has none."""
    done: bool


class Task(Protocol):
    """One of the two."""

    name: str
    group: int
    """Rollouts that share a baseline."""
    limit: int
    """Calls a rollout, at most."""
    final: bool
    """Whether a rollout's only reward comes at its end: 1 for success, else 0."""
    entropy: float
    """Weight of the entropy that the loss rewards."""

    def goals(self, dice: random.Random, count: int) -> list[tuple[str, ...]]:
        """What so many groups, or the next multiple of what there is, are asked to do."""
        ...

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """What the model reads; as long in every state."""
        ...

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """What comes of a reply of two words."""
        ...

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """How much of a rollout's task was done, between 0 and 1."""
        ...

    def demonstration(self, dice: random.Random) -> tuple[list[str], list[str]]:
        """A prompt of any state, and a well-formed reply that knows nothing of it."""
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
    """Whether there is the tool that only reads."""
    respelled: bool = False
    """Whether the model may say a tool's name with either of two tokens."""

    def goals(self, dice: random.Random, count: int) -> list[tuple[str, ...]]:
        """Each of the four as often."""
        return [(goal,) for goal in GOALS] * -(-count // len(GOALS))

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """Goal, page and what came of the call before."""
        return _chat(goal[0], PAGES[state.page], state.status)

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """Only on page j, for goal i, tool i + j (modulo five) leads on."""
        tool = _tool(reply, TOOLS if not self.look else (*TOOLS, LOOK))
        if tool is None:
            return Turn(state, None, None, done=True)
        if tool == TOOLS[(GOALS.index(goal[0]) + state.page) % len(TOOLS)]:
            return Turn(State(state.page + 1), tool, None, done=state.page + 1 == len(PAGES))
        return Turn(State(state.page, OK if tool == LOOK else ERROR), tool, None, done=False)

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """Whether the last page is behind it."""
        return float(turns[-1].state.page == len(PAGES))

    def demonstration(self, dice: random.Random) -> tuple[list[str], list[str]]:
        """Any page, any status, any tool."""
        prompt = self.prompt([dice.choice(GOALS)], State(dice.randrange(len(PAGES)), dice.choice((OK, ERROR))))
        tool = dice.choice(TOOLS if not self.look else (*TOOLS, LOOK))
        return prompt, [RESPELLED + tool if self.respelled and dice.random() < 0.5 else tool, WORDS[2]]


@dataclass(frozen=True)
class Inbox:
    """A queue of graded tickets."""

    name: str = "inbox"
    group: int = 16
    limit: int = 8
    final: bool = False
    tools: tuple[str, ...] = TOOLS[:4]
    kinds: int = len(KINDS)
    """Of tickets: the first so many of `KINDS`."""
    entropy: float = 0.003
    """trainer.entropy_coef, of every arm: with none, a tool that is given up early comes back late or never, in a seed of twenty or so."""

    def goals(self, dice: random.Random, count: int) -> list[tuple[str, ...]]:
        """A queue for each group."""
        return [tuple(dice.choices(KINDS[: self.kinds], k=self.limit)) for _ in range(count)]

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """The ticket's kind."""
        return _chat("inbox", goal[state.page])

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """Kind i needs tool i modulo four."""
        tool = _tool(reply, self.tools)
        if tool is None:
            return Turn(state, None, 0.0, done=True)
        right = tool == self.tools[KINDS.index(goal[state.page]) % len(self.tools)]
        return Turn(State(state.page + 1), tool, float(right), done=state.page + 1 == self.limit)

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """The share of tickets that were done rightly."""
        return sum(turn.grade or 0.0 for turn in turns) / len(goal)

    def demonstration(self, dice: random.Random) -> tuple[list[str], list[str]]:
        """Any kind, any tool."""
        return self.prompt([dice.choice(KINDS[: self.kinds])], State(0)), [dice.choice(self.tools), WORDS[2]]


def spoken(word: str) -> str:
    """The text of a word's token: two spellings are one text."""
    return word.removeprefix(RESPELLED)


def _chat(asked: str, *seen: str) -> list[str]:
    start, end = WORDS[1:3]
    return [start, "user", asked, end, start, "tool", *seen, end, start, "assistant"]


def _tool(reply: Sequence[str], tools: Sequence[str]) -> str | None:
    said = spoken(reply[0])
    return said if said in tools and reply[1] == WORDS[2] else None
