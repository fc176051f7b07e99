"""CPU and memory of process trees under load, the CPU that other processes of the machine used, and how slow the machine is.

In: the leaders' process ids. Out: `Sample`s, and CPU by thread. Invariant: the CPU of a child that ended still counts.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import psutil

SAMPLE_SECONDS = 0.25
QUIET_CORES = 0.03
"""CPU, in cores, below which a store counts as idle."""
QUIET_SECONDS = 3.0
CALIBRATION_MS = 6.5
"""CPU of a calibration on a fast day, in milliseconds."""
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Sample:
    """Measurement of process trees at one time."""

    at: float
    """Time in seconds, of the monotonic clock."""
    cpu: float
    """CPU seconds since the processes began, user and system."""
    rss: int
    """Resident bytes of all processes."""
    mapped: int
    """Resident bytes of mapped files: page cache, which the kernel reclaims when memory is short."""
    spans: int
    """Number of spans acknowledged so far."""

    @property
    def anonymous(self) -> int:
        """Resident bytes that belong to no file."""
        return self.rss - self.mapped


class Meter:
    """Thread that samples process trees at intervals, until closed."""

    def __init__(self, leaders: Sequence[int], spans: Callable[[], int]) -> None:
        """Start sampling; `spans` returns the number of acknowledged spans."""
        self._leaders = [psutil.Process(pid) for pid in leaders]
        self._spans = spans
        self._closed = threading.Event()
        self._lock = threading.Lock()
        self.samples: list[Sample] = [self._look()]
        self._thread = threading.Thread(target=self._run, name="meter", daemon=True)
        self._thread.start()

    def now(self) -> Sample:
        """Look once more."""
        with self._lock:
            self.samples.append(self._look())
            return self.samples[-1]

    def settle(self, limit_seconds: float) -> Sample:
        """Wait until the processes are idle, merges and collections done, or the time is over."""
        end = time.monotonic() + limit_seconds
        before = self.now()
        while time.monotonic() < end:
            time.sleep(QUIET_SECONDS)
            sample = self.now()
            if (sample.cpu - before.cpu) / (sample.at - before.at) < QUIET_CORES:
                return sample
            before = sample
        return before

    def close(self) -> None:
        """Look no more."""
        self._closed.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._closed.wait(SAMPLE_SECONDS):
            try:
                self.now()
            except psutil.NoSuchProcess:
                return

    def _look(self) -> Sample:
        cpu, rss, mapped = 0.0, 0, 0
        for process in tree(self._leaders):
            try:
                cpu += sum(process.cpu_times()[:4])
                memory = process.memory_info()
                rss += memory.rss
                mapped += memory.shared
            except psutil.NoSuchProcess:
                continue
        return Sample(time.monotonic(), cpu, rss, mapped, self._spans())


def tree(leaders: Sequence[psutil.Process]) -> list[psutil.Process]:
    """The leaders and all their descendants."""
    return [one for leader in leaders for one in (leader, *leader.children(recursive=True))]


def machine_cpu() -> float:
    """Seconds of CPU that the whole machine has spent on anything but waiting."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split(maxsplit=9)[1:9])
    return (user + nice + system + irq + softirq + steal) / _TICKS


def calibration() -> float:
    """Return the CPU of a fixed loop in Python, in milliseconds."""
    began, text = time.process_time(), ""
    for number in range(50_000):
        text = f"{number}{text[:10]}"
    return round((time.process_time() - began) * 1e3, 2)


def slowness(calibrations: Sequence[float]) -> float:
    """Return the factor of times on this machine, by calibrations in the course of a run: their median against a fast day's, at least 1."""
    return round(max(1.0, median(calibrations) / CALIBRATION_MS), 2)


def cpu_by_thread(pid: int) -> dict[str, float]:
    """Seconds of CPU by thread name; the first thread is called `main`, and threads that ended are missing."""
    spent: dict[str, float] = {}
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            text = (task / "stat").read_text()
        except FileNotFoundError:
            continue
        name, fields = text[text.index("(") + 1 : text.rindex(")")], text[text.rindex(")") + 2 :].split()
        label = "main" if task.name == str(pid) else name
        spent[label] = spent.get(label, 0.0) + (int(fields[11]) + int(fields[12])) / _TICKS
    return spent
