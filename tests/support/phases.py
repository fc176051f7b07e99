"""Two policies that are trained in phases: trainers over one ledger, with a fake store, optimizer and gateway."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import polars as pl

from spangrad.settings import Settings
from tests.support.policies import trainer_settings, transition_row
from tests.support.trainers import FakeMirror, FakePublisher, FakeSource, begun
from trainer.data.source import BatchRollout, Group, GroupState, Loaded
from trainer.ledger.recovery import open_ledger, prepare
from trainer.loop import Trainer

PLAYERS = ("black", "white")
GROUPS = 2


class MatchSource(FakeSource):
    """Groups of two matches; each policy has a call in each, of the version that it had when the group was played."""

    def __init__(self) -> None:
        super().__init__([])
        self.tokenizer = ""
        self.played: dict[str, dict[str, int]] = {}

    def play(self, name: str, versions: dict[str, int]) -> None:
        self.names.append(name)
        self.played[name] = versions

    def states(self) -> list[GroupState]:
        return [GroupState(group, 2, 2) for group in self.ready()]

    def unbuilt(self) -> int:
        return 0

    def load(self, groups: Iterable[Group]) -> Loaded:
        rollouts = [(group, f"{group.group_id}-{i}", float(i)) for group in groups for i in range(2)]
        rows = [
            transition_row(
                rollout,
                turn,
                rewards=(reward,),
                GroupId=group.group_id,
                BuildSpec=self.build_spec,
                Policy=policy,
                Version=version,
                TokenizerHash=self.tokenizer,
                TransitionId=f"{rollout}-{policy}",
            )
            for group, rollout, reward in rollouts
            for turn, (policy, version) in enumerate(self.played[group.group_id].items())
        ]
        return Loaded([BatchRollout(group, rollout, 0, 0) for group, rollout, _ in rollouts], pl.DataFrame(rows))


class PhaseTable:
    """Two policies in one ledger, whose trainers may die; what is served is in files."""

    def __init__(self, base: Path, directory: Path) -> None:
        """Start both, or start them again.

        Args:
            base: model directory that both begin with.
            directory: of their checkpoints, their ledger and what is served.
        """
        self.base, self.directory = base, directory
        self.trainers: dict[str, Trainer] = {}
        self.source = MatchSource()
        directory.mkdir(exist_ok=True)
        for policy in PLAYERS:
            file = self._served(policy)
            if not file.exists():
                file.write_text("[0]")
            self.start(policy)

    def start(self, policy: str) -> Trainer:
        chosen = Settings(
            trainer=trainer_settings(
                run_id="run",
                policy=policy,
                phase_policies=tuple(other for other in PLAYERS if other != policy),
                model=self.base,
                directory=self.directory,
                groups_per_batch=GROUPS,
                poll_seconds=0.001,
            )
        )
        ledger = open_ledger(chosen)
        self.source.tokenizer = prepare(ledger, chosen).tokenizer_hash
        self.trainers[policy] = begun(chosen, ledger, self.source, FakeMirror(ledger), FakePublisher(self._served(policy)), None)
        return self.trainers[policy]

    def kill(self, policy: str) -> None:
        """Forget a trainer, as a killed process does."""
        trainer = self.trainers.pop(policy)
        trainer.phases.close()
        trainer.ledger.close()

    def served(self) -> dict[str, int]:
        return {policy: json.loads(self._served(policy).read_text())[-1] for policy in PLAYERS}

    def _served(self, policy: str) -> Path:
        return self.directory / f"{policy}-served.json"

    def play(self, *names: str) -> None:
        for name in names:
            self.source.play(name, self.served())

    def turn(self, policy: str) -> bool:
        """One look of a trainer; return whether it made a step."""
        trainer = self.trainers[policy]
        loaded = trainer.take() if trainer.phases.advance(trainer._publish_again) else None
        return bool(loaded and trainer.step(loaded))

    def heads(self) -> dict[str, int]:
        return {policy: trainer.branch.head().version for policy, trainer in self.trainers.items()}
