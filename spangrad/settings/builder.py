"""Settings of the transition builder: the calls that it selects, and the rewards that it gives them."""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from spangrad.callables import source_file
from spangrad.errors import AgentError, SettingsError
from spangrad.settings.section import Section


class Selection(Section):
    """Filter of calls: regular expressions, each of which must match a name in full. None: any name."""

    agents: str | None = None
    """Regular expression of the agent that made the call."""
    models: str | None = None
    """Regular expression of the model's name, as the agent requested it."""
    policies: str | None = None
    """Regular expression of the policy that answered; for a call that no policy answered, of its model's name."""
    tools: str | None = None
    """Regular expression of a tool that the call caused to run; any of its tools may match."""
    components: str | None = None
    """Regular expression of an agent, chain or tool around the call, at any height of the span tree."""


TOOL_KINDS = frozenset({"tool_ok", "tool_error", "tool_exception", "empty_result", "malformed_arguments", "repeated_call"})
"""Kinds of rules about tools, which must list the tools that count."""
_NEEDS = {
    "latency": "seconds",
    "unparsable_output": "form",
    "expression": "where",
    "sql": "where",
    "python": "where",
    "tool_exception": "types",
}
"""Kind of rule -> the setting that it needs beside a name and a reward."""


class AirRule(Section):
    """Automatic intermediate reward (AIR): a reward for what is observed of a call, or of a tool that the call caused to run."""

    name: str = Field(min_length=1)
    """Name of the reward that the rule gives."""
    kind: Literal[
        "tool_ok",
        "tool_error",
        "tool_exception",
        "malformed_arguments",
        "repeated_call",
        "unparsable_output",
        "empty_result",
        "latency",
        "expression",
        "sql",
        "python",
    ]
    """Event that the rule rewards (docs/guides/rewards.md)."""
    reward: float = Field(default=0.0, allow_inf_nan=False)
    """Reward of each call, tool or tool call that the rule matches; for `expression`, `sql` and `python`, the factor of their value."""
    role: str = ""
    """Role (agent or policy) that the reward belongs to. Empty: every role."""
    tools: tuple[str, ...] = ()
    """Tools that count. Required for a rule about tools; ("*",) for all."""
    agents: str | None = None
    """Regular expression of the agents whose calls count. None: all."""
    seconds: float | None = Field(default=None, gt=0)
    """`latency`: duration in seconds above which the rule matches."""
    form: str | None = None
    """`unparsable_output`: a regular expression that the response must match, or `json`."""
    types: str | None = None
    """`tool_exception`: a regular expression that the type of an exception must match in full, such as `Timeout.*|ConnectionError`."""
    where: str | None = None
    """`expression`: a Polars SQL expression over the columns of a call; `sql`: the name of a file in builder.rewards_directory; `python`:
    `module:function` or `file.py:function`, found from the working directory."""
    columns: tuple[str, ...] | None = None
    """`python`: columns that the function gets beside those that identify a call; fewer columns make the query cheaper. None: all."""

    @model_validator(mode="after")
    def _whole(self) -> AirRule:
        """Require the settings that the rule's kind needs, and refuse those that it does not read."""
        subject = f"the rule {self.name!r} of kind {self.kind}"
        if self.kind in TOOL_KINDS and not self.tools:
            raise ValueError(
                f'{subject} names no tools. Name those that count, or tools = ["*"] for all: '
                "a policy learns to call whatever pays without advancing (docs/guides/rewards.md)."
            )
        if self.kind not in TOOL_KINDS and self.tools:
            raise ValueError(f"{subject} applies to calls, not to tools. Leave out tools; agents selects the calls.")
        for name in ("seconds", "form", "types", "where"):
            given, needed = getattr(self, name) is not None, _NEEDS.get(self.kind) == name
            if given != needed:
                raise ValueError(f"{subject} needs {name}. Give it." if needed else f"{subject} does not use {name}. Leave it out.")
        if self.columns is not None and self.kind != "python":
            raise ValueError(f"{subject} does not use columns. Leave it out.")
        if self.reward == 0:
            raise ValueError(f"{subject} gives nothing: its reward is 0. Give reward = -0.1, say, or drop the rule.")
        return self


