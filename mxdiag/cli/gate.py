"""`mxdiag gate`: judge a run by an error budget."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli.options import LimitOption
from mxdiag.cli.output import RunFolder, append_step_summary, deliver
from mxdiag.errors import UsageError


def gate(
    run: RunFolder,
    budget: Annotated[
        Path | None, typer.Option("--budget", metavar="FILE", help="TOML file of rules.")
    ] = None,
    baseline: Annotated[
        Path | None,
        typer.Option("--baseline", metavar="RUN", help="Earlier run to compare with."),
    ] = None,
    suggest: Annotated[
        Path | None,
        typer.Option("--suggest", metavar="FILE", help="Write a budget that this run meets."),
    ] = None,
    output_format: Annotated[
        str, typer.Option("--format", help="text, github, junit, sarif, json or markdown.")
    ] = "text",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write the verdict to a file.")
    ] = None,
    allow_not_observed: Annotated[
        list[str] | None,
        typer.Option("--allow-not-observed", metavar="GLOB", help="Layers that may be unseen."),
    ] = None,
    allow_unsupported: Annotated[
        list[str] | None,
        typer.Option("--allow-unsupported", metavar="GLOB", help="Layers that may be unread."),
    ] = None,
    sqnr_margin: Annotated[
        float, typer.Option("--sqnr-margin", help="With --suggest: margin in dB.")
    ] = 0.25,
    frac_margin: Annotated[
        float, typer.Option("--frac-margin", help="With --suggest: margin of fractions.")
    ] = 0.05,
    granularity: Annotated[
        str, typer.Option("--granularity", help="With --suggest: auto, row or role.")
    ] = "auto",
    limit: LimitOption = 20,
) -> None:
    """Judge a run by an error budget.

    Exit 0 within it, 1 over it, 2 on bad input.
    """
    from mxdiag import api
    from mxdiag.commands.report.ci import gate as gate_formats
    from mxdiag.run.run import write_atomically

    if (budget is None) == (suggest is None):
        raise UsageError("the gate needs a budget", advice="Give either --budget or --suggest")
    if suggest is not None:
        text = api.suggest(
            run, sqnr_margin=sqnr_margin, frac_margin=frac_margin, granularity=granularity
        )
        write_atomically(suggest, text)
        typer.echo(f"budget written to {suggest}")
        return
    assert budget is not None
    verdict = api.gate(
        run,
        budget,
        baseline=baseline,
        allow_not_observed=allow_not_observed or (),
        allow_unsupported=allow_unsupported or (),
    )
    if output_format == "text":
        deliver(gate_formats.gate_text(verdict, limit=limit or None), out)
    else:
        deliver(gate_formats.render_gate(verdict, output_format), out)
    if output_format == "github":
        append_step_summary(gate_formats.gate_markdown(verdict))
    raise typer.Exit(verdict.exit_code)
