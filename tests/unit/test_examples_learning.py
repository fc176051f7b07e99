"""Code that the examples share: the tiny model's tokens, the settings of a run, the count of successes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from examples.calculator.__main__ import EXAMPLE as CALCULATOR
from examples.calculator.task import WORDS
from examples.from_scratch.__main__ import EXAMPLE as FROM_SCRATCH
from examples.gomoku.__main__ import EXAMPLE as GOMOKU
from examples.league.__main__ import AGAINST_SCRIPT, GROUPS_OF_EACH, TRAINED, league_settings
from examples.learning.example import CHECKOUT, Example
from examples.learning.players import with_players
from examples.learning.report import draw
from examples.learning.run import example_settings
from examples.learning.success import final_success
from examples.learning.tiny import CHAT_TEMPLATE, SPECIAL, encoded
from examples.math_lora.__main__ import EXAMPLE as MATH_LORA
from examples.retrieval_qa.__main__ import EXAMPLE as RETRIEVAL_QA
from examples.text_to_sql.__main__ import example as text_to_sql
from examples.two_gomoku.__main__ import ROLES, policy_settings
from examples.two_tools.model import word_tokenizer
from runner.runner import Outcome
from spangrad.callables import load
from spangrad.settings.sources import load_settings
from spangrad.types import AttemptFailure, Mode, RolloutKey

EXAMPLES = [CALCULATOR, FROM_SCRATCH, MATH_LORA, RETRIEVAL_QA, GOMOKU, text_to_sql("both", "model"), text_to_sql("writer", "oracle")]


def test_encoded_transcript_has_tokens_of_chat_template() -> None:
    tokenizer = word_tokenizer(tuple(dict.fromkeys((*SPECIAL, *WORDS))))
    tokenizer.chat_template = CHAT_TEMPLATE
    asked = {"role": "user", "content": "tom has 12 coins ."}
    transcript = [
        asked,
        {"role": "assistant", "content": "calc 12 + 7"},
        {"role": "tool", "content": "19"},
        {"role": "assistant", "content": "answer 19"},
    ]
    ids, taught = encoded(tokenizer, transcript)
    assert ids == tokenizer.encode(str(tokenizer.apply_chat_template(transcript, tokenize=False)))
    assert tokenizer.decode([token for odds in taught.values() for token in odds]) == "calc 12 + 7 <|im_end|> answer 19 <|im_end|>"
    call = {"function": {"name": "calc", "arguments": {"a": 12, "operator": "+", "b": 7}}}
    called = [asked, {"role": "assistant", "content": None, "tool_calls": [call]}, *transcript[2:]]
    assert tokenizer.encode(str(tokenizer.apply_chat_template(called, tokenize=False))) == ids
    prompt = tokenizer.encode(str(tokenizer.apply_chat_template(called[:1], tokenize=False, add_generation_prompt=True)))
    assert ids[: len(prompt)] == prompt


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.name)
def test_example_settings_and_files_load(example: Example, tmp_path: Path) -> None:
    settings = load_settings(example_settings(example, tmp_path, 3, 9))
    assert settings.trainer.run_id == settings.runner.run_id == example.name
    assert (settings.trainer.sampling.groups_per_batch, settings.runner.group_size) == (16, 8)
    assert settings.engine.extra_args[:2] == ("--seed", "3")
    assert Path(settings.engine.extra_args[-1]).is_file()
    assert (CHECKOUT / example.agent.split(":")[0].replace(".", "/")).with_suffix(".py").is_file()
    assert all(callable(load(code)) for code in (example.evaluator, example.environment) if code)
    drawn = example.questions(3, 32)
    json.dumps(drawn.held_out)
    assert len(drawn.train) == 32


def test_text_to_sql_example_selects_named_agents(tmp_path: Path) -> None:
    selected = {
        agents: load_settings(example_settings(text_to_sql(agents, "model"), tmp_path, 0, 9)).builder.selection
        for agents in ("both", "writer")
    }
    assert selected["writer"].agents == "writer_agent"
    assert selected["both"].agents == "(re)?writer_agent"
    assert {selection.policies for selection in selected.values()} == {"policy"}


def test_league_settings_load_with_players_of_each_pairing(tmp_path: Path) -> None:
    settings = load_settings(league_settings(tmp_path, 3, 9, 9))
    assert (settings.trainer.credit.by_role, settings.trainer.credit.reward_roles) == (True, ())
    assert settings.trainer.sampling.groups_per_batch == GROUPS_OF_EACH * len(TRAINED)
    for name, players in {**TRAINED, **AGAINST_SCRIPT}.items():
        own = with_players(settings, name, players).runner
        assert set(own.episode.players) == set(ROLES)
        assert own.directory == settings.runner.directory / name
    assert settings.runner.episode.players == {}


def test_policy_settings_of_two_policies_share_all_but_their_own(tmp_path: Path) -> None:
    first, second = (load_settings(values) for values in policy_settings(tmp_path, 3, 9, 9).values())
    assert first.builder.spec == second.builder.spec
    assert (first.store, first.gateway.url, first.trainer.directory) == (second.store, second.gateway.url, second.trainer.directory)
    assert [
        (settings.trainer.policy, settings.trainer.phase_policies, settings.trainer.selection.agents) for settings in (first, second)
    ] == [(role, (other,), role) for role, other in (ROLES, ROLES[::-1])]
    assert [settings.trainer.model == settings.engine.model for settings in (first, second)] == [True, True]
    assert (first.gateway.backends[0].url, second.engine.port) == ("http://127.0.0.1:9", 9)
    assert first.runner.episode.players == {}, "each pairing has its own"


def test_final_success_counts_failed_rollouts_as_failures() -> None:
    def ended(reward: float | None) -> Outcome:
        failure = None if reward is not None else AttemptFailure.CRASH
        return Outcome(RolloutKey("run", "r", 0), "task", Mode.TRAIN, None if reward is None else {"reward": reward}, failure, "", 1.0, 1)

    outcomes = [ended(1.0), ended(0.9), ended(-0.2), ended(None)]
    assert final_success(CALCULATOR, outcomes) == 0.25
    assert final_success(replace(CALCULATOR, success=0.8), outcomes) == 0.5


def test_draw_writes_png_curve(tmp_path: Path) -> None:
    draw(tmp_path / "curve.png", CALCULATOR, [0.2, 0.4], 0.2, 0.5)
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
