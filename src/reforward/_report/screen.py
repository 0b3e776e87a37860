"""What the user watches: results on stdout, progress and remarks on stderr, so that `--json` keeps stdout clean."""

from __future__ import annotations

import json
from types import TracebackType
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn


class Screen:
    """A context in which a command shows its progress and prints its results.

    Args:
        as_json: print nothing on stdout but one JSON document.
    """

    def __init__(self, *, as_json: bool):
        self._as_json = as_json
        self._results = Console()
        self._remarks = Console(stderr=True)
        self._bars: Progress | None = None
        self._stage: str | None = None

    def __enter__(self) -> Screen:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop_bars(complete=kind is None)

    def progress(self, stage: str, fraction: float) -> None:
        """Moves the bar of a stage, `fraction` of which is done; a stage starts when it is first named."""
        if self._bars is None:
            self._bars = self._start_bars()
        if stage != self._stage:
            self._complete_stage()
            self._stage = stage
            self._bars.add_task(stage, total=1.0)
            if not self._remarks.is_terminal:
                self.remark(f"{stage} …")
        self._bars.update(self._bars.tasks[-1].id, completed=fraction)

    def show(self, result: RenderableType) -> None:
        """Prints a result for people; left out if stdout is for JSON."""
        self._stop_bars()
        if not self._as_json:
            self._results.print(result, highlight=False)

    def remark(self, text: str) -> None:
        """Prints one line that isn't a result."""
        self._remarks.print(text, highlight=False, markup=False)

    def document(self, data: dict[str, Any]) -> None:
        """Prints the JSON document, if stdout is for JSON."""
        self._stop_bars()
        if self._as_json:
            print(json.dumps(data, indent=2))

    def _start_bars(self) -> Progress:
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        bars = Progress(*columns, console=self._remarks, disable=not self._remarks.is_terminal)
        bars.start()
        return bars

    def _stop_bars(self, *, complete: bool = True) -> None:
        """Ends the live display: it would be drawn over by results, which go to another stream of the same terminal."""
        if self._bars is not None:
            if complete:
                self._complete_stage()
            self._bars.stop()
        self._bars = self._stage = None

    def _complete_stage(self) -> None:
        if self._bars is not None and self._bars.tasks:
            self._bars.update(self._bars.tasks[-1].id, completed=1.0)
