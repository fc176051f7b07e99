"""The course of a load as a picture.

In: samples by receiver. Out: a PNG with throughput and resident memory over time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

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
