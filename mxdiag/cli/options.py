"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

Config = Annotated[
    Path | None, typer.Option("--config", help="TOML file with any of scan's options.")
]
Calib = Annotated[
    str | None,
    typer.Option("--calib", metavar="FILE", help="Calibration records (JSONL) or plain text."),
]
SeqLen = Annotated[
    int | None, typer.Option("--seq-len", help="Cut records to so many tokens. [default: 512]")
]
ScaleRule = Annotated[
    str | None, typer.Option("--scale-rule", help="rceil, floor, ceil or even. [default: rceil]")
]
Corrections = Annotated[
    str | None,
    typer.Option("--corrections", help="default, all, none, or a list such as mbs,of:1.0."),
]
Include = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Take in layers excluded by default."),
]
Exclude = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave layers out.")
]
Device = Annotated[str | None, typer.Option("--device", help="auto, cpu or cuda. [default: auto]")]
Dtype = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16. [default: auto]")
]
Backend = Annotated[str | None, typer.Option("--backend", help="auto, reference, cpu or triton.")]
Seed = Annotated[int | None, typer.Option("--seed", help="Random seed. [default: 0]")]
Revision = Annotated[str | None, typer.Option("--revision", help="Revision of a hub model.")]
TrustRemoteCode = Annotated[
    bool | None,
    typer.Option("--trust-remote-code", help="Run the Python code that the model brings."),
]
AllowPickle = Annotated[
    bool | None,
    typer.Option("--allow-pickle", help="Read pickle checkpoints with weights_only=True."),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress and no table.")]
