"""Settings of the transition builder: which calls it takes, and what they are rewarded for."""

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
    """Which calls: regular expressions, each of which must match a name in full. None: any name."""

    agents: str | None = None
    """Of the agent that made the call."""
    models: str | None = None
    """As the agent asked for it."""
    policies: str | None = None
    """That answered; a call that no policy answered has its model's name."""
    tools: str | None = None
    """Of a tool that the call caused to run; any of them may match."""
    components: str | None = None
    """Of an agent, chain or tool around the call, at any height."""


TOOL_KINDS = frozenset({"tool_ok", "tool_error", "tool_exception", "empty_result", "malformed_arguments", "repeated_call"})
"""Kinds of rules about tools, which name the tools that count."""
_NEEDS = {
    "latency": "seconds",
    "unparsable_output": "form",
    "expression": "where",
    "sql": "where",
    "python": "where",
    "tool_exception": "types",
}
"""Kinds of rules -> the setting that they need beside a name and a reward."""


class AirRule(Section):
    """An automatic intermediate reward: what is seen of a call, or of a tool that it caused to run, is worth something."""

    name: str = Field(min_length=1)
    """Of the reward that it gives."""
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
    reward: float = Field(default=0.0, allow_inf_nan=False)
    """For each call, tool or tool call that the rule finds; for `expression`, `sql` and `python`, what their value is multiplied by."""
    role: str = ""
    """Role (agent or policy) that the reward is of. Empty: everybody's."""
    tools: tuple[str, ...] = ()
    """The tools that count. A rule about tools names them: ("*",) for all."""
    agents: str | None = None
    """Regular expression of the agents whose calls count. None: all."""
    seconds: float | None = Field(default=None, gt=0)
    """`latency`: longer than this."""
    form: str | None = None
    """`unparsable_output`: a regular expression that the response must match, or `json`."""
    types: str | None = None
    """`tool_exception`: a regular expression that the type of an exception must match in full, such as `Timeout.*|ConnectionError`."""
    where: str | None = None
    """`expression`: a Polars SQL expression over the columns of a call; `sql`: the name of a file in builder.rewards_directory; `python`:
    `module:function` or `file.py:function`, found from the working directory."""
    columns: tuple[str, ...] | None = None
    """`python`: the columns that the function gets beside those that identify a call. None: all; fewer save what costs a query."""

    @model_validator(mode="after")
    def _whole(self) -> AirRule:
        """What a kind needs is there, and nothing that it would not look at.

        Raises:
            ValueError: one sentence with the remedy; `load_settings` makes it a SettingsError that says where the rule stands.
        """
        said = f"the rule {self.name!r} of kind {self.kind}"
        if self.kind in TOOL_KINDS and not self.tools:
            raise ValueError(
                f'{said} names no tools. Name those that count, or tools = ["*"] for all: '
                "a policy learns to call whatever pays without advancing (docs/rewards.md)."
            )
        if self.kind not in TOOL_KINDS and self.tools:
            raise ValueError(f"{said} looks at calls, not at tools. Leave out tools; agents chooses whose calls count.")
        for name in ("seconds", "form", "types", "where"):
            given, needed = getattr(self, name) is not None, _NEEDS.get(self.kind) == name
            if given != needed:
                raise ValueError(f"{said} needs {name}. Give it." if needed else f"{said} does not look at {name}. Leave it out.")
        if self.columns is not None and self.kind != "python":
            raise ValueError(f"{said} does not look at columns. Leave it out.")
        if self.reward == 0:
            raise ValueError(f"{said} gives nothing: its reward is 0. Give reward = -0.1, say, or drop the rule.")
        return self


class BuilderSettings(Section):
    """The transition builder."""

    dataset: str = "default"
    """The name under which others find what this specification builds."""
    poll_seconds: float = 0.2
    incomplete_after_seconds: float = 600
    """How long after its root span a rollout may wait for missing calls or rewards before it drops; without one (the runner
    was killed), how long it may be silent."""
    quiet_seconds: float = 30
    """How long a trace without a runner must be silent before it counts as complete. One that lacks a parent of some span is
    waited for as long as a rollout without its root."""
    lease_seconds: float = 60
    """How long a rollout that one builder has claimed is left alone by others."""
    selection: Selection = Selection()
    """The calls that become transitions; the others drop as not_selected."""
    rules: tuple[AirRule, ...] = ()
    """AIR."""
    sql_rewards: tuple[str, ...] = ()
    """Names of files NAME.sql in rewards_directory."""
    rewards_directory: Path = Path("rewards")
    tokenizer_hash: str | None = None
    """Drop calls of any other tokenizer. None: take every tokenizer's."""
    max_tokens: int | None = None
    """Drop calls of more tokens, prompt and response together. None: of any length."""
    mixed_versions: Literal["keep", "drop"] = "keep"
    """Calls during which the engine took new weights. keep: each response token is trained as sampled by its own version. drop: drop them
    as mixed_versions."""
    retokenized: bool = False
    """Keep calls whose token ids the gateway made from their text: without logprobs, as version 0."""
    reshaped: Literal["drop", "keep"] = "drop"
    """Calls sampled with top-p, top-k, min-p, penalties or masked tokens: `drop` them, or `keep` them with the logprobs of the distribution
    that was sampled from, for a trainer to correct with the bias that docs/learning.md names."""
    rewards_from: Literal["any", "rules"] = "any"
    """What rewards a rollout: `any` waits for a reward by somebody, without which its calls drop as no_reward; with `rules`, what
    builder.rules and builder.sql_rewards give is enough, and where no rule finds anything the return is 0. Other rewards count beside."""
    as_of: datetime | None = None
    """Build from the spans that had arrived by then, as a specification of its own. None: from all."""

    @model_validator(mode="after")
    def _rewarded(self) -> BuilderSettings:
        """Refuse rules as the only reward where there are none.

        Raises:
            ValueError: one sentence with the remedy.
        """
        if self.rewards_from == "rules" and not self.rules and not self.sql_rewards:
            raise ValueError(
                "rewards_from = 'rules' needs a rule of builder.rules or a name of builder.sql_rewards. Add one, or set 'any'."
            )
        return self

    @property
    def waits_for_reward(self) -> bool:
        """Whether a rollout is complete only with a reward that somebody sends: not where SQL, or rules alone, may give it."""
        return self.rewards_from == "any" and not self.sql_rewards

    @property
    def decides(self) -> dict[str, Any]:
        """Return what decides a build's result: SQL rewards and rules with the hashes of their files."""
        decides = self.model_dump(
            mode="json",
            exclude={
                "dataset",
                "poll_seconds",
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
        """Hash of what decides a build's result: the BuildSpec of its transitions and drops."""
        return hashlib.sha256(json.dumps(self.decides, sort_keys=True).encode()).hexdigest()[:16]

    def sql_hash(self, name: str) -> str:
        """Hash of a reward's SQL, its version.

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
