"""The Python API: one function a command, and nothing that prints.

Every name here is re-exported by `mxdiag`. A run is taken as a `Run` or as the folder it lies in.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdiag import __version__
from mxdiag.commands.diff.compare import Diff, diff_runs
from mxdiag.commands.gate.evaluate import evaluate
from mxdiag.commands.gate.parse import load_budget
from mxdiag.commands.gate.suggest import suggest_budget
from mxdiag.commands.gate.verdict import Verdict
from mxdiag.commands.recommend.choose import Recommendation, choose
from mxdiag.commands.scan.assemble import assemble
from mxdiag.commands.scan.settings import ScanSettings, chosen_corrections, scan_settings
from mxdiag.commands.scan.source import (
    WEIGHT_FILES,
    check_loss,
    check_model,
    own_calibration,
    resolve_source,
)
from mxdiag.errors import UsageError
from mxdiag.model.calibration import listed
from mxdiag.progress import QUIET, Progress
from mxdiag.quantize.dispatch import first_use
from mxdiag.run.merge import merge_runs
from mxdiag.run.run import SCHEMA_VERSION, Run, strict
from mxdiag.run.schema import json_schema

if TYPE_CHECKING:
    from torch import nn

    from mxdiag.commands.impact.command import Extras
    from mxdiag.commands.impact.settings import ImpactSettings

__all__ = [
    "diff",
    "gate",
    "impact",
    "merge",
    "recommend",
    "report",
    "scan",
    "schema",
    "suggest",
    "validate",
]


def _loaded(run: Run | Path | str) -> Run:
    return run if isinstance(run, Run) else Run.load(run)


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
    if not isinstance(settings, ScanSettings):
        raise UsageError(f"settings cannot be of type {type(settings).__name__}")
    check_model(model)
    check_loss(loss)
    calibration = listed(calibration)
    corrections = chosen_corrections(settings)
    if first_use(settings.backend):
        progress.note("compiling the CPU kernels (first use; they are cached)")
    if isinstance(model, (str, Path)):
        path, kind = resolve_source(str(model))
        weights_only = settings.weights_only or path.endswith(WEIGHT_FILES)
        if weights_only:
            from mxdiag.checkpoint.hub import hub_folder
            from mxdiag.commands.scan.checkpoint import scan_checkpoint

            if kind == "hub":
                path = str(hub_folder(path, settings.revision))
            measured = scan_checkpoint(path, settings, corrections, progress)
        else:
            from mxdiag.commands.scan.model import Request, load_and_scan

            if calibration is None:
                calibration = settings.calib or own_calibration(kind)
            request = Request(settings, corrections, progress, calibration, loss)
            measured = load_and_scan(path, request)
        source = str(model)
    else:
        from mxdiag.commands.scan.model import Request, scan_module

        kind, source = "module", type(model).__name__
        calibration = settings.calib if calibration is None else calibration
        request = Request(settings, corrections, progress, calibration, loss)
        measured = scan_module(model, tokenizer, request)
    measured.model.update(source=source, kind=kind)
    run = assemble(measured, settings, corrections)
    if corrections:
        recommend(run)
    return run


def merge(runs: Iterable[Run | Path | str]) -> Run:
    """Add up runs of one model over other records: equal to one scan of all the records.

    Equal to 1e-12 relative in every column, whatever their order. Gradients merge where the runs
    divided their losses by the same number (`loss_tokens`), the labelled tokens of all records.

    Parameters
    ----------
    runs
        Two or more runs, or their folders, with the same settings but for the records.

    Returns
    -------
    Run
        With recommendations of its own; impact measurements are no sums, and are left out.

    Raises
    ------
    RunError
        If they cannot be added up: what differs, where, and what to do.
    """
    merged = merge_runs([_loaded(run) for run in runs], __version__)
    if merged.data.get("corrections"):
        recommend(merged)
    return merged


def schema() -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of `run.json`, with what every column means."""
    return json_schema(SCHEMA_VERSION)


