"""Weights of one version that are offered to engines, on the ranks that have their parts.

In: the source of a version's weights. Out: sums by tensor, and the plan by which workers fetch words from ranks. Invariant: whatever the
number of ranks, sums are those of whole tensors; no tensor is gathered for them.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from spangrad.errors import TrainerError
from spangrad.http.json_http import ask
from spangrad.http.service import RemoteService
from spangrad.weights.shards import MASK, ChecksumScope, TensorSums, added
from trainer.publish.rank_sender import RankAddress

_SECONDS = 600.0
"""Time limit of a rank's answer, in seconds: it copies or sums its share."""
Weights = Callable[[], Iterator[tuple[str, NDArray[np.float32]]]]
"""Function that yields each parameter by its Hugging Face name."""


@dataclass(frozen=True, slots=True)
class WeightSource:
    """Weights of a version in memory or in files; functions are called once the weights are asked for."""

    arrays: Weights
    """Yields whole parameters."""
    ranks: Callable[[], Sequence[RankAddress]]
    """Returns the senders of all ranks that hold parts of the parameters."""
    directory: Path | None = None
    """Directory of the version's files, of which each rank reads its share. None: ranks have the parameters in memory."""
    version: int | None = None
    """Version of the weights in memory, which may not be the head. None: the weights are those of the version that is published."""


class WeightsOffer:
    """Weights of one version that are offered to engines, whole or in the parts that ranks hold."""

    def __init__(self, source: WeightSource, *, delta: bool) -> None:
        """Offer a version; with `delta`, ranks send differences from the version that was offered before."""
        self._source, self._delta = source, delta
        self._gathering = threading.Lock()
        self._named: dict[str, NDArray[np.float32]] | None = None
        self._ranks: Sequence[RankAddress] = ()
        self._key = secrets.token_urlsafe(24)
        self._lock = threading.Lock()
        self._plans: dict[str, dict[str, Any]] = {}
        """Plans by dtype, of which the ranks have copies."""
        self._sums: dict[tuple[str, frozenset[tuple[str, str]], ChecksumScope], dict[str, TensorSums]] = {}
        self._whole: int | None = None

    def named(self) -> dict[str, NDArray[np.float32]]:
        """Return whole parameters by name, gathered once."""
        with self._gathering:
            if self._named is None:
                self._named = dict(self._source.arrays())
            return self._named

    def plan(self, dtype: str) -> dict[str, Any]:
        """Return the plan by which a worker fetches words; at first, have the ranks copy them.

        Raises:
            TrainerError: a rank does not answer, or weights of this dtype are not sent.
        """
        with self._lock:
            if dtype not in self._plans:
                self._ranks = self._ranks or self._source.ranks()
                version, directory = secrets.token_hex(8), str(self._source.directory or "")
                facts = {"version": version, "dtype": dtype, "key": self._key, "delta": self._delta, "directory": directory}
                answers = self._ask("/versions", facts)
                self._plans[dtype] = {"version": version, "key": self._key, "dtype": dtype, **_joined(self._ranks, answers)}
            return self._plans[dtype]

    def sums(self, dtype: str, others: Mapping[str, str], scope: ChecksumScope) -> dict[str, Any]:
        """Return the sums of each tensor as an engine holds it, and the sum of all words in float32; engines of a kind share the work.

        Raises:
            TrainerError: as for `plan`.
        """
        self.plan(dtype)
        with self._lock:
            key = dtype, frozenset(others.items()), scope
            if key not in self._sums:
                answers = self._ask("/sums", {"dtype": dtype, "others": dict(others), "scope": scope})
                shards = ((name, sums) for answer in answers for name, sums in answer["tensors"].items())
                self._sums[key] = added((name, msgspec.convert(sums, TensorSums)) for name, sums in shards)
            if scope is ChecksumScope.FULL and self._whole is None:
                self._whole = sum(int(answer["sum"]) for answer in self._ask("/whole", {})) & MASK
            whole = f"float32:{self._whole:016x}" if scope is ChecksumScope.FULL else ""
            return {"tensors": {name: msgspec.structs.asdict(each) for name, each in self._sums[key].items()}, "whole": whole}

    def end(self) -> dict[str, int]:
        """Send no more; return the bytes that were sent as words (`full`) and as differences (`delta`)."""
        with self._lock:
            answers = self._ask("/end", {"keep": self._delta}) if self._ranks else []
        return {kind: sum(int(answer[kind]) for answer in answers) for kind in ("full", "delta")}

    def _ask(self, path: str, body: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Ask all ranks at once: what one of them does may wait for the others."""

        def ask_rank(rank: RankAddress) -> dict[str, Any]:
            name, remedy = f"the trainer's rank at {rank.url}", "Start `spangrad train` again, if it has ended."
            return ask(RemoteService(name, rank.url, rank.token, TrainerError, remedy), "POST", path, body, seconds=_SECONDS)

        with ThreadPoolExecutor(len(self._ranks), "asks ranks") as threads:
            return list(threads.map(ask_rank, self._ranks))


def _joined(ranks: Sequence[RankAddress], answers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the part of a plan that says which rank has which words; tensors are numbered once for all."""
    shapes: dict[str, Sequence[int]] = {}
    for answer in answers:
        shapes |= {name: shape for name, shape, _, _ in answer["parts"]}
    number = {name: place for place, name in enumerate(shapes)}
    parts = [[(number[name], first, words) for name, _, first, words in answer["parts"]] for answer in answers]
    bases = {answer["base"] for answer in answers}
    return {
        "names": list(shapes),
        "shapes": [list(shape) for shape in shapes.values()],
        "ranks": [{"url": rank.url, "parts": own} for rank, own in zip(ranks, parts, strict=True)],
        "base": bases.pop() if len(bases) == 1 else "",
    }
