"""Files of examples, and a run over files whose optimizer is a fake: everything else of it is real."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from crash import crashes, survives
from numpy.typing import NDArray
from sections import trainer_settings

from examples.two_tools.model import WORDS, word_tokenizer
from spangrad.settings import FinetuneSettings, Settings, StoreSettings
from trainer.ledger.ledger import Ledger
from trainer.publish.checkpoint import STATE, save_weights
from trainer.sft import training
from trainer.sft.examples import Example
from trainer.sft.files import ExampleFile
from trainer.sft.rendering import TokenSequence
from trainer.sft.training import FileRun, FileTrainPlan, finetune

NOBODY = StoreSettings(url="http://127.0.0.1:9")
"""A store that is away: a run over files needs none."""


def write_policy(directory: Path, **config: Any) -> Path:
    """A model directory with the two-tools tokenizer, one weight and a configuration."""
    from safetensors.numpy import save_file

    directory.mkdir()
    word_tokenizer(WORDS).save_pretrained(directory)
    facts = {"vocab_size": len(WORDS), "max_position_embeddings": 24, **config}
    (directory / "config.json").write_text(json.dumps({name: value for name, value in facts.items() if value is not None}))
    save_file({"weight": np.zeros(1, np.float32)}, directory / "model.safetensors")
    return directory


def write_rows(file: Path, rows: Sequence[Any]) -> Path:
    """A JSON lines file."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def meta(rollout: str, group: str = "g", *, mode: str = "train", **changes: Any) -> dict[str, Any]:
    """What exports say of a row."""
    about = {"run": "run", "mode": mode, "group": group, "rollout": rollout, "attempt": 0, "build_spec": "spec", "revision": 0}
    return {"meta": {**about, **changes}}


def tokens(*ids: int, reply: int = 1, **more: Any) -> dict[str, Any]:
    """A row with ids, the last of which are trained."""
    return {"input_ids": list(ids), "loss_mask": [0] * (len(ids) - reply) + [1] * reply, **more}


@dataclass
class FakeFileOptimizer:
    """Adds the first id of each trained row to its only weight: what was trained twice, or not at all, shows."""

    weight: float = 0.0
    device: str = "cpu"
    reference: NDArray[np.float32] | None = None
    steps: list[list[int]] = field(default_factory=list)
    fails_at: int | None = None

    def step(self, examples: Sequence[Example], reference: NDArray[np.float32] | None = None) -> dict[str, float]:
        self.steps.append([one.sequences[0].ids[0] for one in examples])
        if self.fails_at == len(self.steps):
            raise RuntimeError("the machine caught fire")
        self.weight += sum(self.steps[-1])
        return {"loss": 0.5, "grad_norm": 1.0, "tokens": float(len(examples))}

    def logprobs(self, examples: Sequence[Example]) -> NDArray[np.float32]:
        return np.zeros(sum(len(one.sequences) for one in examples), np.float32)

    def measure(self, examples: Sequence[Example], reference: NDArray[np.float32] | None) -> dict[str, float]:
        return {"loss": 1.0 / (1.0 + self.weight)} if examples else {}

    def save_weights(self, directory: Path) -> None:
        save_weights(directory, [("weight", np.array([self.weight], np.float32))])

    def save_state(self, directory: Path) -> None:
        (directory / STATE).write_text(str(self.weight))

    def close(self) -> None:
        """Nothing is open."""


def with_fakes(*, fails_at: int | None = None) -> list[FakeFileOptimizer]:
    """Have runs make fakes from here on, each with its base's weight; the list of those that were made."""
    made: list[FakeFileOptimizer] = []

    def fake(_: Any, plan: FileTrainPlan) -> FakeFileOptimizer:
        from safetensors.numpy import load_file

        directory = Path(plan.base.policy_version.path)
        weight = float(load_file(directory / "model.safetensors")["weight"][0])
        assert not plan.at or float((directory / STATE).read_text()) == weight, "a run goes on from its own state"
        made.append(FakeFileOptimizer(weight, fails_at=fails_at))
        return made[-1]

    training._Run._optimizer = fake  # type: ignore[assignment, method-assign]
    training._store = lambda _: None  # a store that is away, without asking
    return made