def impact(
    model: str | Path | nn.Module,
    tokenizer: Any = None,
    *,
    run: Run | None = None,
    calibration: str | Path | Iterable[Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    settings: ImpactSettings | None = None,
    extras: Extras | None = None,
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
    extras
        Rollouts, and one layer at a time; or give them as keyword arguments by name
        (`rollout_tokens=16`, `per_layer="layer"`).
    progress
        Hears how the work gets on.

    Returns
    -------
    Run
        The run, with its `impact` part filled in: an earlier one is replaced, except for rollouts
        and single layers that are not measured again.

    Raises
    ------
    MxdiagError
        What is wrong, where, and what to do.
    """
    from mxdiag.commands.impact.command import Extras, measure_all, merged
    from mxdiag.commands.impact.inject.configurations import configurations
    from mxdiag.commands.impact.settings import ImpactSettings, impact_settings

    if extras is None:
        own = {field.name for field in dataclasses.fields(Extras)}
        extras = Extras(**{name: options.pop(name) for name in own & set(options)})
    if settings is None:
        settings = impact_settings(None, options)
    elif options:
        raise UsageError("give either settings or options, not both")
    if not isinstance(settings, ImpactSettings):
        raise UsageError(f"settings cannot be of type {type(settings).__name__}")
    configurations(settings)  # bad names are told before anything is loaded
    extras.check()
    check_model(model)
    check_loss(loss)
    source = str(model) if isinstance(model, (str, Path)) else type(model).__name__
    if run is not None and run.data["model"].get("source") != source:
        raise UsageError(
            f"the run is of {run.data['model'].get('source')!r}, not of {source!r}",
            where=run.folder,
            advice="Choose another --out",
        )
    calibration = settings.scan.calib if calibration is None else calibration
    if isinstance(model, (str, Path)):
        kind = resolve_source(str(model))[1]
        calibration = own_calibration(kind) if calibration is None else calibration
    calibration = listed(calibration)
    if calibration is None:
        raise UsageError("no calibration was given", advice="Pass calibration=records")
    if run is None:
        run = scan(
            model,
            tokenizer,
            calibration=calibration,
            loss=loss,
            settings=settings.scan,
            progress=progress,
        )
    notes: list[str] = []
    absent: tuple[str, ...] = ()
    if isinstance(model, (str, Path)):
        from mxdiag.commands.scan.model import load_with_tokenizer

        loaded, tokenizer = load_with_tokenizer(
            resolve_source(str(model))[0], settings.scan, progress
        )
        model, absent, notes = loaded.model, loaded.absent, loaded.warnings
    measured = measure_all(model, tokenizer, calibration, settings, extras, loss, progress, absent)
    measured["warnings"] = [*notes, *measured["warnings"]]
    run.data["impact"] = strict(merged(run.data.get("impact") or {}, measured))
    return run


def recommend(run: Run | Path | str, **options: Any) -> Recommendation:
    """Recommend a correction for every row, and put it into the run.

    Fills each row's `recommended` and `reason`, and `recommendation` in `run.json`.

    Parameters
    ----------
    run
        A `Run`, or its folder, to which it is then written.
    options
        Those of `mxdiag.commands.recommend.choose.choose`: `target_sqnr`, `target_mse_ratio`,
        `max_bits`, `allow`, `fuse`, `sensitivities`.

    Raises
    ------
    UsageError
        On a target or a correction that the run cannot serve.
    """
    loaded = _loaded(run)
    result = choose(loaded.tensors, impact=loaded.data.get("impact"), **options)
    for row, choice in zip(loaded.tensors, result.choices, strict=True):
        row["recommended"], row["reason"] = choice.recommended, choice.reason
    loaded.data["recommendation"] = strict(
        {
            "targets": result.targets,
            "totals": result.totals,
            "gap": result.gap,
            "schedule": result.schedule and dataclasses.asdict(result.schedule),
            "sentences": result.sentences,
        }
    )
    if loaded is not run and loaded.folder is not None:
        loaded.write(loaded.folder)
    return result


def validate(
    run: Run | Path | str,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    *,
    calibration: str | Path | Iterable[Any] | None = None,
    loss: Callable[[Any, Any], Any] | None = None,
    progress: Progress = QUIET,
    **options: Any,
) -> dict[str, Any]:
    """Run the run's model with the recommended corrections beside plain MXFP4.

    Fills `recommendation.validation` of the run, and returns it: see
    `mxdiag.commands.recommend.validation.validate_recommendation`.

    Parameters
    ----------
    run
        With recommendations in its rows.
    model, tokenizer
        The model, where it is in memory; else the one that the run names is loaded.
    calibration, loss, progress
        As in `scan`; without `calibration` the run's own is used.
    options
        Fields of the run's impact settings to replace, such as `samples` and `repeats`.

    Raises
    ------
    MxdiagError
        If the run holds no recommendation, or its model cannot be loaded or run.
    """
    from mxdiag.commands.recommend.validation import validate_recommendation as measure
    from mxdiag.commands.recommend.validation import validation_settings

    loaded = _loaded(run)
    return measure(
        loaded,
        model,
        tokenizer,
        calibration=calibration,
        settings=validation_settings(loaded, **options),
        loss=loss,
        progress=progress,
    )


def gate(
    run: Run | Path | str,
    budget: Path | str,
    *,
    baseline: Run | Path | str | None = None,
    allow_not_observed: Iterable[str] = (),
    allow_unsupported: Iterable[str] = (),
) -> Verdict:
    """Judge a run by a budget file.

    Parameters
    ----------
    run, baseline
        What is judged, and an earlier run to compare with.
    budget
        TOML file of rules.
    allow_not_observed, allow_unsupported
        Patterns of layers, added to the budget's own.

    Returns
    -------
    Verdict
        `.passed`, `.exit_code`, `.findings`, `.as_dict()`.

    Raises
    ------
    MxdiagError
        If a file cannot be read, or a rule cannot be applied to the run.
    """
    return evaluate(
        _loaded(run),
        load_budget(budget),
        baseline=None if baseline is None else _loaded(baseline),
        allow_not_observed=allow_not_observed,
        allow_unsupported=allow_unsupported,
    )


def suggest(run: Run | Path | str, **margins: Any) -> str:
    """A budget that a run meets, as TOML: see `mxdiag.commands.gate.suggest.suggest_budget`."""
    return suggest_budget(_loaded(run), **margins)


def diff(before: Run | Path | str, after: Run | Path | str) -> Diff:
    """What moved between two runs: see `mxdiag.commands.diff.compare.diff_runs`."""
    return diff_runs(_loaded(before), _loaded(after))


def report(
    run: Run | Path | str,
    kind: str = "html",
    *,
    out: Path | str | None = None,
    budget: Path | str | None = None,
    baseline: Run | Path | str | None = None,
) -> Path | None:
    """Write a run's report: `html`, `csv`, `markdown` or `parquet`.

    Parameters
    ----------
    run
        The run; its model is not needed.
    out
        A file; `-` is standard output. By default `report.html`, `report.md` ... in the run's
        folder.
    budget, baseline
        The report shows the verdict of this budget.

    Returns
    -------
    The file's path, None for standard output.

    Raises
    ------
    MxdiagError
        If the run or the budget cannot be read, or the report cannot be written.
    """
    from mxdiag.commands.report.write import write_report

    loaded = _loaded(run)
    verdict = None if budget is None else gate(loaded, budget, baseline=baseline).as_dict()
    return write_report(loaded, kind, out=None if out is None else Path(out), gate=verdict)
