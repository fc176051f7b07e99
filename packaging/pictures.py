"""Draw the pictures of docs/concepts as SVG: boxes, arrows and words on a grid.

In: the pictures below. Out: docs/images/NAME.svg; with --check, exit code 1 and the names of files that differ.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path

DIRECTORY = Path(__file__).resolve().parent.parent / "docs" / "images"
COMMAND = ".venv/bin/python packaging/pictures.py"
_FILLS = {"agent": "#fde9d0", "service": "#dbe9f9", "data": "#e2f2e0", "gone": "#f3dede", "plain": "#ffffff"}


@dataclass(frozen=True, slots=True)
class Box:
    """A box with lines of text; the first line is its title."""

    name: str
    x: int
    y: int
    width: int
    height: int
    text: str
    kind: str = "service"


@dataclass(frozen=True, slots=True)
class Arrow:
    """An arrow between two boxes, with a label beside its middle."""

    start: str
    end: str
    label: str = ""
    dashed: bool = False
    offset: tuple[int, int] = (0, -6)


@dataclass(frozen=True, slots=True)
class Note:
    """A line of text outside boxes."""

    x: int
    y: int
    text: str


@dataclass(frozen=True, slots=True)
class Picture:
    """A drawing: its size, its description for readers who do not see it, and its parts."""

    width: int
    height: int
    title: str
    parts: Sequence[Box | Arrow | Note]


PICTURES = {
    "loop": Picture(
        860,
        330,
        "From a rollout to a gradient: agent, gateway, engine, store, builder, trainer, publication",
        (
            Box("agent", 20, 30, 150, 64, "agent\nas it is", "agent"),
            Box("gateway", 270, 30, 150, 64, "gateway\nrecords each call"),
            Box("engine", 520, 30, 150, 64, "engine (vLLM)\nsamples tokens"),
            Box("store", 270, 150, 150, 64, "store\notel_traces, calls", "data"),
            Box("builder", 270, 246, 150, 64, "builder\ntransitions, drops"),
            Box("trainer", 520, 246, 150, 64, "trainer (verl)\none step, one version"),
            Box("ledger", 720, 246, 120, 64, "ledger\nversions", "data"),
            Arrow("agent", "gateway", "requests"),
            Arrow("gateway", "engine", "ids, logprobs"),
            Arrow("agent", "store", "agent's spans", offset=(-36, 14)),
            Arrow("gateway", "store", "gateway's spans", offset=(56, 4)),
            Arrow("store", "builder", "complete rollouts", offset=(60, 4)),
            Arrow("builder", "trainer", "groups"),
            Arrow("trainer", "ledger", "commit"),
            Arrow("trainer", "engine", "publication: weights, checksum, version", dashed=True, offset=(124, 4)),
        ),
    ),
    "spans": Picture(
        860,
        270,
        "Two sources of spans of one call, and what becomes of them",
        (
            Note(20, 26, "1. The agent's instrumentation: who called, which tool, what failed"),
            Box("graph", 20, 40, 150, 52, "agent span\nplanner", "agent"),
            Box("client", 210, 40, 150, 52, "client span\nmessages, model", "agent"),
            Box("tool", 400, 40, 150, 52, "tool span\nstatus, result", "agent"),
            Box("chat", 210, 170, 150, 52, "gateway span\nids, logprobs"),
            Note(20, 150, "2. The gateway: what was sampled"),
            Box("cause", 640, 40, 200, 52, "one tool call\ncaused by that call", "data"),
            Box("call", 640, 170, 200, 52, "one call\nplanner, branch 0, turn 2", "data"),
            Arrow("graph", "client"),
            Arrow("client", "chat", "parent, response id or token ids", offset=(96, 2)),
            Arrow("client", "tool"),
            Arrow("tool", "cause", "tool call id"),
            Arrow("chat", "call", "speaks for the call group"),
            Note(20, 254, "In direct mode there is no gateway: the engine's answer, kept in the client span, holds what was sampled."),
        ),
    ),
    "completeness": Picture(
        860,
        300,
        "When a rollout is built, and where each of its calls goes",
        (
            Box("root", 20, 30, 190, 64, "final root span\nspangrad.rollout.calls = 3", "data"),
            Box("arrived", 20, 130, 190, 64, "calls that arrived\n3 gateway spans", "data"),
            Box("compare", 300, 80, 150, 64, "equal?\nand a reward"),
            Box("wait", 300, 210, 150, 52, "not yet\nwait for late spans", "plain"),
            Box("build", 530, 80, 120, 64, "build\neach call once"),
            Box("transitions", 720, 30, 120, 52, "transition\ntrained", "data"),
            Box("drops", 720, 142, 120, 52, "drop\nwith a reason", "gone"),
            Arrow("root", "compare"),
            Arrow("arrived", "compare"),
            Arrow("compare", "build", "yes"),
            Arrow("compare", "wait", "no", offset=(14, 4)),
            Arrow("wait", "build", "time is over: incomplete", dashed=True, offset=(64, 16)),
            Arrow("build", "transitions"),
            Arrow("build", "drops"),
        ),
    ),
    "credit-flow": Picture(
        860,
        250,
        "From rewards to advantages",
        (
            Box("rewards", 20, 70, 150, 78, "raw rewards\nname, source, role\nof rollout or call", "data"),
            Box("weights", 215, 70, 150, 78, "reward_weights\nreturn R,\nper call r"),
            Box("scheme", 410, 70, 150, 78, "credit scheme\nvalue of each call"),
            Box("baseline", 605, 70, 100, 78, "baseline\nwithin group"),
            Box("advantage", 740, 70, 100, 78, "advantage\nper call", "data"),
            Arrow("rewards", "weights"),
            Arrow("weights", "scheme"),
            Arrow("scheme", "baseline"),
            Arrow("baseline", "advantage"),
            Note(410, 180, "identical: R for every call"),
            Note(410, 200, "reward_to_go: r + gamma * r(next) + ..."),
            Note(410, 220, "own: r alone"),
            Note(20, 30, "Stored: raw rewards. Derived for each batch: everything to the right of them."),
        ),
    ),
    "versions": Picture(
        860,
        270,
        "Versions of a policy, their batches, and a branch",
        (
            Box("v0", 20, 40, 110, 52, "version 0\nbase weights", "data"),
            Box("v1", 210, 40, 110, 52, "version 1\ncommitted", "data"),
            Box("v2", 400, 40, 110, 52, "version 2\ncommitted", "data"),
            Box("v3", 590, 40, 110, 52, "version 3\nhead", "data"),
            Box("v4", 590, 180, 110, 52, "version 4\nbranch brevity", "data"),
            Box("batch", 260, 180, 190, 52, "batch of version 2\ngroups, rollouts, spans"),
            Arrow("v0", "v1", "step"),
            Arrow("v1", "v2", "step"),
            Arrow("v2", "v3", "step"),
            Arrow("v2", "v4", "branch", offset=(26, 0)),
            Arrow("batch", "v2", "lineage", dashed=True, offset=(-34, 4)),
            Note(20, 28, "branch main"),
        ),
    ),
}


def draw(picture: Picture) -> str:
    """Return a picture as SVG."""
    boxes = {part.name: part for part in picture.parts if isinstance(part, Box)}
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {picture.width} {picture.height}" width="{picture.width}" '
        f'role="img" font-family="sans-serif" font-size="13">',
        f"<title>{escape(picture.title)}</title>",
        '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
        '<path d="M0 0 L8 4 L0 8 z" fill="#444"/></marker></defs>',
        f'<rect width="{picture.width}" height="{picture.height}" rx="8" fill="#fff"/>',
    ]
    for part in picture.parts:
        if isinstance(part, Arrow):
            lines += _arrow(part, boxes[part.start], boxes[part.end])
        elif isinstance(part, Note):
            lines.append(f'<text x="{part.x}" y="{part.y}" fill="#555">{escape(part.text)}</text>')
    for box in boxes.values():
        lines.append(
            f'<rect x="{box.x}" y="{box.y}" width="{box.width}" height="{box.height}" rx="6" fill="{_FILLS[box.kind]}" stroke="#444"/>'
        )
        texts = box.text.split("\n")
        for row, text in enumerate(texts):
            y = box.y + box.height / 2 + 5 + (row - (len(texts) - 1) / 2) * 18
            weight = ' font-weight="bold"' if row == 0 else ""
            lines.append(f'<text x="{box.x + box.width / 2:g}" y="{y:g}" text-anchor="middle"{weight}>{escape(text)}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def _arrow(arrow: Arrow, start: Box, end: Box) -> list[str]:
    (x1, y1), (x2, y2) = _edge(start, end), _edge(end, start)
    dash = ' stroke-dasharray="6 4"' if arrow.dashed else ""
    lines = [f'<path d="M{x1:g} {y1:g} L{x2:g} {y2:g}" stroke="#444" fill="none"{dash} marker-end="url(#tip)"/>']
    if arrow.label:
        x, y = (x1 + x2) / 2 + arrow.offset[0], (y1 + y2) / 2 + arrow.offset[1]
        lines.append(f'<text x="{x:g}" y="{y:g}" text-anchor="middle" fill="#555" font-size="12">{escape(arrow.label)}</text>')
    return lines


def _edge(box: Box, other: Box) -> tuple[float, float]:
    """Return where the line between the centres of two boxes leaves the first."""
    x, y = box.x + box.width / 2, box.y + box.height / 2
    dx, dy = other.x + other.width / 2 - x, other.y + other.height / 2 - y
    scale = min(box.width / 2 / abs(dx) if dx else math.inf, box.height / 2 / abs(dy) if dy else math.inf)
    return round(x + dx * scale, 1), round(y + dy * scale, 1)


def main() -> int:
    """Write the pictures, or compare them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="compare the files and write nothing")
    check: bool = parser.parse_args().check
    stale: list[str] = []
    for name, picture in PICTURES.items():
        path, text = DIRECTORY / f"{name}.svg", draw(picture)
        if not path.exists() or path.read_text() != text:
            stale.append(f"docs/images/{name}.svg")
            if not check:
                path.write_text(text)
    if check and stale:
        print(f"{', '.join(stale)}: differ from packaging/pictures.py. Draw them again: {COMMAND}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
