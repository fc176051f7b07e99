"""Tree of the settings that every part reads: names, types, defaults and help.

In: values, from the sources that `spangrad.settings.sources` reads. Out: a frozen `Settings`. Invariant: a value that has no meaning is
refused here, with its place, before any part starts.
"""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict

from spangrad.settings.builder import AirRule as AirRule
from spangrad.settings.builder import BuilderSettings
from spangrad.settings.builder import Selection as Selection
from spangrad.settings.finetune import FinetuneSettings
from spangrad.settings.gateway import BackendSettings as BackendSettings
from spangrad.settings.gateway import ClientSettings as ClientSettings
from spangrad.settings.gateway import EngineSettings, GatewaySettings
from spangrad.settings.prompts import PromptSettings
from spangrad.settings.runner import RunnerSettings
from spangrad.settings.services import EnvironmentServiceSettings, PageSettings, QueueSettings, RewardServiceSettings, ToolServiceSettings
from spangrad.settings.store import CollectorSettings, StoreSettings
from spangrad.settings.supervisor import UpSettings
from spangrad.settings.trainer import TrainerSettings

ENV_PREFIX = "SPANGRAD_"
ENV_NESTING = "__"


class Settings(BaseModel):
    """All settings, by section."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    store: StoreSettings = StoreSettings()
    collector: CollectorSettings = CollectorSettings()
    gateway: GatewaySettings = GatewaySettings()
    engine: EngineSettings = EngineSettings()
    builder: BuilderSettings = BuilderSettings()
    trainer: TrainerSettings = TrainerSettings()
    finetune: FinetuneSettings = FinetuneSettings()
    runner: RunnerSettings = RunnerSettings()
    queue: QueueSettings = QueueSettings()
    environments: EnvironmentServiceSettings = EnvironmentServiceSettings()
    rewards: RewardServiceSettings = RewardServiceSettings()
    tools: ToolServiceSettings = ToolServiceSettings()
    prompts: PromptSettings = PromptSettings()
    page: PageSettings = PageSettings()
    up: UpSettings = UpSettings()
