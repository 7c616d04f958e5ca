"""Progress on standard error: a bar with rate and time left, or occasional plain lines."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from mxdiag.progress import Progress

#: Seconds between two plain lines.
PLAIN_INTERVAL = 10.0


def _amount(steps: float, unit: str) -> str:
    if unit == "B":
        return decimal(int(steps))
    return f"{steps:,.0f} {unit}" if steps >= 10 else f"{steps:.2g} {unit}"


class BarProgress(Progress):
    """A live bar: label, share, rate, time left; gone when the phase ends."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar: Bar | None = None
        self._task: TaskID | None = None
        self._unit = ""

    @contextmanager
    def phase(self, label: str, total: int, unit: str = "") -> Iterator[None]:
        """See `Progress.phase`."""
        columns = (
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=None),
            TextColumn("{task.percentage:>3.0f} %"),
            TextColumn("{task.fields[rate]}"),
            TimeRemainingColumn(),
        )
        with Bar(*columns, console=self._console, transient=True) as bar:
            self._bar, self._unit = bar, unit
            self._task = bar.add_task(label, total=total, rate="")
            try:
                yield
            finally:
                self._bar = self._task = None

    def advance(self, steps: int = 1) -> None:
        """See `Progress.advance`."""
        if self._bar is None or self._task is None:
            return
        self._bar.advance(self._task, steps)
        speed = self._bar.tasks[0].speed
        if speed:
            self._bar.update(self._task, rate=f"{_amount(speed, self._unit)}/s")

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._console.print(text, style="dim", markup=False, highlight=False)


class LineProgress(Progress):
    """A plain line when a phase starts and every ten seconds within it."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._label, self._unit = "", ""
        self._total = self._done = 0
        self._start = self._last = 0.0

    @contextmanager
    def phase(self, label: str, total: int, unit: str = "") -> Iterator[None]:
        """See `Progress.phase`."""
        self._label, self._total, self._unit, self._done = label, total, unit, 0
        self._start = self._last = time.monotonic()
        self._write(f"{label}: {_amount(total, unit)}")
        yield

    def advance(self, steps: int = 1) -> None:
        """See `Progress.advance`."""
        self._done += steps
        now = time.monotonic()
        if now - self._last < PLAIN_INTERVAL or not self._total:
            return
        self._last = now
        rate = self._done / (now - self._start)
        left = (self._total - self._done) / rate if rate else 0.0
        self._write(
            f"{self._label}: {100 * self._done / self._total:.0f} %, "
            f"{_amount(rate, self._unit)}/s, {left:.0f} s left"
        )

    def note(self, text: str) -> None:
        """See `Progress.note`."""
        self._write(text)
