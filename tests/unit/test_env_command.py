"""Names of the environments that `spangrad env serve` gets."""

from __future__ import annotations

import pytest

from commands.training.env import named_environments
from spangrad.errors import SettingsError


def test_named_environments_without_a_name_have_that_of_their_class() -> None:
    assert named_environments(["games.py:Chess", "go=games:Go"]) == {"Chess": "games.py:Chess", "go": "games:Go"}
    assert named_environments(["gymnasium:ALE/Pong-v5"]) == {"ALE/Pong-v5": "gymnasium:ALE/Pong-v5"}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ((), "no environment is named"),
        (("a=games:Chess", "a=games:Go"), r"a names games:Chess already\. Write ANOTHER=games:Go"),
        (("games:Go", "gymnasium:ALE/Pong-v5"), "'ALE/Pong-v5' cannot name an environment in a URL"),
        (("step=games:Chess",), "'step' cannot name an environment in a URL"),
    ],
)
def test_named_environments_with_an_unusable_name_raise(arguments: tuple[str, ...], sentence: str) -> None:
    with pytest.raises(SettingsError, match=sentence):
        named_environments(arguments)
