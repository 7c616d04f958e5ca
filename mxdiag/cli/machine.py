"""`mxdiag sample` and `mxdiag env`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mxdiag.cli.output import show


def sample(
    name: Annotated[str, typer.Argument(metavar="NAME", help="dense or moe.")],
    directory: Annotated[Path, typer.Argument(metavar="DIR", help="New folder to write it to.")],
) -> None:
    """Write a built-in sample checkpoint to a folder."""
    from mxdiag.samples import write_sample

    for path in write_sample(name, directory):
        typer.echo(path)


def env() -> None:
    """Show what this machine offers: versions, devices, backends."""
    from mxdiag.environment import describe

    for key, value in describe().items():
        show(_described(key, value))


def _described(key: str, value: Any) -> str:
    if isinstance(value, dict):
        lines = (f"  {name}: {'not installed' if v is None else v}" for name, v in value.items())
        return "\n".join([f"{key}:", *lines])
    if isinstance(value, list):
        return f"{key}: {', '.join(value) or 'none'}"
    return f"{key}: {value}"
