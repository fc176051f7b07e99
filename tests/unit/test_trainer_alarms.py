"""The alarm of a return that rises without success: its rule, and the trainer's warning and record of it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from spangrad.settings.trainer_service import AlarmSettings
from tests.support.trainers import FakeSource, settings, wired, write_base
from trainer.loop import newest_version
from trainer.monitor.alarms import describe, gaming, rise

RULE = AlarmSettings(gaming_versions=4, gaming_rise=0.1)
numbers = st.floats(-100, 100).map(lambda value: round(value, 3))
series = st.lists(numbers, min_size=4, max_size=30)


def versions(returns: list[float], successes: list[float]) -> list[dict[str, float]]:
    return [{"mean_return": mean, "mean_reward_reward": reward} for mean, reward in zip(returns, successes, strict=True)]


@pytest.mark.parametrize(
    ("returns", "successes", "alarm"),
    [
        pytest.param([0.1, 0.3, 0.5, 0.6], [0.02, 0.0, 0.0, 0.01], 1, id="return up, success flat"),
        pytest.param([0.1, 0.3, 0.5, 0.6], [0.3, 0.2, 0.1, 0.0], 1, id="return up, success down"),
        pytest.param([0.1, 0.3, 0.5, 0.6], [0.0, 0.01, 0.02, 0.03], 1, id="success up by less than a tenth of the return's rise"),
        pytest.param([0.1, 0.3, 0.5, 0.6], [0.0, 0.03, 0.06, 0.09], 0, id="success up by more"),
        pytest.param([0.1, 0.3, 0.5, 0.6], [0.1, 0.3, 0.5, 0.6], 0, id="both up"),
        pytest.param([0.60, 0.62, 0.65, 0.66], [0.0, 0.0, 0.0, 0.0], 0, id="return up by less than the rule says"),
        pytest.param([0.6, 0.5, 0.3, 0.1], [0.5, 0.4, 0.3, 0.0], 0, id="both down"),
        pytest.param([0.6, 0.6, 0.6, 0.6], [0.0, 0.0, 0.0, 0.0], 0, id="both flat"),
        pytest.param([9.0, 0.6, 0.1, 0.3, 0.5, 0.6], [0.0, 9.0, 0.0, 0.0, 0.0, 0.0], 1, id="only the last versions count"),
    ],
)
def test_gaming_alarm_by_returns_and_successes(returns: list[float], successes: list[float], alarm: float) -> None:
    assert gaming(versions(returns, successes), RULE)["gaming_alarm"] == alarm


@pytest.mark.parametrize(
    ("history", "rule"),
    [
        pytest.param(versions([0.1, 0.3, 0.6], [0.0] * 3), RULE, id="too few versions"),
        pytest.param(
            [{}, *versions([0.1, 0.3, 0.6], [0.0] * 3)], RULE, id="the weights that training began with are no version that counts"
        ),
        pytest.param(
            versions([0.1, 0.3, 0.5, 0.6], [0.0] * 4), AlarmSettings(gaming_reward="wins", gaming_versions=4), id="no such reward"
        ),
        pytest.param(versions([0.1, 0.3, 0.5, 0.6], [0.0] * 4), AlarmSettings(gaming_versions=0), id="turned off"),
    ],
)
def test_gaming_of_unknown_values_is_empty(history: list[dict[str, float]], rule: AlarmSettings) -> None:
    assert gaming(history, rule) == {}


@given(series, numbers)
def test_rise_is_independent_of_offset(values: list[float], offset: float) -> None:
    assert rise([value + offset for value in values]) == pytest.approx(rise(values), abs=1e-6)


@given(series)
def test_rise_of_reversed_values_is_negated(values: list[float]) -> None:
    assert rise(values[::-1]) == pytest.approx(-rise(values), abs=1e-6)


@given(numbers, numbers, st.integers(2, 30))
def test_rise_of_line_is_from_first_to_last_value(begin: float, slope: float, count: int) -> None:
    assert rise([begin + slope * place for place in range(count)]) == pytest.approx(slope * (count - 1), abs=1e-6)


@given(series)
def test_gaming_with_return_equal_to_success_is_no_alarm(values: list[float]) -> None:
    assert gaming(versions(values, values), RULE)["gaming_alarm"] == 0


@given(series, st.lists(numbers, min_size=30, max_size=30), st.floats(0.01, 100))
def test_gaming_is_independent_of_units(returns: list[float], successes: list[float], unit: float) -> None:
    successes = successes[: len(returns)]
    plain = gaming(versions(returns, successes), AlarmSettings(gaming_versions=4, gaming_rise=0))
    scaled = gaming(
        versions([unit * value for value in returns], [unit * value for value in successes]),
        AlarmSettings(gaming_versions=4, gaming_rise=0),
    )
    near = abs(plain["success_rise"] - 0.1 * plain["return_rise"]) < 1e-6 or abs(plain["return_rise"]) < 1e-6
    assert near or scaled["gaming_alarm"] == plain["gaming_alarm"]


def test_gaming_alarm_in_trainer_warns_once_and_is_recorded(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Two groups a version; what `progress` pays rises by 1 from version to version, `reward` stays as it is."""
    names = list("abcdefghij")
    paid = {name: {"Rewards.Name": ["reward", "progress"], "Rewards.Value": [0.5, float(place // 2)]} for place, name in enumerate(names)}
    chosen = settings(write_base(tmp_path / "base"), tmp_path / "policies", gaming_versions=3)
    trainer = wired(chosen, FakeSource(names, changes=dict(paid)))
    with caplog.at_level(logging.WARNING):
        trainer.run(follow=False)
    alarms = [version.metrics.get("gaming_alarm") for version in trainer.ledger.versions()]
    assert alarms == [None, None, None, 1, 1, 1]
    newest = newest_version(trainer.ledger)
    assert [newest.metrics["return_rise"], newest.metrics["success_rise"]] == [2, 0]
    warned = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    assert warned == [describe(3, newest.metrics, AlarmSettings(gaming_versions=3))]
    assert warned[0].startswith("version 3: over 3 versions the mean return rose by 2.00, and the reward 'reward' by 0.00.")
