"""Options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

ConfigOption = Annotated[
    Path | None, typer.Option("--config", help="TOML file with any of scan's options.")
]
CalibOption = Annotated[
    str | None,
    typer.Option("--calib", metavar="FILE", help="Calibration records (JSONL) or plain text."),
]
SeqLenOption = Annotated[
    int | None, typer.Option("--seq-len", help="Cut records to so many tokens. [default: 512]")
]
ScaleRuleOption = Annotated[
    str | None, typer.Option("--scale-rule", help="rceil, floor, ceil or even. [default: rceil]")
]
CorrectionsOption = Annotated[
    str | None,
    typer.Option("--corrections", help="default, all, none, or a list such as mbs,of:1.0."),
]
IncludeOption = Annotated[
    list[str] | None,
    typer.Option("--include", metavar="GLOB", help="Take in layers excluded by default."),
]
ExcludeOption = Annotated[
    list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave layers out.")
]
DeviceOption = Annotated[
    str | None, typer.Option("--device", help="auto, cpu or cuda. [default: auto]")
]
DtypeOption = Annotated[
    str | None, typer.Option("--dtype", help="auto, float32, bfloat16 or float16. [default: auto]")
]
BackendOption = Annotated[
    str | None, typer.Option("--backend", help="auto, reference, cpu or triton.")
]
SeedOption = Annotated[int | None, typer.Option("--seed", help="Random seed. [default: 0]")]
RevisionOption = Annotated[str | None, typer.Option("--revision", help="Revision of a hub model.")]
TrustRemoteCodeOption = Annotated[
    bool | None,
    typer.Option("--trust-remote-code", help="Run the Python code that the model brings."),
]
AllowPickleOption = Annotated[
    bool | None,
    typer.Option("--allow-pickle", help="Read pickle checkpoints with weights_only=True."),
]
QuietOption = Annotated[bool, typer.Option("--quiet", help="No progress and no table.")]
TopOption = Annotated[int, typer.Option("--top", min=0, help="Rows to show; 0 shows all.")]
LimitOption = Annotated[
    int, typer.Option("--limit", min=0, help="Findings shown per check; 0 shows all.")
]
