"""`mxdiag diff`: what moved between two runs."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli.options import LimitOption
from mxdiag.cli.output import append_step_summary, deliver


def diff(
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="The earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="The later run.")],
    output_format: Annotated[
        str, typer.Option("--format", help="text, github, json or markdown.")
    ] = "text",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it to a file.")
    ] = None,
    limit: LimitOption = 20,
) -> None:
    """Show what moved between two runs, what matters most first."""
    from mxdiag import api
    from mxdiag.commands.report.text import diff as formats

    found = api.diff(before, after)
    if output_format == "text":
        deliver(formats.diff_text(found, limit=limit or None), out)
    else:
        deliver(formats.render_diff(found, output_format), out)
    if output_format == "github":
        append_step_summary(formats.diff_markdown(found))
