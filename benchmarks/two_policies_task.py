"""A desk where two agents work off tickets together, each with a model of its own.

In: tickets, and a sampler for each agent. Out: `Sampled` rollouts, whose calls name their agent. Invariant: a prompt is all that its agent
needs to know, and what a call is worth depends on nothing but that call.

A rollout is four tickets. Of each the planner reads what is wrong, one of eight words, and picks one of four tools; the writer reads the
tool and what the ticket is about, one of eight words, and gives one of four arguments. A word needs the tool, or argument, of its own
place modulo four. Both calls are graded 1 or 0; the tool runs with the argument, and fails unless both are right. A reply that is no
tool's name, or no argument's, earns 0 and ends the rollout.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from transformers.utils import logging as transformers_logging

from benchmarks.credit_sampling import Call, Sampled, Sampler
from benchmarks.credit_tasks import ERROR, OK, State, Turn
from examples.two_tools.model import word_tokenizer, write_model

PLANNER, WRITER = "planner", "writer"
AGENTS = (PLANNER, WRITER)
TOOLS = ("refund", "cancel", "replace", "notify")
TROUBLES = ("broken", "late", "twice", "lost", "torn", "unpaid", "wrong", "moved")
ARGUMENTS = ("north", "south", "east", "west")
ITEMS = ("lamp", "chair", "table", "shelf", "clock", "sofa", "stool", "bench")
WORDS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "system", "user", "assistant", *AGENTS),
    *(*TOOLS, *TROUBLES, *ARGUMENTS, *ITEMS),
)
_START, _END = WORDS[1:3]
_ID = {word: i for i, word in enumerate(WORDS)}


@dataclass(frozen=True)
class Desk:
    """Task of the two agents: a queue of tickets, each planned by one agent and written by the other."""

    group: int = 16
    """Rollouts that share a baseline, and their tickets."""
    tickets: int = 4
    """Number of tickets in a rollout."""
    final: bool = False
    """True if a rollout has a reward at its end."""

    def goals(self, rng: random.Random, count: int) -> list[tuple[str, ...]]:
        """Return `count` queues of tickets; a ticket is two words."""
        return [tuple(rng.choice(words) for _ in range(self.tickets) for words in (TROUBLES, ITEMS)) for _ in range(count)]

    def prompt(self, goal: Sequence[str], state: State) -> list[str]:
        """Return the prompt of the agent whose turn it is; its length is the same in every state of an agent."""
        trouble, item = goal[2 * state.page : 2 * state.page + 2]
        return _chat(PLANNER, trouble) if agent_of(state) == PLANNER else _chat(WRITER, state.status, item)

    def step(self, goal: Sequence[str], state: State, reply: Sequence[str]) -> Turn:
        """Return the result of a reply of two words by the agent whose turn it is."""
        trouble, item = goal[2 * state.page : 2 * state.page + 2]
        planning = agent_of(state) == PLANNER
        word, choices = reply[0], TOOLS if planning else ARGUMENTS
        if word not in choices or reply[1] != _END:
            return Turn(state, None, 0.0, done=True)
        if planning:
            return Turn(State(state.page, word), None, float(word == _needed(trouble, TROUBLES, TOOLS)), done=False)
        right = word == _needed(item, ITEMS, ARGUMENTS)
        worked = right and state.status == _needed(trouble, TROUBLES, TOOLS)
        return Turn(State(state.page + 1, OK if worked else ERROR), state.status, float(right), done=state.page + 1 == self.tickets)

    def success(self, goal: Sequence[str], turns: Sequence[Turn]) -> float:
        """Return the share of tickets in which both agents were right."""
        return sum(turn.tool is not None and turn.state.status == OK for turn in turns) / self.tickets

    def own_success(self, agent: str, turns: Sequence[Turn]) -> float:
        """Return the share of tickets in which one agent was right; a ticket that it never saw counts as wrong."""
        return sum(turn.grade or 0.0 for turn in turns[AGENTS.index(agent) :: len(AGENTS)]) / self.tickets

    def demonstration(self, agent: str, rng: random.Random) -> tuple[list[str], list[str]]:
        """Return a prompt of a random ticket, and a well-formed reply that is independent of it."""
        if agent == PLANNER:
            return _chat(PLANNER, rng.choice(TROUBLES)), [rng.choice(TOOLS), _END]
        return _chat(WRITER, rng.choice(TOOLS), rng.choice(ITEMS)), [rng.choice(ARGUMENTS), _END]


def agent_of(state: State) -> str:
    """Return the agent whose turn it is: the writer once the planner has picked a tool, else the planner."""
    return WRITER if state.status in TOOLS else PLANNER


def write_agent_model(directory: Path, desk: Desk, agent: str, seed: int) -> None:
    """A model that knows the form of an agent's replies and nothing of their meaning."""
    transformers_logging.disable_progress_bar()
    rng = random.Random(f"{agent} {seed}")

    def demonstrate() -> tuple[list[int], list[int]]:
        prompt, reply = desk.demonstration(agent, rng)
        return _ids(prompt), _ids(reply)

    write_model(directory, word_tokenizer(WORDS), 2 * seed + AGENTS.index(agent), demonstrate)


def work(desk: Desk, goals: Sequence[tuple[str, ...]], samplers: Mapping[str, Sampler]) -> list[Sampled]:
    """Sample a group of whole rollouts for each goal."""
    everything = [Sampled(goal, place) for place, goal in enumerate(goals) for _ in range(desk.group)]
    while going := [rollout for rollout in everything if not rollout.done]:
        agent = agent_of(going[0].state)  # the same for all: they take turns
        prompts = [_ids(desk.prompt(rollout.goal, rollout.state)) for rollout in going]
        for rollout, prompt, reply, logprobs in zip(going, prompts, *samplers[agent].sample(prompts), strict=True):
            turn = desk.step(rollout.goal, rollout.state, [WORDS[token] for token in reply])
            rollout.calls.append(Call(prompt, reply, logprobs, turn, agent))
    return everything


def _needed(word: str, words: Sequence[str], choices: Sequence[str]) -> str:
    return choices[words.index(word) % len(choices)]


def _chat(agent: str, *words: str) -> list[str]:
    return [_START, "system", agent, _END, _START, "user", *words, _END, _START, "assistant"]


def _ids(words: Sequence[str]) -> list[int]:
    return [_ID[word] for word in words]
