"""Identity of a rollout in the resource attributes of the processes that an attempt starts."""

from __future__ import annotations

from collections.abc import Generator

import pytest
from opentelemetry import baggage, context
from opentelemetry.sdk import resources

from spangrad.agent.propagation import RESOURCE_ATTRIBUTES, resource_variable
from spangrad.semconv import ROLLOUT_ATTEMPT, ROLLOUT_ID, ROLLOUT_MODE, RUN_ID


@pytest.fixture
def attempt() -> Generator[dict[str, str]]:
    """Attributes of an attempt, whose baggage the current context has."""
    identity = {RUN_ID: "run, of ours", ROLLOUT_ID: 'a/b=c;d"é', ROLLOUT_MODE: "train", ROLLOUT_ATTEMPT: "0"}
    carried = context.get_current()
    for key, value in {**identity, "other": "entry"}.items():
        carried = baggage.set_baggage(key, value, carried)
    token = context.attach(carried)
    yield identity
    context.detach(token)


def test_resource_variable_is_read_back_by_the_sdk(attempt: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    ((name, value),) = resource_variable({}).items()
    assert f"{ROLLOUT_ID}=a/b%3Dc%3Bd%22%C3%A9" in value.split(","), "SDKs that decode nothing read most ids all the same"
    monkeypatch.setattr(resources, "environ", {name: value})
    assert resources.OTELResourceDetector().detect().attributes == attempt


def test_resource_variable_keeps_other_attributes_and_replaces_another_rollout(attempt: dict[str, str]) -> None:
    before = {RESOURCE_ATTRIBUTES: f"team=search,{ROLLOUT_ID}=outer, {RUN_ID} =outer,,host.name=a"}
    entries = resource_variable(before)[RESOURCE_ATTRIBUTES].split(",")
    assert entries[:2] == ["team=search", "host.name=a"]
    assert sorted(entry.partition("=")[0] for entry in entries[2:]) == sorted(attempt)


def test_resource_variable_outside_of_a_rollout_is_empty() -> None:
    assert resource_variable({RESOURCE_ATTRIBUTES: "team=search"}) == {}
