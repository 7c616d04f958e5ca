"""`mxdiag schema`: the JSON Schema of run.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli.output import deliver


def schema(
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="Write it to a file.")
    ] = None,
) -> None:
    """Print the JSON Schema of run.json, with what every column means.

    For example: mxdiag schema --out run.schema.json
    """
    from mxdiag import api

    deliver(json.dumps(api.schema(), indent=2, ensure_ascii=False), out)
