"""Textual app of `spangrad watch`.

In: the page's read models. Out: a terminal's screen, read again every `FRESH_SECONDS`. Invariant: a store that does not answer is a line on
the screen, not the end of the app.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, ClassVar

from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import Horizontal, VerticalScroll
from textual.screen import ModalScreen
from textual.widgets import DataTable, Footer, Input, Sparkline, Static
from textual.worker import get_current_worker

from page.overview import FRESH_SECONDS
from page.watch import cells
from spangrad.errors import SpangradError

_READ = "read"
"""Group of the workers that read the overview."""
ReadState = Callable[[str, bool], tuple[Mapping[str, Any], Sequence[Mapping[str, Any]]]]
"""Function from a text in ids (empty: any), and whether only failed rollouts are shown, to the overview and the newest of those rollouts.

It may block, and raises a SpangradError where the store does not answer or refuses.
"""
ReadFate = Callable[[str], Sequence[str]]
"""Function from the id of a rollout to sentences on its fate; likewise."""


class RolloutScreen(ModalScreen[None]):
    """View of one rollout: sentences on its fate."""

    BINDINGS: ClassVar[list[BindingType]] = [Binding("escape,q,enter", "dismiss", "Back")]

    def __init__(self, rollout: str, read_fate: ReadFate) -> None:
        super().__init__()
        self._rollout = rollout
        self._read_fate = read_fate

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        with VerticalScroll(id="why"):
            yield Static(Text(cells.visible(f"Rollout {self._rollout}"), style="bold"), markup=False)
            yield Static("Reading…", id="sentences", markup=False)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        self._read()

    @work(thread=True, exclusive=True)
    def _read(self) -> None:
        try:
            text = "\n\n".join(cells.visible(sentence) for sentence in self._read_fate(self._rollout))
        except SpangradError as error:
            text = cells.visible(str(error))
        self.app.call_from_thread(lambda: self.query_one("#sentences", Static).update(Text(text)))


class WatchApp(App[None]):
    """The overview and the newest rollouts."""

    TITLE = "spangrad watch"
    ENABLE_COMMAND_PALETTE = False
    CSS = """
    #tiles { height: 8; }
    #tiles Static { width: 1fr; border: round $primary; padding: 0 1; }
    #returns { height: 2; margin: 0 1; }
    #problem { color: $error; height: auto; display: none; margin: 0 1; }
    #filter { display: none; }
    DataTable { height: 1fr; }
    RolloutScreen { align: center middle; }
    #why { width: 90%; height: 80%; border: round $primary; background: $surface; padding: 1 2; }
    """
    BINDINGS: ClassVar[list[BindingType]] = [
        Binding("q", "quit", "Quit"),
        Binding("slash", "filter", "Filter by id"),
        Binding("f", "failed", "Failed only"),
        Binding("r", "refresh_now", "Read now"),
    ]

    def __init__(self, read_state: ReadState, read_fate: ReadFate, seconds: float = FRESH_SECONDS) -> None:
        """Store the arguments; the time between two readings is in seconds."""
        super().__init__()
        self._read_state = read_state
        self._read_fate = read_fate
        self._seconds = seconds
        self._text = ""
        self._only_failed = False
        self._rollouts: dict[str, str] = {}

    def compose(self) -> ComposeResult:
        """Yield the widgets."""
        with Horizontal(id="tiles"):
            for name, title in (("services", "Services"), ("rollouts", "Last hour"), ("drops", "Drops of a day"), ("version", "Version")):
                tile = Static("", id=name, markup=False)
                tile.border_title = title
                yield tile
        yield Sparkline([], id="returns")
        yield Static("", id="problem", markup=False)
        yield Input(placeholder="text in the id of a rollout, task, group or run; Enter", id="filter")
        yield DataTable[Text](id="list", cursor_type="row", zebra_stripes=True)
        yield Footer()

    def on_mount(self) -> None:
        """Begin to read."""
        table = self._table()
        table.add_columns(*cells.COLUMNS)
        table.focus()
        self.set_interval(self._seconds, self._read_again)
        self.read()

    def action_filter(self) -> None:
        """Ask for a text."""
        field = self.query_one("#filter", Input)
        field.display = True
        field.focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Take the text, and read."""
        self._text = event.value.strip()
        event.input.display = bool(self._text)
        self._table().focus()
        self.read()

    def action_failed(self) -> None:
        """Show failed rollouts alone, or all again."""
        self._only_failed = not self._only_failed
        self.read()

    def action_refresh_now(self) -> None:
        """Read now."""
        self.read()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Open the rollout."""
        rollout = self._rollouts.get(str(event.row_key.value))
        if rollout is not None:  # a reading may have removed the row meanwhile
            self.push_screen(RolloutScreen(rollout, self._read_fate))

    def _read_again(self) -> None:
        """Read, unless a reading is in progress: a slow store is not queried more often than it answers."""
        if not any(worker.group == _READ and worker.is_running for worker in self.workers):
            self.read()

    @work(thread=True, exclusive=True, group=_READ)
    def read(self) -> None:
        """Read, and show what was read, unless the app is ending, or another reading has been started meanwhile: its filter may differ."""
        worker = get_current_worker()
        try:
            show = partial(self._show, *self._read_state(self._text, self._only_failed))
        except SpangradError as error:
            show = partial(self._show_problem, cells.visible(str(error)))
        self.call_from_thread(lambda: show() if self.is_running and not worker.is_cancelled else None)

    def _show_problem(self, problem: str) -> None:
        line = self.query_one("#problem", Static)
        line.update(problem)
        line.display = bool(problem)

    def _show(self, overview: Mapping[str, Any], rows: Sequence[Mapping[str, Any]]) -> None:
        self._show_problem(cells.visible(overview.get("error", "")))
        self.query_one("#services", Static).update(Text(cells.service_lines(overview)))
        if "error" in overview:
            return  # what was read before stays
        texts = {
            "rollouts": cells.rollout_lines(overview),
            "drops": cells.drop_lines(overview),
            "version": cells.version_lines(overview),
        }
        for name, text in texts.items():
            self.query_one(f"#{name}", Static).update(Text(text))
        self.query_one("#returns", Sparkline).data = cells.returns(overview)
        table = self._table()
        chosen = table.coordinate_to_cell_key(table.cursor_coordinate).row_key.value if table.row_count else None
        keys = ["\n".join((row["RolloutId"], row["RunId"], row["BuildSpec"])) for row in rows]
        self._rollouts = {key: row["RolloutId"] for key, row in zip(keys, rows, strict=True)}
        table.clear()
        for key, row in zip(keys, rows, strict=True):
            style = "" if row["Outcome"] == "succeeded" else "red"
            table.add_row(*(Text(cell, style=style) for cell in cells.row_cells(row)), key=key)
        if chosen in keys:
            table.move_cursor(row=keys.index(chosen), animate=False)

    def _table(self) -> DataTable[Text]:
        return self.query_one("#list", DataTable)
