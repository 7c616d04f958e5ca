"""What the commands share: tables, messages and progress, each on the right stream."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

    from mxdiag.progress import Progress

RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="Folder that `mxdiag scan` wrote.")]


#: Set by Ctrl-C: an exception raised inside a compiled library's callback is lost there.
_interrupts: list[int] = []


def prepare_streams() -> None:
    """Streams that can be written to whatever they are, a terminal's width that is one, and a
    Ctrl-C that is not lost.
    """
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by the caller
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
        elif hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")

    for name in ("COLUMNS", "LINES"):  # else the terminal is asked
        if not re.fullmatch(r"[1-9][0-9]{0,3}", os.environ.get(name, "")):
            os.environ.pop(name, None)

    def interrupt(number: int, _frame: object) -> None:
        _interrupts.append(number)
        raise KeyboardInterrupt

    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGINT, interrupt)


def was_interrupted() -> bool:
    """Whether there was a Ctrl-C, swallowed or not."""
    return bool(_interrupts)


def check_interrupted() -> None:
    """Raise the Ctrl-C that somebody swallowed, before anything is written."""
    if was_interrupted():
        raise KeyboardInterrupt


def complain(message: str) -> None:
    """One message on standard error; if that cannot be written to, nobody can be told."""
    from mxdiag.commands.report.text.tables import printable

    try:
        sys.stderr.write(printable(message) + "\n")
        sys.stderr.flush()
    except OSError:
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


def run_folder(out: Path | None, model: str) -> Path:
    """Where a run goes: `out`, or the model's name under reports/.

    Raises
    ------
    RunError
        If that can be no folder: told before anything is measured.
    """
    from mxdiag.commands.scan.source import run_name
    from mxdiag.errors import RunError

    folder = out or Path("reports") / run_name(model)
    nearest = next((path for path in (folder, *folder.parents) if os.path.lexists(path)), None)
    if nearest is not None and not nearest.is_dir():
        raise RunError("is no folder", where=nearest, advice="Give another --out")
    return folder


def print_parts(*parts: RenderableType) -> None:
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
    except OSError as error:
        quiet_stdout()
        complain(f"warning: standard output: {error.strerror or error}")


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
    from mxdiag.commands.report.text.progress import BarProgress, LineProgress

    console = make_console(stderr=True)
    if console.is_terminal:
        return BarProgress(console)
    return LineProgress(complain)


def write_text(path: Path, rendered: RenderableType) -> None:
    """Write what would be shown, without colours, whole or not at all."""
    from mxdiag.run.run import write_atomically

    write_atomically(path, rendered if isinstance(rendered, str) else _plain(rendered))


def deliver(rendered: RenderableType, out: Path | None) -> None:
    """Print it, or write it to a file."""
    if out is None:
        print_parts(rendered)
    else:
        write_text(out, rendered)


def append_step_summary(markdown: str) -> None:
    """GitHub's step summary; one that cannot be written decides nothing."""
    from mxdiag.commands.report.ci.gate import append_summary

    failure = append_summary(os.environ.get("GITHUB_STEP_SUMMARY"), markdown)
    if failure is not None:
        complain(f"warning: {failure}")
