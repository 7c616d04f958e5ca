"""`mxdiag show`: one layer in depth."""

from __future__ import annotations

from typing import Annotated

import typer

from mxdiag.cli.output import RunFolder, make_console, print_parts


def show(
    run: RunFolder,
    layer: Annotated[str, typer.Argument(metavar="LAYER", help="Name, or the end of one.")],
) -> None:
    """Show one layer in depth."""
    from mxdiag.commands.report.text.layer import layer_details
    from mxdiag.run.run import Run

    print_parts(layer_details(Run.load(run), layer, make_console()))
