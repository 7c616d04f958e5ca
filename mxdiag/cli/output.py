"""What the commands share: tables, messages and progress, each on the right stream."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mxdiag.progress import Progress

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `mxdiag scan` wrote.")]


def complain(message: str) -> None:
    """One message on standard error, also if the reader of standard output is gone."""
    from mxdiag.report.tables import printable

    try:
        sys.stderr.write(printable(message) + "\n")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def quiet_stdout() -> None:
    """Let what is still buffered for a closed pipe go nowhere."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)


def make_console(*, stderr: bool = False) -> Console:
    """A terminal as wide as it is; a pipe so wide that no name is ever cut or folded."""
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else 100_000
    return Console(stderr=stderr, width=width, soft_wrap=False, highlight=False)


def show(*parts: RenderableType) -> None:
    """Print to standard output, strings as they are; a reader that has gone is no error."""
    console = make_console()
    try:
        for part in parts:
            if isinstance(part, str):
                sys.stdout.write(part if part.endswith("\n") else part + "\n")
            elif console.is_terminal:
                console.print(part)
            else:
                sys.stdout.write(_plain(part))
        sys.stdout.flush()
    except BrokenPipeError:
        quiet_stdout()


def _plain(renderable: RenderableType) -> str:
    """What a pipe or a file gets: no colours, whole names, no trailing blanks."""
    from rich.console import Console

    console = Console(
        width=100_000,
        color_system=None,
        force_terminal=False,
        legacy_windows=False,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(renderable)
    return "\n".join(line.rstrip() for line in captured.get().split("\n"))


def make_progress(quiet: bool) -> Progress:
    """A bar on a terminal, occasional lines else, nothing if quiet."""
    from mxdiag.progress import QUIET

    if quiet:
        return QUIET
    from mxdiag.report.progress import BarProgress, LineProgress

    console = make_console(stderr=True)
    if console.is_terminal:
        return BarProgress(console)
    return LineProgress(complain)


def write_text(path: Path, rendered: RenderableType) -> None:
    """Write what would be shown, without colours, whole or not at all."""
    from mxdiag.run import write_atomically

    write_atomically(path, rendered if isinstance(rendered, str) else _plain(rendered))
