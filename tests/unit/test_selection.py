"""Selections: which calls their patterns take."""

from __future__ import annotations

import polars as pl
import pytest

from spangrad.errors import SettingsError
from spangrad.selection import conditions, expression
from spangrad.settings import BuilderSettings, Selection
from transition_builder.specification import check

CALLS = pl.DataFrame(
    {
        "AgentName": ["planner", "planner2", "", "coder"],
        "Model": ["gpt-4o", "gpt-4o", "policy", "policy"],
        "Policy": ["policy", "", "", "large"],
        "Tools": [["search", "run"], [], ["run_tests"], None],
        "Components": [["crew", "planner"], ["crew"], [], ["coder"]],
    },
    schema_overrides={"Tools": pl.List(pl.String), "Components": pl.List(pl.String)},
)


@pytest.mark.parametrize(
    ("selection", "taken"),
    [
        (Selection(), [0, 1, 2, 3]),
        (Selection(agents="planner"), [0]),
        (Selection(agents="plan.*|coder"), [0, 1, 3]),
        (Selection(agents=""), [2]),
        (Selection(models="gpt.*"), [0, 1]),
        # What no policy answered was asked for by its model's name.
        (Selection(policies="policy"), [0, 2]),
        (Selection(policies="gpt-4o|large"), [1, 3]),
        (Selection(tools="run"), [0]),
        (Selection(tools="run.*"), [0, 2]),
        (Selection(tools=".*"), [0, 2]),
        (Selection(components="crew"), [0, 1]),
        (Selection(components="crew|coder", models="policy"), [3]),
        (Selection(agents="nobody"), []),
    ],
)
def test_selection_expression_matches_names_in_full(selection: Selection, taken: list[int]):
    assert CALLS.select(expression(selection)).to_series().to_list() == [i in taken for i in range(4)]
    assert CALLS.clear().filter(expression(selection)).is_empty()


def test_selection_conditions_give_compared_values():
    chosen = Selection(agents="a", policies="p", tools="t")
    values_of = {condition.what: CALLS.select(condition.value).to_series().to_list() for condition in conditions(chosen)}
    assert values_of == {
        "agent": ["planner", "planner2", "", "coder"],
        "policy": ["policy", "gpt-4o", "policy", "large"],
        "tool": ["search, run", "", "run_tests", None],
    }


@pytest.mark.parametrize(("field", "pattern"), [("policies", "("), ("tools", "[a"), ("components", "a{2,1}")])
def test_selection_invalid_pattern_raises_with_field(field: str, pattern: str):
    with pytest.raises(SettingsError, match=rf"^trainer\.selection\.{field} = .* is no regular expression \(.+\)\. Fix it"):
        expression(Selection(**{field: pattern}), "trainer.selection")


def test_specification_check_invalid_pattern_raises_with_setting():
    with pytest.raises(SettingsError, match=r"^builder\.selection\.agents = '\(' is no regular expression"):
        check(BuilderSettings(selection=Selection(agents="(")))
