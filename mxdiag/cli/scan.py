"""`mxdiag scan`: measure a model and write a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli.output import check_interrupted, make_console, make_progress, show


def scan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Local folder, .safetensors or .gguf file, hub id, sample:dense or sample:moe.",
        ),
    ],
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with any of these options.")
    ] = None,
    operands: Annotated[
        str | None, typer.Option("--operands", help="Some of W,A,G. [default: W,A,G]")
    ] = None,
    gemms: Annotated[
        str | None,
        typer.Option(
            "--gemms",
            help="Some of fprop,dgrad,wgrad: every operand of these. "
            "[default: W and A in fprop, G in dgrad]",
        ),
    ] = None,
    scale_rule: Annotated[
        str | None,
        typer.Option("--scale-rule", help="rceil, floor, ceil or even. [default: rceil]"),
    ] = None,
    weights_only: Annotated[
        bool | None,
        typer.Option("--weights-only", help="Stream the checkpoint; build no model."),
    ] = None,
    calib: Annotated[
        str | None,
        typer.Option("--calib", metavar="FILE", help="Calibration records (JSONL) or plain text."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Cut records to so many tokens. [default: 512]")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Run so many records. [default: 16]")
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Measure layers excluded by default."),
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="GLOB", help="Leave layers out.")
    ] = None,
    device: Annotated[
        str | None, typer.Option("--device", help="auto, cpu or cuda. [default: auto]")
    ] = None,
    dtype: Annotated[
        str | None,
        typer.Option("--dtype", help="auto, float32, bfloat16 or float16. [default: auto]"),
    ] = None,
    backend: Annotated[
        str | None, typer.Option("--backend", help="auto, reference, cpu or triton.")
    ] = None,
    corrections: Annotated[
        str | None,
        typer.Option("--corrections", help="default, all, none, or a list such as mbs,of:1.0."),
    ] = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="scale: block scales with 0 to 8 mantissa bits."),
    ] = None,
    seed: Annotated[int | None, typer.Option("--seed", help="Random seed. [default: 0]")] = None,
    revision: Annotated[
        str | None, typer.Option("--revision", help="Revision of a hub model.")
    ] = None,
    trust_remote_code: Annotated[
        bool | None,
        typer.Option("--trust-remote-code", help="Run the Python code that the model brings."),
    ] = None,
    allow_pickle: Annotated[
        bool | None,
        typer.Option("--allow-pickle", help="Read pickle checkpoints with weights_only=True."),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run folder. [default: reports/<model name>]"),
    ] = None,
    top: Annotated[int, typer.Option("--top", help="Rows to show; 0 shows all.")] = 15,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """Measure a model and write a run folder.

    Every linear layer's MXFP4 error, split exactly, for weights, activations and gradients.
    """
    from mxdiag import analyze

    given = {
        "operands": operands,
        "gemms": gemms,
        "scale_rule": scale_rule,
        "weights_only": weights_only,
        "calib": calib,
        "seq_len": seq_len,
        "samples": samples,
        "include": include,
        "exclude": exclude,
        "device": device,
        "dtype": dtype,
        "backend": backend,
        "corrections": corrections,
        "sweep": sweep,
        "seed": seed,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle,
    }
    settings = analyze.scan_settings(config, given)
    run = analyze.scan(model, settings=settings, progress=make_progress(quiet))
    check_interrupted()
    folder = run.write(out or Path("reports") / analyze.run_name(model))
    if quiet:
        return
    from mxdiag.report.tables import scan_summary

    console = make_console()
    show(scan_summary(run, console, top or None), f"\nrun written to {folder}")
