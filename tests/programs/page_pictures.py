"""Pictures of the page for docs: views of a small training run in a store of their own, as PNG files below docs/images/.

`make pictures` writes them; `tests/integration/test_page_pictures.py` compares. Invariant: the same code gives the same views, but for
fonts and the time since a build.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Callable, Generator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from playwright.sync_api import Browser

from spangrad.client.queue_http import QueueHttp
from spangrad.http.queue_messages import new_rollout
from spangrad.settings import EngineSettings, Settings, StoreSettings
from spangrad.store.clickhouse import connect
from spangrad.types import call_id
from spangrad.weights.checksums import tokenizer_hash
from tests.support.built_rollouts import post, settings_of
from tests.support.pages import Visitor, browsers, queue_beside, running_page, write_tokenizer
from tests.support.servers import running_store, store_settings
from tests.support.spans import SpanFactory
from transition_builder.loop import build_once

ROOT = Path(__file__).parents[2]
IMAGES = ROOT / "docs" / "images"
GOLDEN = ROOT / "tests" / "golden" / "page"
"""Pictures that docs do not show, at half their size, in a folder a colour scheme."""
SIZE = {"width": 1200, "height": 760}
RUN, POLICY = "cities", "policy"
VERSIONS = 24
CITIES = ("rome", "oslo", "paris", "lima", "cairo", "quito")
GROUP_SIZE = 4
STEPS = 8
"""Number of newest steps that the trainer sent spans of."""
EARLIER = VERSIONS - STEPS
"""Version that the comparison has on the left."""
STAGES = {"idle": 3.0, "load": 1.0, "credit": 0.5, "train": 12.0, "checkpoint": 2.0, "publish": 0.5}
"""Stage of a step -> its seconds."""
FAILED = "rome-1"
"""A rollout that failed, and that version 24 was trained on."""
_COLUMNS, _ROWS = 24, 15
"""Grid in which two pictures are compared: cells of 50 pixels."""


class TrainingPictures:
    """A training run of 24 versions and the rollouts of its last step, in a store."""

    def __init__(self, store: StoreSettings, model: Path) -> None:
        """Put everything into the store, built; `model` becomes the directory of a tokenizer."""
        write_tokenizer(model)
        self.settings: Settings = settings_of(store, RUN).model_copy(update={"engine": EngineSettings(model=model)})
        self.spans = SpanFactory(run=RUN)
        self._hash = tokenizer_hash(model)
        self._chance = random.Random(7)
        self._calls: dict[str, list[str]] = {}
        for city in CITIES:
            for number in range(GROUP_SIZE):
                self._rollout(city, number)
        for version in range(VERSIONS - STEPS + 1, VERSIONS + 1):
            self._step(version)
        post(store, self.spans.otlp())
        build_once(self.settings)
        with connect(store) as client:
            for table, rows in (
                ("policy_versions", self._versions()),
                ("batches", self._batch()),
                ("trained_calls", self._trained()),
                ("builds", self._held_out()),
            ):
                client.insert(f"spangrad_internal.{table}", [list(row.values()) for row in rows], column_names=list(rows[0]))

    @property
    def views(self) -> dict[str, str]:
        """Name of each picture -> path of its view."""
        trace, span = self.spans.trace(f"{RUN}.{FAILED}.0"), self._calls[FAILED][1]
        return {
            "page-overview": "/",
            "page-rollouts": "/rollouts",
            "page-rollout": f"/rollout?id={FAILED}",
            "page-call": f"/call?rollout={FAILED}&trace={trace}&span={span}&choice=0",
            "page-version": f"/version?policy={POLICY}&branch=main&version={VERSIONS}",
        }

    @property
    def other_views(self) -> dict[str, str]:
        """Name of each picture that docs do not show -> path of its view."""
        return {
            "page-training": "/training",
            "page-beside": f"/beside?run={RUN}&group={CITIES[0]}",
            "page-compare": f"/compare?policy={POLICY}&left={EARLIER}&right={VERSIONS - 1}",
            "page-queue": "/queue?order=oldest",
            "page-actions": "/actions",
            "page-play": "/play",
        }

    @contextmanager
    def page(self, directory: Path) -> Generator[str]:
        """Serve the page with an environment to play, beside a queue of a few rollouts; yield its URL."""
        nim = {"environment": "nim:Nim", "directory": str(ROOT / "tests" / "agents")}
        runner = Settings.model_validate({"runner": {"handlers": {"nim": nim}}}).runner
        with queue_beside(directory) as queue:
            client = QueueHttp(queue.url or "", None, RUN)
            client.enqueue([new_rollout(city, city, city, rollout_id=f"{city}-next", max_attempts=1) for city in CITIES])
            (lease,) = client.ask("POST", "/v1/leases", {"run_id": RUN, "worker": "worker-1"})["leases"]
            failure = {"rollout_id": lease["rollout_id"], "attempt": lease["attempt"], "reason": "exception"}
            client.ask("POST", "/v1/leases/fail", {"failures": [failure]})
            with running_page(self.settings.model_copy(update={"queue": queue, "runner": runner})) as url:
                yield url

    def _rollout(self, city: str, number: int) -> None:
        """Add a rollout of two calls with a tool between them; of each group one or two fail."""
        rollout, spans, failed = f"{city}-{number}", self.spans, number == 1 or (number == 3 and city in CITIES[:2])
        root = spans.root(
            rollout, calls=2, GroupId=city, TaskId=f"weather in {city}", GroupSize=GROUP_SIZE, failure="timeout" if failed else ""
        )
        spans.spans[-1]["Duration"] = 9_000_000_000
        spans.evaluation(root, 0.0 if failed else 1.0)
        question = [{"role": "system", "content": "You answer questions on the weather."}, {"role": "user", "content": f"How is {city}?"}]
        asked = {"id": "t1", "type": "function", "function": {"name": "forecast", "arguments": json.dumps({"city": city})}}
        asks = {"role": "assistant", "content": "", "tool_calls": [asked]}
        first = self._call(root, rollout, question, asks, [5, 6, 7], [8, 9, 10])
        outcome: dict[str, Any] = {"status": "Error", "StatusMessage": "no forecast within 5 s"} if failed else {}
        result = "timed out" if failed else "sunny, 24 degrees"
        tool = {"input.value": json.dumps({"city": city}), "output.value": result, "tool.name": "forecast"}
        spans.span("forecast", root, rollout=rollout, kind="TOOL", Duration=2_000_000_000, Attributes=tool, **outcome)
        later = [*question, asks, {"role": "tool", "tool_call_id": "t1", "content": result}]
        reply = {"role": "assistant", "content": "I could not find out." if failed else f"It is sunny in {city}."}
        second = self._call(root, rollout, later, reply, [5, 6, 7, 8, 9, 10, 4], [11, 12, 13, 1, 2, 3])
        self._calls[rollout] = [first, second]

    def _call(self, root: str, rollout: str, messages: list[Any], reply: dict[str, Any], prompt: list[int], response: list[int]) -> str:
        logprobs = [-3 * self._chance.random() ** 3 for _ in response]
        facts: dict[str, Any] = {"PromptIds": prompt, "ResponseIds": response, "Logprobs": logprobs, "Temperature": 1.0}
        facts |= {"TokenizerHash": self._hash, "Versions.Start": [0], "Versions.Version": [VERSIONS - 1]}
        span = self.spans.call(self.spans.client(root, rollout=rollout), rollout=rollout, **facts)
        answer = {"choices": [{"index": 0, "message": reply, "finish_reason": "stop"}]}
        self.spans.spans[-1]["Attributes"] = {
            "spangrad.request.json": json.dumps({"model": POLICY, "messages": messages}),
            "spangrad.response.json": json.dumps(answer),
            "spangrad.backend.name": f"engine-{len(response) % 2}",
        }
        self.spans.spans[-1]["Duration"] = 1_500_000_000
        return span

    def _step(self, version: int) -> None:
        """Add the spans of a training step."""
        begin = (version - VERSIONS + STEPS - 1) * (sum(STAGES.values()) + 1)
        own: dict[str, Any] = {"RolloutKeySource": "trace", "scope": "spangrad.trainer", "service": "spangrad-trainer"}
        own["trace"] = f"step-{version}"
        names = {"policy.name": POLICY, "trainer.branch": "main", "trainer.version": str(version)}
        facts: dict[str, Any] = {"Timestamp": self.spans.time(begin), "Duration": int(sum(STAGES.values()) * 1e9)}
        step = self.spans.span("train step", "", **own, **facts, Attributes={f"spangrad.{name}": value for name, value in names.items()})
        for stage, seconds in STAGES.items():
            self.spans.span(stage, step, **own, Timestamp=self.spans.time(begin), Duration=int(seconds * 1e9))
            begin += seconds

    def _versions(self) -> list[dict[str, Any]]:
        return [
            {
                **_of(version), "RunId": RUN, "Mode": "train", "BatchId": f"batch-{version}" if version else "",
                "Parent": version - 1 if version else None, "ParentBranch": "main", "Checksum": f"{version:016x}", "Status": "committed",
                "Metrics": self._metrics(version) if version else {},
                "IngestedAt": datetime(2026, 1, 1, tzinfo=UTC) + timedelta(minutes=version),
            }
            for version in range(VERSIONS + 1)
        ]  # fmt: skip

    def _metrics(self, version: int) -> dict[str, float]:
        learned, noise = 1 - math.exp(-version / 8), self._chance.gauss(0, 0.02)
        return {
            "mean_return": 0.2 + 0.7 * learned + noise, "success": 0.15 + 0.75 * learned + noise, "groups": len(CITIES),
            "rollouts": len(CITIES) * GROUP_SIZE, "grad_norm": 0.8 - 0.5 * learned + noise, "ppo_kl": 0.004 + noise / 20,
            "staleness_mean": version % 3 / 2, "logprob_gap_mean": 0.002 + abs(noise) / 20, "logprob_gap_p99": 0.02 + abs(noise) / 4,
            "entropy": 1.4 - learned, "clip_low": 0.01, "clip_high": 0.02 + noise / 4, "seconds_train": 12 + noise * 9,
            "seconds_publish": 1, "seconds_idle": 4 - learned, "seconds_step": 18, "engine_idle": 0.3 - 0.1 * learned,
        }  # fmt: skip

    def _batch(self) -> list[dict[str, Any]]:
        return [{**_of(VERSIONS), **self._of_rollout(city, number), "Revision": 0} for city in CITIES for number in range(GROUP_SIZE)]

    def _held_out(self) -> list[dict[str, Any]]:
        """Return builds of held-out rollouts by two versions, of which the later fails less."""
        return [
            {
                "RunId": RUN, "Mode": "validate", "BuildSpec": self.settings.builder.spec, "TaskId": f"weather in {city}", "Content": 1,
                "RolloutId": f"{city}-held-out-{version}", "PolicyVersions": [version], "Calls": 2, "Transitions": 2,
                "RewardTotals.Name": ["reward"], "RewardTotals.Value": [float(version != EARLIER or number % 2)],
                "IngestedAt": datetime(2026, 1, 1, tzinfo=UTC),
            }
            for version in (EARLIER, VERSIONS - 1)
            for number, city in enumerate(CITIES)
        ]  # fmt: skip

    def _trained(self) -> list[dict[str, Any]]:
        rows = list[dict[str, Any]]()
        for city in CITIES:
            for number in range(GROUP_SIZE):
                rollout = f"{city}-{number}"
                trace, failed = self.spans.trace(f"{RUN}.{rollout}.0"), _fails(city, number)
                rows += [
                    {
                        **_of(VERSIONS), **self._of_rollout(city, number), "TaskId": f"weather in {city}", "Turn": turn, "TraceId": trace,
                        "SpanId": span, "CallId": call_id(trace, span, 0), "SampledVersions": [VERSIONS - 1], "Staleness": 0,
                        "OutputTokens": 6, "Return": 0.0 if failed else 1.0, "Advantage": -0.75 if failed else 0.25,
                    }
                    for turn, span in enumerate(self._calls[rollout])
                ]  # fmt: skip
        return rows

    def _of_rollout(self, city: str, number: int) -> dict[str, Any]:
        named = {"RunId": RUN, "Mode": "train", "BuildSpec": self.settings.builder.spec, "GroupId": city, "RolloutId": f"{city}-{number}"}
        return {**named, "BatchId": f"batch-{VERSIONS}"}


def _fails(city: str, number: int) -> bool:
    return number == 1 or (number == 3 and city in CITIES[:2])


def _of(version: int) -> dict[str, Any]:
    return {"Policy": POLICY, "Branch": "main", "Version": version}


GOLDEN_VIEWS: dict[str, Callable[[TrainingPictures], dict[str, str]]] = {
    "light": lambda pictures: pictures.other_views,
    "dark": lambda pictures: {**pictures.views, **pictures.other_views},
}
"""Colour scheme -> function that returns the views whose golden pictures have it."""


def shoot(browser: Browser, url: str, views: dict[str, str], directory: Path, scheme: str = "light") -> None:
    """Write a picture of each view, in light or dark, into a directory."""
    visitor = Visitor(browser, url, viewport=SIZE, color_scheme=scheme, reduced_motion="reduce")
    for name, path in views.items():
        page = visitor.open(path)
        page.mouse.move(0, 0)
        page.wait_for_timeout(300)  # curves are drawn after the document
        page.screenshot(path=str(directory / f"{name}.png"))
    visitor.close()


def difference(left: Path, right: Path) -> float:
    """Return the mean difference of two pictures of one size, in cells of 50 pixels, on a scale from 0 to 1.

    Other fonts move strokes within a cell or into the next; a broken layout changes what most cells hold.
    """
    left_cells, right_cells = (_cells(path) for path in (left, right))
    return float(np.abs(left_cells - right_cells).mean())


def _cells(path: Path) -> NDArray[np.float64]:
    image = Image.open(path).convert("L").resize((_COLUMNS, _ROWS), Image.Resampling.BOX)
    return np.asarray(image, np.float64) / 255


@contextmanager
def _store() -> Generator[tuple[StoreSettings, Path]]:
    with TemporaryDirectory() as scratch:
        directory = Path(scratch)
        settings = store_settings(directory / "data")
        with running_store(settings, directory / "store.log"):
            yield settings, directory


def main() -> None:
    """Write the pictures into docs/images/ and tests/golden/page/."""
    with _store() as (store, directory):
        (directory / "model").mkdir()
        (directory / "pictures").mkdir()
        pictures = TrainingPictures(store, directory / "model")
        with pictures.page(directory) as url:
            for browser in browsers():
                shoot(browser, url, pictures.views, directory / "pictures")
                for scheme, views in GOLDEN_VIEWS.items():
                    (directory / scheme).mkdir()
                    shoot(browser, url, views(pictures), directory / scheme, scheme)
        for file in sorted((directory / "pictures").iterdir()):
            _keep(Image.open(file).quantize(64), IMAGES / file.name)
        for scheme in GOLDEN_VIEWS:
            for file in sorted((directory / scheme).iterdir()):
                image = Image.open(file).convert("RGB")
                _keep(image.resize((image.width // 2, image.height // 2)).quantize(16), GOLDEN / scheme / file.name)


def _keep(image: Image.Image, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    image.save(path, optimize=True)
    print(path.relative_to(ROOT), f"{path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
