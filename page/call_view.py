"""A call token by token: ids, texts, logprobs, policy versions, and what training made of them.

In: a rollout and a span of it. Out: plain values for JSON. Invariant: ids and logprobs are the engine's; the part of a prompt that repeats
the call before it is counted by comparing ids, never by comparing texts.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from page.reading import PageStore
from page.rollouts.conversation import shared_length
from page.token_texts import TokenTexts
from spangrad.errors import JSON_ERRORS
from spangrad.store.datasets import rows_sql

_OF_ROLLOUT = "RolloutId = {rollout:String}"
_PLACE = "TraceId = {trace:String} AND SpanId = {span:String} AND ChoiceIndex = {choice:UInt16}"
_COLUMNS = "CallId, Policy, Model, TokenizerHash, FinishReason, Temperature"
_TOKENS = "PromptIds, ResponseIds, Logprobs, `Versions.Start` AS Starts, `Versions.Version` AS Versions"
_CALL = f"""
SELECT {_COLUMNS}, {_TOKENS}, Duration, ErrorType
FROM spangrad.calls WHERE RolloutKey IN ({{rollout:String}}, {{trace:String}}) AND {_PLACE}
LIMIT 1
"""
_TRANSITION = f"""
SELECT {_COLUMNS}, {{tokens}} BuildSpec, ParentCallId, Turn, AgentName,
    `Rewards.Name` AS RewardNames, `Rewards.Value` AS RewardValues, `Rewards.Source` AS RewardSources, `Rewards.CallId` AS RewardCalls
FROM {rows_sql("transitions", where=_OF_ROLLOUT)} AS t WHERE {_PLACE}
ORDER BY BuildSpec LIMIT 1
"""
_BEFORE = f"""
SELECT PromptIds, ResponseIds FROM {rows_sql("transitions", where=_OF_ROLLOUT)} AS t
WHERE CallId = {{call:String}} AND BuildSpec = {{spec:String}} LIMIT 1
"""
_DROP = f"SELECT Reason, Detail FROM {rows_sql('drops', where=_OF_ROLLOUT)} AS d WHERE {_PLACE} ORDER BY BuildSpec LIMIT 1"
_TRAINED = f"""
SELECT Policy, Branch, Version, Staleness, Return, Advantage FROM spangrad.trained_calls
WHERE {_OF_ROLLOUT} AND TraceId = {{trace:String}} AND SpanId = {{span:String}} AND CallId = {{call:String}}
ORDER BY Policy, Branch, Version
"""
_TRAINED_TOKENS = """
SELECT Policy, Branch, Version, TrainerLogprobs, Entropies FROM spangrad.trained_tokens
WHERE Policy IN {policies:Array(String)} AND Branch IN {branches:Array(String)} AND Version IN {versions:Array(UInt64)}
    AND RolloutId = {rollout:String} AND CallId = {call:String}
"""
_TEXTS = """
SELECT Input, Output FROM spangrad.call_texts WHERE TraceId = {trace:String} AND SpanId = {span:String}
"""
_ALTERNATIVES = """
SELECT JSONExtractRaw(Output, 'choices', {number:UInt16}, 'logprobs', 'content') AS Content
FROM spangrad.call_texts WHERE TraceId = {trace:String} AND SpanId = {span:String}
"""
ALTERNATIVES_MOST = 20
"""Largest number of alternatives of a token that are shown."""
TEXT_CHARACTERS = 1_000_000
"""Characters of a request or a response that are shown; a download has all."""


@dataclass(frozen=True, slots=True)
class CallPlace:
    """Choice of a call, by its rollout and span."""

    rollout: str
    trace: str
    span: str
    choice: int = 0

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters of statements."""
        return {"rollout": self.rollout, "trace": self.trace, "span": self.span, "choice": self.choice}


class _TokenLogprob(msgspec.Struct):
    token: str
    logprob: float


class _TokenLogprobs(msgspec.Struct):
    """Token of a response in the form of OpenAI's chat, with its alternatives."""

    top_logprobs: list[_TokenLogprob] = []


