"""`mxdiag impact`: run the model with one error component at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli import options
from mxdiag.cli.output import (
    check_interrupted,
    make_progress,
    print_parts,
    run_folder,
)


def impact(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="Local folder, hub id, sample:dense, sample:moe.")
    ],
    passes: Annotated[
        str | None,
        typer.Option("--passes", help="Some of forward,backward,both. [default: all]"),
    ] = None,
    configs: Annotated[
        str | None,
        typer.Option(
            "--configs",
            help="Sets default, components, corrections, aqn, or names such as all,scale,of,w4a8.",
        ),
    ] = None,
    operand_sets: Annotated[
        str | None,
        typer.Option("--operand-sets", help="Some of W,A,WA,G,GWA. [default: each pass's own]"),
    ] = None,
    repeats: Annotated[
        int, typer.Option("--repeats", help="Repeats with jittered embeddings, for the noise.")
    ] = 3,
    rollout_tokens: Annotated[
        int | None,
        typer.Option(
            "--rollout-tokens",
            help="Tokens rolled out per prompt; 0 for none. "
            "[default: 32 where records have prompts]",
        ),
    ] = None,
    rollout_temperature: Annotated[
        float, typer.Option("--rollout-temperature", help="Temperature of sampled rollouts.")
    ] = 1.0,
    rollout_clip: Annotated[
        float,
        typer.Option("--rollout-clip", help="Importance ratios outside 1 ± this are counted."),
    ] = 0.2,
    per_layer: Annotated[
        str | None,
        typer.Option("--per-layer", help="Also one unit at a time: layer, role or group."),
    ] = None,
    per_layer_operands: Annotated[
        str, typer.Option("--per-layer-operands", help="What a unit quantizes: W, A or WA.")
    ] = "W",
    config: options.ConfigOption = None,
    calib: options.CalibOption = None,
    seq_len: options.SeqLenOption = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Run so many records. [default: 4]")
    ] = None,
    scale_rule: options.ScaleRuleOption = None,
    corrections: options.CorrectionsOption = None,
    include: options.IncludeOption = None,
    exclude: options.ExcludeOption = None,
    device: options.DeviceOption = None,
    dtype: options.DtypeOption = None,
    backend: options.BackendOption = None,
    seed: options.SeedOption = None,
    revision: options.RevisionOption = None,
    trust_remote_code: options.TrustRemoteCodeOption = None,
    allow_pickle: options.AllowPickleOption = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="DIR", help="Run folder, made if it is new. [default: reports/<model>]"
        ),
    ] = None,
    quiet: options.QuietOption = False,
) -> None:
    """Run the model with one error component at a time.

    What that does to it is added to its run, which is made if there is none.
    """
    from mxdiag import api
    from mxdiag.commands.impact.command import PER_LAYER_JOURNAL, Extras
    from mxdiag.commands.impact.settings import impact_settings
    from mxdiag.run.run import RUN_JSON, Run

    scan = {
        "calib": calib,
        "seq_len": seq_len,
        "samples": samples,
        "scale_rule": scale_rule,
        "corrections": corrections,
        "include": include,
        "exclude": exclude,
        "device": device,
        "dtype": dtype,
        "backend": backend,
        "seed": seed,
        "revision": revision,
        "trust_remote_code": trust_remote_code,
        "allow_pickle": allow_pickle,
    }
    given = {
        **scan,
        "passes": passes,
        "configs": configs,
        "operands": operand_sets,
        "repeats": repeats,
    }
    folder = run_folder(out, model)
    extras = Extras(
        rollout_tokens=rollout_tokens,
        rollout_temperature=rollout_temperature,
        rollout_clip=rollout_clip,
        per_layer=per_layer,
        per_layer_operands=per_layer_operands,
        journal=folder / PER_LAYER_JOURNAL,
    )
    run = api.impact(
        model,
        run=Run.load(folder) if (folder / RUN_JSON).exists() else None,
        settings=impact_settings(config, given),
        extras=extras,
        progress=make_progress(quiet),
    )
    check_interrupted()
    run.write(folder)
    if quiet:
        return
    from mxdiag.commands.report.text.impact import impact_summary

    print_parts(impact_summary(run.data["impact"]), f"\nrun written to {folder}")
