"""Inputs of the trainer in a test: settings by the fields' own names (`trainer_settings(loss__name="gspo")`), rows of transitions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from pydantic import BaseModel

from spangrad.settings import Settings, TrainerSettings

_SECTIONS = {name: cast("type[BaseModel]", field.annotation) for name, field in TrainerSettings.model_fields.items()}
_SECTIONS = {name: kind for name, kind in _SECTIONS.items() if isinstance(kind, type) and issubclass(kind, BaseModel)}


def trainer_key(name: str) -> str:
    """Return the key below `trainer` of a field that one section has, or of `section__field`."""
    if "__" in name:
        return name.replace("__", ".", 1)
    sections = [section for section, kind in _SECTIONS.items() if name in kind.model_fields]
    if name in TrainerSettings.model_fields or not sections:
        return name
    if len(sections) > 1:
        raise ValueError(f"{name} is in the sections {sections}: write SECTION__{name}")
    return f"{sections[0]}.{name}"


def nested(flat: Mapping[str, Any]) -> dict[str, Any]:
    """Return the tables of the trainer's settings that hold these values."""
    tables: dict[str, Any] = {}
    for name, value in flat.items():
        section, _, field = trainer_key(name).partition(".")
        if field:
            tables.setdefault(section, {})[field] = value
        else:
            tables[section] = value
    return tables


def trainer_settings(**flat: Any) -> TrainerSettings:
    """Return the trainer's settings with these values."""
    return TrainerSettings(**nested(flat))


def changed(settings: TrainerSettings, flat: Mapping[str, Any]) -> TrainerSettings:
    """Return the trainer's settings with these values replaced, which are not validated."""
    tables = {
        name: getattr(settings, name).model_copy(update=value) if name in _SECTIONS and isinstance(value, dict) else value
        for name, value in nested(flat).items()
    }
    return settings.model_copy(update=tables)


def service_settings(**flat: Any) -> Settings:
    """Return all settings with these values: `SECTION__field` of a service, and fields of the runner by their own names."""
    tables: dict[str, Any] = {"runner": {}}
    for name, value in flat.items():
        section, _, field = name.rpartition("__")
        tables.setdefault(section or "runner", {})[field] = value
    return Settings(**tables)


def transition_row(rollout: str, turn: int = 0, *, rewards: tuple[float, ...] = (), **changes: object) -> dict[str, object]:
    """A row of spangrad_internal.transitions as the trainer reads it; `changes` replace columns."""
    count = len(changes.get("Rewards.Value", rewards))  # type: ignore[arg-type]
    row: dict[str, object] = {
        "RunId": "run",
        "Mode": "train",
        "BuildSpec": "spec",
        "GroupId": "group",
        "TaskId": "task",
        "RolloutId": rollout,
        "Attempt": 0,
        "Revision": 0,
        "Turn": turn,
        "CallId": f"call-{rollout}-{turn}",
        "TraceId": f"trace-{rollout}",
        "SpanId": f"span-{rollout}-{turn}",
        "AgentName": "agent",
        "Components": ["agent"],
        "Tools": [],
        "Policy": "policy",
        "Model": "policy",
        "TransitionId": f"transition-{rollout}-{turn}",
        "Version": 0,
        "Versions.Start": [],  # Version sampled all of it
        "Versions.Version": [],
        "TokenizerHash": "tokenizer",
        "Temperature": 1.0,
        "Reshaping": "",
        "FinishReason": "stop",
        "PromptIds": [1, 2, 3],
        "ResponseIds": [4, 5],
        "Logprobs": [-0.5, -1.5],
        "Rewards.Name": ["reward"] * len(rewards),
        "Rewards.Value": list(rewards),
        "Rewards.CallId": [""] * count,
        "Rewards.Role": [""] * count,
        "Rewards.Turn": [turn] * count,
    }
    return {**row, **changes}
