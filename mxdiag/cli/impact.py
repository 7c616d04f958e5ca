"""`mxdiag impact`: run the model with one error component at a time."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mxdiag.cli.output import check_interrupted, make_console, make_progress, show


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
    config: Annotated[
        Path | None, typer.Option("--config", help="TOML file with any of scan's options.")
    ] = None,
    calib: Annotated[
        str | None,
        typer.Option("--calib", metavar="FILE", help="Calibration records (JSONL) or plain text."),
    ] = None,
    seq_len: Annotated[
        int | None, typer.Option("--seq-len", help="Cut records to so many tokens. [default: 512]")
    ] = None,
    samples: Annotated[
        int | None, typer.Option("--samples", help="Run so many records. [default: 4]")
    ] = None,
    scale_rule: Annotated[
        str | None,
        typer.Option("--scale-rule", help="rceil, floor, ceil or even. [default: rceil]"),
    ] = None,
    corrections: Annotated[
        str | None,
        typer.Option("--corrections", help="default, all, none, or a list such as mbs,of:1.0."),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="GLOB", help="Quantize layers excluded by default."),
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
        typer.Option(
            "--out", metavar="DIR", help="Run folder, made if it is new. [default: reports/<model>]"
        ),
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress and no table.")] = False,
) -> None:
    """Run the model with one error component at a time.

    What that does to it is added to its run, which is made if there is none.
    """
    from mxdiag import analyze
    from mxdiag.injection.command import PER_LAYER_JOURNAL, Extras
    from mxdiag.run import RUN_JSON, Run

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
    options = {
        **scan,
        "passes": passes,
        "configs": configs,
        "operands": operand_sets,
        "repeats": repeats,
    }
    folder = out or Path("reports") / analyze.run_name(model)
    extras = Extras(
        rollout_tokens=rollout_tokens,
        rollout_temperature=rollout_temperature,
        rollout_clip=rollout_clip,
        per_layer=per_layer,
        per_layer_operands=per_layer_operands,
        journal=folder / PER_LAYER_JOURNAL,
    )
    run = analyze.impact(
        model,
        run=Run.load(folder) if (folder / RUN_JSON).exists() else None,
        settings=analyze.impact_settings(config, options),
        extras=extras,
        progress=make_progress(quiet),
    )
    check_interrupted()
    run.write(folder)
    if quiet:
        return
    from mxdiag.report.impact_tables import impact_summary

    show(impact_summary(run.data["impact"], make_console()), f"\nrun written to {folder}")