def settings(base: Path, directory: Path, store: StoreSettings = NOBODY, **changes: Any) -> Settings:
    """Of a run of three epochs of two steps; `trainer` changes that section."""
    trainer = {"run_id": "run", "model": base, "directory": directory, "publish": False, "traces": False, **changes.pop("trainer", {})}
    facts = {"epochs": 3, "batch_size": 2, "held_out": 0.0, **changes}
    return Settings(store=store, trainer=trainer_settings(**trainer), finetune=FinetuneSettings(**facts))


def finetuned(chosen: Settings, *files: Path, method: Any = "sft", **options: Any) -> FileRun:
    """A run that nothing stopped."""
    done = finetune(chosen, method, files, **options)
    assert done
    return done


def ledger_of(chosen: Settings) -> Ledger:
    return Ledger(chosen.trainer.directory, chosen.trainer.policy, chosen.trainer.branch)


def weight_of(chosen: Settings) -> float:
    """Of the branch's head."""
    from safetensors.numpy import load_file

    head = ledger_of(chosen).frontier()
    assert head
    return float(load_file(Path(head.policy_version.path) / "model.safetensors")["weight"][0])


def example(*sequences: tuple[list[int], list[int]]) -> Example:
    return Example(tuple(TokenSequence(ids, mask) for ids, mask in sequences), "unit", ExampleFile(Path("f"), "00", 1), ())


PROMPT = [1, 4, 7, 11, 2, 1, 5]
REPLY = [0] * 7
EXAMPLES = [
    example(([*PROMPT, 9, 11, 2], [*REPLY, 1, 1, 1])),
    example(([*PROMPT, 10, 12, 2, 1, 6, 8, 2, 1, 5, 9, 2], [*REPLY, 1, 1, 1, *[0] * 6, 1, 1])),
    example(([*PROMPT, 10], [*REPLY, 1])),
]
"""Of different lengths; the second one has two replies, and an observation between them."""
PAIRS = [
    example(([*PROMPT, 9, 11, 2], [*REPLY, 1, 1, 1]), ([*PROMPT, 10, 11, 2, 1, 6, 8, 2, 1, 5, 9, 2], [*REPLY, 1, 1, 1, *[0] * 6, 1, 1])),
    example(([*PROMPT, 10, 12], [*REPLY, 1, 1]), ([*PROMPT, 9], [*REPLY, 1])),
    example(([*PROMPT, 14], [*REPLY, 1]), ([*PROMPT, 13, 2], [*REPLY, 1, 1])),
]
"""Replies of several lengths; the first pair's rejected one has two turns."""


ROWS = [tokens(one, 2, **meta(f"r{one}", f"g{one}")) for one in (3, 5, 7, 9)]
WHOLE = 3 * (3 + 5 + 7 + 9)
"""The weight once three epochs of ROWS are trained."""


def die_at_every_boundary(base: Path, directory: Path) -> int:
    """Run over files, dying at one boundary after the other and going on from there; return how many deaths there were.

    This process only forks: Polars starts threads, which do not survive a fork.
    """
    file = write_rows(directory / "rows.jsonl", ROWS)

    def train(boundary: int) -> None:
        with_fakes()
        finetuned(settings(base, directory / str(boundary), epochs=2), file)

    def go_on(boundary: int) -> None:
        chosen = settings(base, directory / str(boundary), epochs=2)
        with_fakes()
        finetuned(chosen, file)
        ledger = ledger_of(chosen)
        committed = ledger.committed_versions()
        assert len(committed) == 3, "two epochs and what they began with"
        assert weight_of(chosen) == WHOLE * 2 / 3, "an epoch was repeated or skipped"
        here = {one.name for one in (chosen.trainer.directory / "policy/main").iterdir()}
        assert here == {f"v{version}" for version in committed[1:]}, "an uncommitted version was left"
        batches = [one.policy_version.batch_id for one in ledger.versions() if one.version in committed[1:]]
        assert [len(ledger.batch(batch or "")) for batch in batches] == [4, 4]

    deaths = 0
    for boundary in crashes(train, Path(training.__file__), {"_versions", "_version", "_lease"}):
        deaths += 1
        survives(go_on, boundary)
    return deaths


if __name__ == "__main__":
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    print(die_at_every_boundary(Path(sys.argv[1]), Path(sys.argv[2])))
