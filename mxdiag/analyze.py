"""The Python API: one function per command, none of which prints."""

from __future__ import annotations

import dataclasses
import datetime
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdiag import __version__, recommendation
from mxdiag.budget import Verdict, evaluate, load_budget, suggest_budget
from mxdiag.compare import Diff, diff_runs
from mxdiag.corrections import Correction, parse_corrections
from mxdiag.environment import run_environment
from mxdiag.errors import MxdiagError, UsageError
from mxdiag.progress import QUIET, Progress
from mxdiag.recommendation import Recommendation
from mxdiag.rows import Measured, Measurement, not_observed, totals
from mxdiag.run import SCHEMA_VERSION, Run, strict
from mxdiag.samples import PREFIX, calibration_path, sample_path
from mxdiag.settings import ScanSettings, read_config, split_names

if TYPE_CHECKING:
    from torch import nn

    from mxdiag.injection.settings import ImpactSettings

UNMEASURED_BY_DESIGN = (
    "attention score and value products",
    "KV cache",
    "convolutions",
)
_WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_NAME_LISTS = ("operands", "gemms", "corrections")


def scan_settings(config: Path | None, options: Mapping[str, Any]) -> ScanSettings:
    """Settings from a TOML file, overruled by the options that are not None.

    Raises
    ------
    UsageError
        On an unknown option, or a value that it cannot take.
    """
    known = {field.name for field in dataclasses.fields(ScanSettings)}
    chosen = {} if config is None else read_config(config)
    for name, value in options.items():
        if name not in known:
            raise UsageError(
                f"unknown option {name!r}", advice=f"Known: {', '.join(sorted(known))}"
            )
        if value is None or value == []:
            continue
        if name in _NAME_LISTS:
            value = split_names(value)
        elif isinstance(value, list):
            value = tuple(value)
        chosen[name] = value
    return ScanSettings(**chosen)


def run_name(model: str) -> str:
    """Folder name for a model's run: the last part of its path or id."""
    name = model.removeprefix(PREFIX).rstrip("/\\")
    last = re.split(r"[/\\]", name)[-1]
    for suffix in _WEIGHT_FILES:
        last = last.removesuffix(suffix)
    return re.sub(r"[^\w.+-]+", "_", last).strip(".") or "model"


