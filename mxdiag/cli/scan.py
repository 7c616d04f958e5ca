"""`mxdiag scan`: measure a model and write a run folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli import options
from mxdiag.cli.output import (
    check_interrupted,
    make_console,
    make_progress,
    print_parts,
    run_folder,
)


def scan(
    model: Annotated[
        str,
        typer.Argument(
            metavar="MODEL",
            help="Local folder, .safetensors or .gguf file, hub id, sample:dense or sample:moe.",
        ),
    ],
    config: options.ConfigOption = None,
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
    scale_rule: options.ScaleRuleOption = None,
    weights_only: Annotated[
        bool | None,
        typer.Option("--weights-only", help="Stream the checkpoint; build no model."),
    ] = None,
    calib: options.CalibOption = None,
    seq_len: options.SeqLenOption = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Run so many records. [default: 16]")
    ] = None,
    loss_tokens: Annotated[
        int | None,
        typer.Option(
            "--loss-tokens",
            metavar="N",
            help="Divide the loss by N: the labelled tokens of all runs that will be merged. "
            "[default: those of this run's records]",
        ),
    ] = None,
    include: options.IncludeOption = None,
    exclude: options.ExcludeOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    backend: options.BackendOption = None,
    corrections: options.CorrectionsOption = None,
    sweep: Annotated[
        str | None,
        typer.Option("--sweep", help="scale: block scales with 0 to 8 mantissa bits."),
    ] = None,
    seed: options.SeedOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustRemoteCodeOption = None,
    allow_pickle: options.AllowPickleOption = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="Run folder. [default: reports/<model name>]"),
    ] = None,
    top: Annotated[int, typer.Option("--top", min=0, help="Rows to show; 0 shows all.")] = 15,
    quiet: options.QuietOption = False,
) -> None:
    """Measure a model and write a run folder.

    Every linear layer's MXFP4 error, split exactly, for weights, activations and gradients.
    """
    from mxdiag import api
    from mxdiag.commands.scan.settings import scan_settings

    given = {
        "operands": operands,
        "gemms": gemms,
        "scale_rule": scale_rule,
        "weights_only": weights_only,
        "calib": calib,
        "seq_len": seq_len,
        "samples": samples,
        "loss_tokens": loss_tokens,
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
    settings = scan_settings(config, given)
    run = api.scan(model, settings=settings, progress=make_progress(quiet))
    check_interrupted()
    run.write(folder)
    if quiet:
        return
    from mxdiag.commands.report.text.tables import scan_summary

    console = make_console()
    print_parts(scan_summary(run, console, top or None), f"\nrun written to {folder}")
