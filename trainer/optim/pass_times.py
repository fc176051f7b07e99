"""Times of forward and backward passes of a rank: by events of the GPU's stream where there is one, so that nothing waits for it.

Invariant: timing changes no pass, and adds no synchronisation before `take`.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from functools import wraps
from typing import Any

import torch


class PassTimes:
    """Timer of the passes of one step, from `begin` to `take`: other passes, as those over files, are not kept."""

    def __init__(self, device: str) -> None:
        self._on_gpu = device != "cpu"
        self._recording = False
        self._forward: list[tuple[Any, Any]] = []
        """Begin and end of each forward pass that a backward pass follows: seconds, or events of the stream."""
        self._both: list[tuple[Any, Any]] = []
        """Begin and end of each run of micro-batches that are passed forward and backward."""
        self._outside: list[tuple[Any, Any]] = []
        """Forward passes outside such runs."""
        self._backward_follows = False

    def begin(self) -> None:
        """Begin a step; what is left of one that was refused is forgotten."""
        self._recording = True
        self._forward, self._outside, self._both = [], [], []

    def watch(self, engine: Any) -> None:
        """Time every forward pass of verl's engine."""
        forward_step = engine.forward_step

        @wraps(forward_step)
        def timed(*arguments: Any, **options: Any) -> Any:
            if not self._recording:
                return forward_step(*arguments, **options)
            began = self._now()
            result = forward_step(*arguments, **options)
            (self._forward if self._backward_follows else self._outside).append((began, self._now()))
            return result

        engine.forward_step = timed

    @contextmanager
    def forward_and_backward(self) -> Generator[None]:
        """Time a run of micro-batches."""
        if not self._recording:
            yield
            return
        began, self._backward_follows = self._now(), True
        try:
            yield
        finally:
            self._backward_follows = False
        self._both.append((began, self._now()))

    def take(self) -> dict[str, float]:
        """End the step, and return its metrics: seconds_forward and seconds_backward."""
        if self._on_gpu:
            torch.cuda.synchronize()
        within, outside, both = (sum(map(self._seconds, times)) for times in (self._forward, self._outside, self._both))
        self._recording = False
        return {"seconds_forward": within + outside, "seconds_backward": max(both - within, 0.0)}

    def _now(self) -> Any:
        if not self._on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _seconds(self, times: tuple[Any, Any]) -> float:
        began, ended = times
        return began.elapsed_time(ended) / 1e3 if self._on_gpu else ended - began
