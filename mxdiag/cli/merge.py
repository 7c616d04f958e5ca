"""`mxdiag merge`: runs of one model over other records, added up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli import options
from mxdiag.cli.output import check_interrupted, make_console, print_parts, run_folder


def merge(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN...", help="Two or more run folders of one model.")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="RUN", help="Folder of the merged run.")],
    top: Annotated[int, typer.Option("--top", min=0, help="Rows to show; 0 shows all.")] = 15,
    quiet: options.QuietOption = False,
) -> None:
    """Add up runs of one model over other records: equal to one scan of all of them.

    Gradients add up where every run was scanned with the same --loss-tokens.
    """
    from mxdiag import api

    folder = run_folder(out, str(runs[0]))
    run = api.merge(runs)
    check_interrupted()
    run.write(folder)
    if quiet:
        return
    from mxdiag.commands.report.text.tables import scan_summary

    print_parts(scan_summary(run, make_console(), top or None), f"\nrun written to {folder}")
