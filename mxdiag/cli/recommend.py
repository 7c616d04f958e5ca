"""`mxdiag recommend`: a correction per layer, under a target."""

from __future__ import annotations

from typing import Annotated

import typer

from mxdiag.cli.options import TopOption
from mxdiag.cli.output import RunFolder, make_console, make_progress, print_parts


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
    top: TopOption = 15,
) -> None:
    """Recommend a correction per layer, under a target.

    The run's `recommended` and `reason` columns are filled with it.
    """
    from mxdiag import api
    from mxdiag.commands.impact.per_layer.results import sensitivities as measured_sensitivities
    from mxdiag.commands.report.text.tables import recommendation_summary
    from mxdiag.run.run import Run

    loaded = Run.load(run)
    api.recommend(
        loaded,
        target_sqnr=target_sqnr,
        target_mse_ratio=target_mse_ratio,
        max_bits=max_bits,
        allow=allow,
        fuse=fuse,
        sensitivities=measured_sensitivities(loaded) if sensitivities else None,
    )
    if validate:
        api.validate(loaded, progress=make_progress(False))
    assert loaded.folder is not None
    loaded.write(loaded.folder)
    print_parts(
        recommendation_summary(loaded, make_console(), top or None),
        f"\nrecommendation written to {loaded.folder}",
    )