def scan(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    calibration: str | Path | Iterable[Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    settings: ScanSettings | None = None,
    progress: Progress = QUIET,
    **options: Any,
) -> Run:
    """Measure every linear layer of a model in MXFP4.

    Parameters
    ----------
    model
        Local folder, weight file, hub id, `sample:dense`, `sample:moe`, or a torch module.
    tokenizer
        For a module in memory: reads text records; not needed for records of `input_ids`.
    calibration
        Calibration file, or records as dicts, or batches for the model's forward (a dict of
        keyword arguments, a tuple of positional ones, or one tensor). Overrules `settings.calib`.
    loss
        `loss(output, batch) -> scalar tensor` for modules without a language-model loss.
    settings
        The options; or give them as keyword arguments by name (`gemms="fprop,dgrad"`,
        `weights_only=True`, ...).
    progress
        Hears how the work gets on.

    Returns
    -------
    Run
        `.frame` is a pandas DataFrame with one row per (layer, operand, gemm); `.write(folder)`
        writes `run.json` and `tensors.csv`.

    Raises
    ------
    MxdiagError
        What is wrong, where, and what to do.
    """
    if settings is None:
        settings = scan_settings(None, options)
    elif options:
        raise UsageError("give either settings or options, not both")
    corrections = chosen_corrections(settings)
    if isinstance(model, (str, Path)):
        path, kind = _resolve(str(model))
        weights_only = settings.weights_only or path.endswith(_WEIGHT_FILES)
        if weights_only:
            from mxdiag.collect.scan_checkpoint import scan_checkpoint

            measured = scan_checkpoint(path, settings, corrections, progress)
        else:
            from mxdiag.collect.scan_model import Request, load_and_scan

            if calibration is None:
                calibration = settings.calib or _own_calibration(kind)
            request = Request(settings, corrections, progress, calibration, loss)
            measured = load_and_scan(path, request)
        source = str(model)
    else:
        from mxdiag.collect.scan_model import Request, scan_module

        kind, source = "module", type(model).__name__
        calibration = settings.calib if calibration is None else calibration
        request = Request(settings, corrections, progress, calibration, loss)
        measured = scan_module(model, tokenizer, request)
    measured.model.update(source=source, kind=kind)
    run = assemble(measured, settings, corrections)
    if corrections:
        recommend(run)
    return run


def chosen_corrections(settings: ScanSettings) -> tuple[Correction, ...]:
    """The corrections that the settings ask for, the sweep's after the others."""
    names = list(settings.corrections)
    return parse_corrections([*names, "sweep"] if settings.sweep else names)


def _resolve(model: str) -> tuple[str, str]:
    """Path or hub id, and the kind of source."""
    if model.startswith(PREFIX):
        return str(sample_path(model)), "sample"
    if Path(model).exists():
        return model, "checkpoint"
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", model) and not model.startswith("."):
        return model, "hub"
    raise MxdiagError(
        "no such file or folder",
        where=model,
        advice="Give a local folder, a .safetensors file, a hub id, sample:dense or sample:moe",
    )


def _own_calibration(kind: str) -> Path | None:
    return calibration_path() if kind in ("sample", "checkpoint", "hub") else None


def assemble(measured: Measured, settings: ScanSettings, corrections: Iterable[Correction]) -> Run:
    """The run: rows, totals, coverage, settings and environment in the contract's form."""
    # Files and modules hold layers in different orders: rows go by name, numbers by value.
    measurements = sorted(measured.measurements, key=lambda m: natural_key(m.linear.layer))
    coverage = {
        **measured.coverage.as_dict(),
        "not_observed": not_observed(measurements),
        "unmeasured_by_design": list(UNMEASURED_BY_DESIGN),
    }
    data = {
        "schema_version": SCHEMA_VERSION,
        "mxdiag_version": __version__,
        "created": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "model": measured.model,
        "settings": settings.as_dict(),
        "environment": run_environment(
            measured.device, _backend(measured.device, settings.backend)
        ),
        "coverage": coverage,
        "tensors": [measurement.as_row() for measurement in measurements],
        "totals": totals(measurements, settings.scale_rule),
        "corrections": {c.name: dataclasses.asdict(c.cost) for c in corrections},
        "impact": None,
        "warnings": measured.warnings + _warnings(measurements),
    }
    return Run(strict(data))


def _backend(device: str, backend: str) -> str:
    """The backend that `auto` stands for on a device."""
    if backend != "auto":
        return backend
    return "triton" if device.startswith("cuda") else "cpu"


def recommend(run: Run, **options: Any) -> Recommendation:
    """Recommend a correction for every row, and put it into the run.

    Fills each row's `recommended` and `reason`, and `recommendation` in `run.json`. Options are
    those of `mxdiag.recommendation.recommend`.

    Raises
    ------
    UsageError
        On a target or a correction that the run cannot serve.
    """
    result = recommendation.recommend(run.tensors, impact=run.data.get("impact"), **options)
    for row, choice in zip(run.tensors, result.choices, strict=True):
        row["recommended"], row["reason"] = choice.recommended, choice.reason
    run.data["recommendation"] = strict(
        {
            "targets": result.targets,
            "totals": result.totals,
            "gap": result.gap,
            "schedule": result.schedule and dataclasses.asdict(result.schedule),
            "sentences": result.sentences,
        }
    )
    return result


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts `layers.10` behind `layers.9`."""
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in pieces]


def _warnings(measurements: Iterable[Measurement]) -> list[str]:
    """What a reader must know before trusting a row."""
    nonfinite = [m for m in measurements if m.decomposition.status == "nonfinite"]
    if not nonfinite:
        return []
    first = nonfinite[0]
    return [
        f"{len(nonfinite)} rows hold NaN or infinite values, the first is {first.linear.layer} "
        f"({first.cell.operand}·{first.cell.gemm}): their numbers leave those blocks out"
    ]


def gate(
    run: Path | str,
    budget: Path | str,
    *,
    baseline: Path | str | None = None,
    allow_not_observed: Iterable[str] = (),
    allow_unsupported: Iterable[str] = (),
) -> Verdict:
    """Judge a run folder by a budget file: see `mxdiag.budget.evaluate`."""
    return evaluate(
        Run.load(run),
        load_budget(budget),
        baseline=None if baseline is None else Run.load(baseline),
        allow_not_observed=allow_not_observed,
        allow_unsupported=allow_unsupported,
    )


def suggest(run: Path | str, **margins: Any) -> str:
    """A budget that a run meets, as TOML: see `mxdiag.budget.suggest_budget`."""
    return suggest_budget(Run.load(run), **margins)


def diff(before: Path | str, after: Path | str) -> Diff:
    """What moved between two runs: see `mxdiag.compare.diff_runs`."""
    return diff_runs(Run.load(before), Run.load(after))


def impact_settings(config: Path | None, options: Mapping[str, Any]) -> ImpactSettings:
    """Settings of an impact measurement: its own options, and those that it shares with a scan.

    `operands` are operand sets here (`W`, `WA`, `GWA` ...). A TOML file holds the shared ones.

    Raises
    ------
    UsageError
        On an unknown option, or a value that it cannot take.
    """
    from mxdiag.injection.settings import DEFAULT_SAMPLES, ImpactSettings

    own = {field.name for field in dataclasses.fields(ImpactSettings)} - {"scan"}
    shared = {name: value for name, value in options.items() if name not in own}
    if shared.get("samples") is None and (config is None or "samples" not in read_config(config)):
        shared["samples"] = DEFAULT_SAMPLES
    chosen: dict[str, Any] = {}
    for name in own & set(options):
        value = options[name]
        if value is None:
            continue
        if name in ("passes", "configs", "operands"):
            value = split_names(value)
        chosen[name] = tuple(value) if isinstance(value, list) else value
    return ImpactSettings(scan=scan_settings(config, shared), **chosen)


def impact(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    run: Run | None = None,
    calibration: str | Path | Iterable[Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    settings: ImpactSettings | None = None,
    progress: Progress = QUIET,
    **options: Any,
) -> Run:
    """Measure what each error component, and each correction, does to the whole model.

    Parameters
    ----------
    model, tokenizer, calibration, loss
        As in `scan`.
    run
        The run to add to; without one the model is scanned first.
    settings
        The options; or give them as keyword arguments by name (`configs="components"`,
        `passes="forward"`, `repeats=5`, and those of `scan`).
    progress
        Hears how the work gets on.

    Returns
    -------
    Run
        The run, with its `impact` part filled in: an earlier one is replaced, except for rollouts
        and single layers.

    Raises
    ------
    MxdiagError
        What is wrong, where, and what to do.
    """
    from mxdiag.injection.configurations import configurations
    from mxdiag.injection.run import measure_impact

    if settings is None:
        settings = impact_settings(None, options)
    elif options:
        raise UsageError("give either settings or options, not both")
    configurations(settings)  # bad names are told before anything is loaded
    source = str(model) if isinstance(model, (str, Path)) else type(model).__name__
    if run is not None and run.data["model"].get("source") != source:
        raise UsageError(
            f"the run is of {run.data['model'].get('source')!r}, not of {source!r}",
            where=run.folder,
            advice="Choose another --out",
        )
    calibration = settings.scan.calib if calibration is None else calibration
    if isinstance(model, (str, Path)):
        path, kind = _resolve(str(model))
        calibration = _own_calibration(kind) if calibration is None else calibration
        measured = _load_and_inject(path, calibration, settings, loss, progress)
    elif calibration is None:
        raise UsageError("no calibration was given", advice="Pass calibration=records")
    else:
        calibration = calibration if isinstance(calibration, (str, Path)) else list(calibration)
        measured = measure_impact(
            model, tokenizer, calibration, settings, loss=loss, progress=progress
        )
    if run is None:
        run = scan(
            model,
            tokenizer,
            calibration=calibration,
            loss=loss,
            settings=settings.scan,
            progress=progress,
        )
    before = run.data.get("impact") or {}
    kept = {name: before[name] for name in ("rollout", "per_layer") if before.get(name)}
    run.data["impact"] = strict({**measured, **kept})
    return run


def _load_and_inject(
    path: str,
    calibration: Any,
    settings: ImpactSettings,
    loss: Callable[[Any, Any], Any] | None,
    progress: Progress,
) -> dict[str, Any]:
    from mxdiag.collect.loading import load_model, load_tokenizer
    from mxdiag.injection.run import measure_impact

    options = settings.scan
    progress.note(f"loading {path}")
    loaded = load_model(
        path,
        dtype=options.dtype,
        device=options.device,
        trust_remote_code=options.trust_remote_code,
        allow_pickle=options.allow_pickle,
        revision=options.revision,
    )
    tokenizer = load_tokenizer(
        path, trust_remote_code=options.trust_remote_code, revision=options.revision
    )
    measured = measure_impact(
        loaded.model,
        tokenizer,
        calibration,
        settings,
        loss=loss,
        progress=progress,
        absent=loaded.absent,
    )
    measured["warnings"] = [*loaded.warnings, *measured["warnings"]]
    return measured