def call_view(store: PageStore, texts: TokenTexts, place: CallPlace, *, whole: bool) -> dict[str, Any] | None:
    """Return what the view of a call shows: the whole prompt, or only what does not repeat the call before. None: there is no such call."""
    recorded = store.rows(_CALL, place.parameters)
    # The gateway's record has the tokens; only in direct mode are they read from the transition, which takes the longest.
    transitions = store.rows(_TRANSITION.replace("{tokens}", "" if recorded else f"{_TOKENS},"), place.parameters)
    if not recorded and not transitions:
        return None
    transition = transitions[0] if transitions else {}
    call = {**transition, **(recorded[0] if recorded else {})}
    drops = store.rows(_DROP, place.parameters) if not transition else []
    prompt, response = list(call["PromptIds"]), list(call["ResponseIds"])
    repeated = _repeated(store, place, transition, prompt)
    shown = prompt if whole else prompt[repeated:]
    pieces, problem = texts.pieces(call["TokenizerHash"], prompt[len(prompt) - len(shown) :], response)
    return {
        **{name: call.get(name) for name in ("Policy", "Model", "AgentName", "Temperature", "FinishReason", "ErrorType", "Duration")},
        "rollout": place.rollout,
        "textProblem": problem,
        "promptTokens": len(prompt),
        "repeated": repeated,
        "prompt": {"ids": shown, "pieces": pieces[0]},
        "response": {"ids": response, "pieces": pieces[1], "logprobs": list(call["Logprobs"])},
        "versions": list(zip(call["Starts"], call["Versions"], strict=False)),
        "conclusion": _conclusion(transition, drops),
        "rewards": _rewards(transition),
        "trained": _trainings(store, place, call["CallId"]),
    }


def call_texts(store: PageStore, place: CallPlace) -> dict[str, str] | None:
    """Return the request and the response of a call as they were recorded. None: the store holds no such span."""
    rows = store.rows(_TEXTS, place.parameters)
    return {"request": rows[0]["Input"], "response": rows[0]["Output"]} if rows else None


def alternatives(store: PageStore, place: CallPlace) -> list[list[dict[str, Any]]]:
    """Return the likeliest tokens in the place of each response token, where the recorded response holds them; empty: it holds none."""
    rows = store.rows(_ALTERNATIVES, {**place.parameters, "number": place.choice + 1})
    try:
        tokens = msgspec.json.decode(rows[0]["Content"], type=list[_TokenLogprobs]) if rows and rows[0]["Content"] else []
    except JSON_ERRORS:  # a response of another form, or one that was cut
        return []
    lists = [[{"token": other.token, "logprob": other.logprob} for other in token.top_logprobs[:ALTERNATIVES_MOST]] for token in tokens]
    return lists if any(lists) else []


def _trainings(store: PageStore, place: CallPlace, call: str) -> list[dict[str, Any]]:
    """Return the steps that trained a call, each with the trainer's logprobs and entropies of its tokens; of steps without, empty lists."""
    steps = store.rows(_TRAINED, {**place.parameters, "call": call})
    if not steps:
        return []
    # The table is sorted by version: these names lead to the rows.
    names = {"policies": "Policy", "branches": "Branch", "versions": "Version"}
    places = {key: [step[name] for step in steps] for key, name in names.items()}
    tokens = store.rows(_TRAINED_TOKENS, {"rollout": place.rollout, "call": call, **places})
    known = {(row["Policy"], row["Branch"], row["Version"]): (row["TrainerLogprobs"], row["Entropies"]) for row in tokens}
    of_steps = [known.get((step["Policy"], step["Branch"], step["Version"]), ((), ())) for step in steps]
    return [
        {**step, "logprobs": list(logprobs), "entropies": list(entropies)}
        for step, (logprobs, entropies) in zip(steps, of_steps, strict=True)
    ]


def _repeated(store: PageStore, place: CallPlace, transition: dict[str, Any], prompt: list[int]) -> int:
    """Return how many tokens of a prompt repeat the prompt and the response of the call before it on its branch."""
    if not transition.get("ParentCallId"):
        return 0
    names = {**place.parameters, "call": transition["ParentCallId"], "spec": transition["BuildSpec"]}
    before = store.rows(_BEFORE, names)
    if not before:
        return 0
    return shared_length([*before[0]["PromptIds"], *before[0]["ResponseIds"]], prompt)


def _conclusion(transition: dict[str, Any], drops: list[dict[str, Any]]) -> dict[str, Any]:
    if transition:
        return {"kind": "transition", "turn": transition["Turn"]}
    if drops:
        return {"kind": "drop", "reason": drops[0]["Reason"], "detail": drops[0]["Detail"]}
    return {"kind": "unbuilt"}


def _rewards(transition: dict[str, Any]) -> list[dict[str, Any]]:
    names = ("RewardNames", "RewardValues", "RewardSources", "RewardCalls")
    rows = zip(*(transition.get(name, ()) for name in names), strict=True)
    return [{"title": name, "value": value, "source": source, "own": bool(call)} for name, value, source, call in rows]