class BuilderSettings(Section):
    """Settings of the transition builder."""

    dataset: str = "default"
    """Name under which the trainer and exports find what this build specification builds."""
    poll_seconds: float = 0.2
    """Time between two looks of `spangrad build --follow` at a store that does not tell when something arrives, in seconds; longest rest
    after a pass."""
    metrics_address: str | None = Field(default=None, pattern=r"^.+:\d+$")
    """HOST:PORT at which `spangrad build --follow` serves /metrics. None: nowhere."""
    incomplete_after_seconds: float = 600
    """Time limit for missing calls or rewards, in seconds since the rollout's root span, after which the rollout drops. Without a root
    span (the runner was killed): longest silence of the rollout, in seconds."""
    quiet_seconds: float = 30
    """Silence after which a trace without a runner counts as complete, in seconds. A trace that lacks the parent of a span is waited for
    as long as a rollout without its root span."""
    lease_seconds: float = 60
    """Time for which other builders leave alone a rollout that one builder has claimed, in seconds."""
    selection: Selection = Selection()
    """Filter of the calls that become transitions; the others drop as not_selected."""
    rules: tuple[AirRule, ...] = ()
    """Rules of automatic intermediate rewards (AIR)."""
    sql_rewards: tuple[str, ...] = ()
    """Names of SQL rewards, each a file NAME.sql in builder.rewards_directory."""
    rewards_directory: Path = Path("rewards")
    """Directory of SQL files, each of which defines a reward."""
    tokenizer_hash: str | None = None
    """Hash of the only tokenizer whose calls are kept; calls of others drop. None: calls of every tokenizer are kept."""
    max_tokens: int | None = None
    """Largest number of tokens of a call, prompt and response together; longer calls drop. None: no limit."""
    mixed_versions: Literal["keep", "drop"] = "keep"
    """Treatment of calls during which the engine loaded new weights. keep: each response token is trained as sampled by its own version.
    drop: they drop as mixed_versions."""
    retokenized: bool = False
    """True to keep calls whose token ids the gateway computed from their text: without logprobs, as version 0."""
    reshaped: Literal["drop", "keep"] = "drop"
    """Treatment of calls sampled with top-p, top-k, min-p, penalties or masked tokens: `drop`, or `keep` with the logprobs of the
    distribution that was sampled from, for a trainer to correct with the bias that docs/guides/learning.md names."""
    rewards_from: Literal["any", "rules"] = "any"
    """Source of a rollout's reward. `any`: the builder waits for a reward, without which the rollout's calls drop as no_reward. `rules`:
    the rewards of builder.rules and builder.sql_rewards are enough, and where no rule matches the return is 0. Other rewards count as
    well."""
    as_of: datetime | None = None
    """Time up to which spans must have arrived to be built from, as a build specification of its own. None: all spans."""

    @model_validator(mode="after")
    def _rewarded(self) -> BuilderSettings:
        """Refuse rules as the only source of rewards where there are none."""
        if self.rewards_from == "rules" and not self.rules and not self.sql_rewards:
            raise ValueError(
                "rewards_from = 'rules' needs a rule of builder.rules or a name of builder.sql_rewards. Add one, or set 'any'."
            )
        return self

    @property
    def waits_for_reward(self) -> bool:
        """Return whether a rollout is complete only with a reward that is sent: False where SQL, or rules alone, may give it."""
        return self.rewards_from == "any" and not self.sql_rewards

    @property
    def decides(self) -> dict[str, Any]:
        """Return the settings that determine a build's result: SQL rewards and rules with the hashes of their files."""
        decides = self.model_dump(
            mode="json",
            exclude={
                "dataset",
                "poll_seconds",
                "metrics_address",
                "incomplete_after_seconds",
                "quiet_seconds",
                "lease_seconds",
                "rewards_directory",
                "sql_rewards",
            },
        )
        named = (*self.sql_rewards, *(rule.where for rule in self.rules if rule.kind == "sql" and rule.where))
        functions = {rule.where: self.source_hash(rule.where) for rule in self.rules if rule.kind == "python" and rule.where}
        return decides | {"sql_rewards": {name: self.sql_hash(name) for name in named}, "functions": functions}

    @property
    def spec(self) -> str:
        """Return the hash of the settings that determine a build's result: the BuildSpec of its transitions and drops."""
        return hashlib.sha256(json.dumps(self.decides, sort_keys=True).encode()).hexdigest()[:16]

    def sql_hash(self, name: str) -> str:
        """Return the version of an SQL reward: a hash of its file.

        Raises:
            SettingsError: there is no such file.
        """
        file = self.rewards_directory / f"{name}.sql"
        if not file.is_file():
            raise SettingsError(f"the builder's settings name the SQL file {name!r}, but {file} is not there. Write it, or drop the name.")
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]

    def source_hash(self, reference: str) -> str:
        """Return the version of the function that a rule names: a hash of the source file that holds it.

        Raises:
            SettingsError: there is no such file.
        """
        try:
            file = source_file(reference)
        except AgentError as error:
            raise SettingsError(f"builder.rules names the function {reference!r}: {error}") from error
        return hashlib.sha256(file.read_bytes()).hexdigest()[:16]
