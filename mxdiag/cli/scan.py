"""`mxdiag scan`: measure a model and write a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli import options
from mxdiag.cli.output import check_interrupted, make_console, make_progress, run_folder, show


def scan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Local folder, .safetensors or .gguf file, hub id, sample:dense or sample:moe.",
        ),
    ],
    config: options.Config = None,
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
    scale_rule: options.ScaleRule = None,
    weights_only: Annotated[
        bool | None,
        typer.Option("--weights-only", help="Stream the checkpoint; build no model."),
    ] = None,
    calib: options.Calib = None,
    seq_len: options.SeqLen = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Run so many records. [default: 16]")
    ] = None,
    include: options.Include = None,
    exclude: options.Exclude = None,
    device: options.Device = None,
    dtype: options.Dtype = None,
    backend: options.Backend = None,
    corrections: options.Corrections = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="scale: block scales with 0 to 8 mantissa bits."),
    ] = None,
    seed: options.Seed = None,
    revision: options.Revision = None,
    trust_remote_code: options.TrustRemoteCode = None,
    allow_pickle: options.AllowPickle = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run folder. [default: reports/<model name>]"),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Rows to show; 0 shows all.")] = 15,
    quiet: options.Quiet = False,
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
    folder = run_folder(out, model)
    settings = analyze.scan_settings(config, given)
    run = analyze.scan(model, settings=settings, progress=make_progress(quiet))
    check_interrupted()
    run.write(folder)
    if quiet:
        return
    from mxdiag.report.tables import scan_summary

    console = make_console()
    show(scan_summary(run, console, top or None), f"\nrun written to {folder}")
