"""Courses as pictures.

In: samples by receiver. Out: a PNG with throughput and resident memory over time. And for other pictures: several runs' courses as one line
with a shade.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.meter import Sample

THROUGHPUT_SECONDS = 1.0


def draw(path: Path, courses: Mapping[str, Sequence[Sample]]) -> None:
    """Throughput above, memory below, a line each receiver."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, sharex=True, figsize=(9, 7), layout="constrained")
    for name, samples in courses.items():
        seconds = [sample.at - samples[0].at for sample in samples]
        above.plot(*throughput(samples), label=name)
        below.plot(seconds, [sample.rss / 1e6 for sample in samples], label=name)
    above.set(title="spans acknowledged", ylabel="a second")
    below.set(title="memory, resident", ylabel="MB", xlabel="seconds since the first body")
    for axes in (above, below):
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
    plt.close(figure)


def throughput(samples: Sequence[Sample]) -> tuple[list[float], list[float]]:
    """Seconds since the first sample, and spans a second around then."""
    times: list[float] = []
    rates: list[float] = []
    before = samples[0]
    for sample in samples[1:]:
        if sample.at - before.at >= THROUGHPUT_SECONDS:
            times.append(sample.at - samples[0].at)
            rates.append((sample.spans - before.spans) / (sample.at - before.at))
            before = sample
    return times, rates


def shaded(axes: Any, courses: Sequence[Sequence[float]], label: str) -> None:
    """Draw the mean of several courses, and a shade from the least to the greatest; as long as the shortest."""
    length = min(len(one) for one in courses)
    at = [[one[step] for one in courses] for step in range(length)]
    (line,) = axes.plot([sum(values) / len(values) for values in at], label=label)
    axes.fill_between(range(length), [min(values) for values in at], [max(values) for values in at], color=line.get_color(), alpha=0.2)
