"""The commands that read a run: recommend, report, gate, diff, show."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mxdiag.cli.output import (
    RunFolder,
    complain,
    make_console,
    make_progress,
    show,
    write_text,
)
from mxdiag.errors import UsageError

if TYPE_CHECKING:
    from rich.console import RenderableType

Top = Annotated[int, typer.Option("--top", min=0, help="Rows to show; 0 shows all.")]
Limit = Annotated[
    int, typer.Option("--limit", min=0, help="Findings shown per check; 0 shows all.")
]


def recommend(
    run: RunFolder,
    target_sqnr: Annotated[
        float | None,
        typer.Option("--target-sqnr", help="SQNR that every row must reach, in dB. [default: 18]"),
    ] = None,
    target_mse_ratio: Annotated[
        float | None,
        typer.Option("--target-mse-ratio", help="Error after over error before, at most."),
    ] = None,
    max_bits: Annotated[
        float | None,
        typer.Option("--max-bits", help="Mean bits per weight element: least total error."),
    ] = None,
    allow: Annotated[
        str | None, typer.Option("--allow", help="Choose among these corrections only.")
    ] = None,
    fuse: Annotated[
        str,
        typer.Option(
            "--fuse", help="serving: layers that serving stacks fuse get one format; none."
        ),
    ] = "serving",
    sensitivities: Annotated[
        bool,
        typer.Option(
            "--sensitivities",
            help="With --max-bits: weigh layers by what `impact --per-layer` measured.",
        ),
    ] = False,
    validate: Annotated[
        bool, typer.Option("--validate", help="Run the model with them, and measure.")
    ] = False,
    top: Top = 15,
) -> None:
    """Recommend a correction per layer, under a target.

    The run's `recommended` and `reason` columns are filled with it.
    """
    from mxdiag import analyze
    from mxdiag.report.tables import recommendation_summary
    from mxdiag.run import Run

    loaded = Run.load(run)
    analyze.recommend(
        loaded,
        target_sqnr=target_sqnr,
        target_mse_ratio=target_mse_ratio,
        max_bits=max_bits,
        allow=allow,
        fuse=fuse,
        sensitivities=analyze.sensitivities(loaded) if sensitivities else None,
    )
    if validate:
        analyze.validate(loaded, progress=make_progress(False))
    assert loaded.folder is not None
    loaded.write(loaded.folder)
    show(
        recommendation_summary(loaded, make_console(), top or None),
        f"\nrecommendation written to {loaded.folder}",
    )


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
    from mxdiag.report.write import write_report

    formats = [
        name
        for name, wanted in (("csv", csv), ("markdown", markdown), ("parquet", parquet))
        if wanted
    ] or ["html"]
    if out is not None and len(formats) > 1:
        raise UsageError("--out takes one format", advice=f"Choose one of {', '.join(formats)}")
    for name in formats:
        written = write_report(run, name, out=out, budget=budget, baseline=baseline)
        if written is not None:
            typer.echo(written)


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
    limit: Limit = 20,
) -> None:
    """Judge a run by an error budget.

    Exit 0 within it, 1 over it, 2 on bad input.
    """
    from mxdiag import analyze
    from mxdiag.report import gate_formats
    from mxdiag.run import write_atomically

    if (budget is None) == (suggest is None):
        raise UsageError("the gate needs a budget", advice="Give either --budget or --suggest")
    if suggest is not None:
        text = analyze.suggest(
            run, sqnr_margin=sqnr_margin, frac_margin=frac_margin, granularity=granularity
        )
        write_atomically(suggest, text)
        typer.echo(f"budget written to {suggest}")
        return
    assert budget is not None
    verdict = analyze.gate(
        run,
        budget,
        baseline=baseline,
        allow_not_observed=allow_not_observed or (),
        allow_unsupported=allow_unsupported or (),
    )
    if output_format == "text":
        _deliver(gate_formats.text(verdict, limit=limit or None), out)
    else:
        _deliver(gate_formats.render(verdict, output_format), out)
    if output_format == "github":
        _summarize(gate_formats.markdown(verdict))
    raise typer.Exit(verdict.exit_code)


def diff(
    before: Annotated[Path, typer.Argument(metavar="RUN_A", help="The earlier run.")],
    after: Annotated[Path, typer.Argument(metavar="RUN_B", help="The later run.")],
    output_format: Annotated[
        str, typer.Option("--format", help="text, github, json or markdown.")
    ] = "text",
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it to a file.")
    ] = None,
    limit: Limit = 20,
) -> None:
    """Show what moved between two runs, what matters most first."""
    from mxdiag import analyze
    from mxdiag.report import diff as formats

    found = analyze.diff(before, after)
    if output_format == "text":
        _deliver(formats.text(found, limit=limit or None), out)
    else:
        _deliver(formats.render(found, output_format), out)
    if output_format == "github":
        _summarize(formats.markdown(found))


def _deliver(rendered: RenderableType, out: Path | None) -> None:
    if out is None:
        show(rendered)
    else:
        write_text(out, rendered)


def _summarize(markdown: str) -> None:
    """GitHub's step summary; one that cannot be written decides nothing."""
    from mxdiag.report.gate_formats import append_summary

    failure = append_summary(os.environ.get("GITHUB_STEP_SUMMARY"), markdown)
    if failure is not None:
        complain(f"warning: {failure}")


def show_layer(
    run: RunFolder,
    layer: Annotated[str, typer.Argument(metavar="LAYER", help="Name, or the end of one.")],
) -> None:
    """Show one layer in depth."""
    from mxdiag.report.layer import layer_details
    from mxdiag.run import Run

    show(layer_details(Run.load(run), layer, make_console()))
