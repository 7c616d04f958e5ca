"""`mxdiag sample`: write a built-in sample checkpoint to disk."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def sample(
    name: Annotated[str, typer.Argument(metavar="NAME", help="dense or moe.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write it to.")],
) -> None:
    """Write a built-in sample checkpoint to a folder."""
    from mxdiag.samples import write_sample

    for path in write_sample(name, directory):
        typer.echo(path)
