"""`mxdiag report`: a run's report files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli.output import RunFolder
from mxdiag.errors import UsageError


def report(
    run: RunFolder,
    csv: Annotated[bool, typer.Option("--csv", help="Write the rows as CSV.")] = False,
    markdown: Annotated[
        bool, typer.Option("--markdown", help="Write a short summary for a pull request.")
    ] = False,
    parquet: Annotated[bool, typer.Option("--parquet", help="Write the rows as Parquet.")] = False,
    budget: Annotated[
        Path | None,
        typer.Option("--budget", metavar="FILE", help="Show the verdict of this budget."),
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option("--baseline", metavar="RUN", help="Baseline of the verdict.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="FILE", help="Where to write; - is standard output."),
    ] = None,
) -> None:
    """Write a run's report: HTML, CSV, Markdown, Parquet."""
    from mxdiag import api

    formats = [
        name
        for name, wanted in (("csv", csv), ("markdown", markdown), ("parquet", parquet))
        if wanted
    ] or ["html"]
    if out is not None and len(formats) > 1:
        raise UsageError("--out takes one format", advice=f"Choose one of {', '.join(formats)}")
    for name in formats:
        written = api.report(run, name, out=out, budget=budget, baseline=baseline)
        if written is not None:
            typer.echo(written)
