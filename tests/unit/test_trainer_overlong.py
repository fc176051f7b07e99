"""DAPO: soft overlong punishment and overlong filtering, by numbers worked out by hand."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from spangrad.errors import SettingsError
from spangrad.settings import TrainerSettings
from tests.support.policies import trainer_settings, transition_row
from trainer.credit import assignment, learning
from trainer.credit.assignment import Units
from trainer.credit.overlong import punishment, with_overlong
from trainer.data.assemble import assemble
from trainer.data.masks import masks
from trainer.data.source import BatchRollout, Group, Loaded
from trainer.monitor.batch_metrics import batch_metrics

SCHEMA = {
    "Rewards.Value": pl.List(pl.Float64), "Rewards.Name": pl.List(pl.String), "Rewards.CallId": pl.List(pl.String),
    "Rewards.Role": pl.List(pl.String),
}  # fmt: skip


def call(rollout: str, turn: int, tokens: int, *, cut: bool = False, rewards: tuple[float, ...] = (), **changes: Any) -> dict[str, object]:
    facts = {"ResponseIds": [4] * tokens, "Logprobs": [-1.0] * tokens, "FinishReason": "length" if cut else "stop"}
    return transition_row(rollout, turn, rewards=rewards, **facts, **changes)


def frame(*rows: dict[str, object]) -> pl.DataFrame:
    return pl.DataFrame(list(rows), schema_overrides=SCHEMA)


@pytest.mark.parametrize(("tokens", "by_hand"), [(1, 0.0), (16, 0.0), (17, -0.25), (18, -0.5), (20, -1.0), (21, -1.0), (900, -1.0)])
def test_punishment_matches_dapo_equation_13(tokens: int, by_hand: float):
    """L_max 20, L_cache 4: nothing up to 16 tokens, then a quarter a token, 1 from 20 on."""
    computed = pl.DataFrame({"n": [tokens]}, schema={"n": pl.UInt32}).select(punishment(pl.col("n"), 20, 4)).item()
    assert computed == by_hand


def test_with_overlong_adds_reward_to_long_calls_of_policy_only():
    rows = frame(
        call("a", 0, 18, rewards=(1.0,)), call("a", 1, 3), call("b", 0, 30, Policy="other"), call("b", 1, 40, rewards=(0.5, 0.25)),
    )  # fmt: skip
    rewarded = with_overlong(rows, trainer_settings(overlong_tokens=20, overlong_buffer=4))
    assert rewarded["Rewards.Name"].to_list() == [["reward", "overlong"], [], [], ["reward", "reward", "overlong"]]
    assert rewarded["Rewards.Value"].to_list() == [[1.0, -0.5], [], [], [0.5, 0.25, -1.0]]
    assert rewarded["Rewards.CallId"].list.len().to_list()[1:3] == [0, 0]
    assert rewarded["Rewards.CallId"].to_list()[0][-1] == rows["CallId"][0]
    assert assignment.returns(rewarded)["Return"].to_list() == [0.5, -0.25]
    assert assignment.returns(rewarded, {"overlong": 0.5})["Return"].to_list() == [0.75, 0.25]
    assert rewarded.schema == rows.schema
    assert with_overlong(rows, TrainerSettings()).equals(rows)


@pytest.mark.parametrize(
    ("truncated", "expected"),
    [
        ("train", [None, None, None, None]),
        ("mask", [None, "truncated", None, None]),
        ("reject", ["truncated", "truncated", None, None]),
    ],
)
def test_masks_of_truncated_calls_follow_setting(truncated: Any, expected: list[str | None]):
    rows = frame(call("a", 0, 2), call("a", 1, 3, cut=True), call("b", 0, 2), call("c", 0, 2))
    assert masks(rows, trainer_settings(truncated=truncated), lineage=[0]).to_list() == expected
    others = rows.with_columns(Policy=pl.Series(["policy", "other", "policy", "policy"]))
    rejected = masks(others, trainer_settings(truncated="reject"), lineage=[0]).filter(others["Policy"] == "policy")
    assert rejected.to_list() == [None, None, None], "another policy's cut call is none of this one's"


@pytest.mark.parametrize(("truncated", "trained"), [("train", 4), ("mask", 3), ("reject", 2)])
def test_masks_of_truncated_calls_keep_them_in_baseline(truncated: Any, trained: int):
    """The returns are 0, 1 and 0.5, whichever calls are masked: the mean is 0.5, so b has +0.5 and c 0."""
    rows = frame(
        call("a", 0, 2), call("a", 1, 3, cut=True, rewards=(0.0,)), call("b", 0, 2, rewards=(1.0,)), call("c", 0, 2, rewards=(0.5,)),
    )  # fmt: skip
    group = Group("run", "train", "spec", "group")
    loaded = Loaded([BatchRollout(group, name, 0, 0) for name in "abc"], rows)

    def against_the_mean(units: Units) -> Any:
        return units.values - units.values.mean()

    settings = trainer_settings(truncated=truncated)
    batch, metrics, _ = assemble(loaded, settings, against_the_mean, lineage=[0], divisor=1)
    assert metrics["transitions"] == batch.real_rows == trained
    assert metrics["masked_truncated"] == 4 - trained
    assert metrics["return_std"] == pytest.approx((1 / 6) ** 0.5)
    assert batch.advantages[-2:, 0].tolist() == [0.5, 0.0]
    reported = batch_metrics(loaded, settings)
    assert (reported["truncated_share"], reported["response_tokens_mean"], reported["response_tokens_p95"]) == (0.25, 2.25, 3.0)


@pytest.mark.parametrize(("tokens", "buffer"), [(20, 0), (0, 4), (4, 20)])
def test_learning_check_of_overlong_settings_without_meaning_raises(tokens: int, buffer: int):
    with pytest.raises(SettingsError, match=r"Set trainer\.credit\.overlong_tokens to the limit of a response"):
        learning.check(trainer_settings(overlong_tokens=tokens, overlong_buffer=buffer))
    learning.check(trainer_settings(overlong_tokens=20, overlong_buffer=4))


def test_dapo_settings_of_docs_page_are_complete_and_supported():
    page = (Path(__file__).parents[2] / "docs" / "guides" / "learning.md").read_text()
    block = page.split("## DAPO")[1].split("```toml\n")[1].split("```")[0]
    settings = trainer_settings(**tomllib.loads(block)["trainer"])
    learning.check(settings)
    assert (settings.loss.clip_ratio_high, settings.sampling.skip_equal_groups, settings.sampling.truncated) == (0.28, True, "mask")
    tokens = pl.DataFrame({"n": [16384, 17408, 18432, 20480]})
    rewards = tokens.select(punishment(pl.col("n"), settings.credit.overlong_tokens, settings.credit.overlong_buffer)).to_series()
    assert rewards.to_list() == [0.0, -0.25, -0.5, -1.0], "the table of the page"
