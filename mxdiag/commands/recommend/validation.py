"""Running a model with the corrections that a run recommends, beside plain MXFP4."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from mxdiag.commands.impact.inject.configurations import Configuration, configurations
from mxdiag.commands.impact.results import impact_object
from mxdiag.commands.impact.session import Session
from mxdiag.commands.impact.settings import DEFAULT_SAMPLES, ImpactSettings
from mxdiag.commands.impact.table import impact_batches
from mxdiag.commands.impact.verdict import verdict
from mxdiag.commands.recommend.validation_plan import (
    RECOMMENDED,
    Recommended,
    comparison,
    comparison_in_words,
    predicted_by_sensitivity,
    predicted_ratios,
)
from mxdiag.commands.scan.settings import ScanSettings
from mxdiag.errors import MxdiagError, UsageError
from mxdiag.model.batches import Loss, language_task
from mxdiag.model.calibration import Calibration
from mxdiag.model.loading import load_model, load_tokenizer
from mxdiag.progress import QUIET, Progress
from mxdiag.run.run import Run, strict
from mxdiag.samples import calibration_path, sample_path

_PASSES = ("forward", "backward", "both")


def validate_recommendation(
    run: Run,
    model: nn.Module | None = None,
    tokenizer: Any = None,
    *,
    calibration: Calibration | None = None,
    settings: ImpactSettings | None = None,
    loss: Loss | None = None,
    progress: Progress = QUIET,
) -> dict[str, Any]:
    """Measure what the recommended corrections do to the model, and put it into the run.

    Fills `recommendation.validation` in `run.json`, and adds the configuration `recommended` to the
    tables of `impact` (making them if there are none; if they were measured with other settings
    they stay as they are).

    Parameters
    ----------
    run
        With recommendations in its rows.
    model, tokenizer
        The model, where it is in memory; else the one that the run names is loaded.
    calibration
        Records; else the file of the run's settings, or the built-in text.
    settings
        See `validation_settings`.
    loss
        For modules without a language-model loss.
    progress
        Hears how the work gets on.

    Returns
    -------
    dict
        The validation: `forward`, `backward` and `both` with the entries of `all` and
        `recommended`, `comparison` (see `validation_plan.comparison`), `sentences`, `notes`,
        `settings`.

    Raises
    ------
    UsageError
        If the run holds no recommendation, or names no model that can be loaded.
    ModelError, CalibrationError
        If the model cannot be loaded, or does not run.
    """
    plan = Recommended(run)
    settings = settings or validation_settings(run)
    absent: tuple[str, ...] = ()
    if model is None:
        model, tokenizer, absent = _load(run, settings.scan, progress)
    chosen = _configurations(plan, settings)
    gradients = any(c.which != "forward" for c in chosen)
    notes: list[str] = []
    source = calibration if calibration is not None else settings.scan.calib or calibration_path()
    needs_labels = gradients and loss is None and language_task(model) is not None
    batches = impact_batches(model, tokenizer, source, settings, needs_labels, notes)
    session = Session(model, batches, settings, loss=loss, absent=absent)
    phase = progress.phase("validation", session.passes(chosen), "passes")
    with session.open(gradients=gradients), phase:
        evidence = session.measure(chosen, progress)
    impact = impact_object(evidence, settings.scan.seed)
    rows = comparison(impact, predicted_ratios(run), predicted_by_sensitivity(run))
    validation = {
        **{which: impact[which] for which in _PASSES},
        "comparison": rows,
        "sentences": comparison_in_words(rows),
        "notes": [*notes, *plan.notes, *session.injector.notes],
        "settings": settings.as_dict(),
    }
    _keep(run, impact, validation)
    return validation


def validation_settings(run: Run, **options: Any) -> ImpactSettings:
    """The settings of the run's impact if it has one, else those of its scan on a few records.

    Backward passes are left out if the run holds no row of G. `options` replace fields of
    `ImpactSettings`; `samples`, `device` and other fields of `ScanSettings` those of its scan.
    """
    data = (run.data.get("impact") or {}).get("settings")
    fields = {field.name for field in dataclasses.fields(ImpactSettings)}
    if data:
        own = _known(data, fields - {"scan"})
        settings = ImpactSettings(scan=_scan_settings(data.get("scan") or {}), **own)
    else:
        scan = _scan_settings(run.data.get("settings") or {})
        samples = min(scan.samples or DEFAULT_SAMPLES, DEFAULT_SAMPLES)
        settings = ImpactSettings(scan=dataclasses.replace(scan, samples=samples))
        if not any(row["operand"] == "G" for row in run.tensors):
            settings = dataclasses.replace(settings, passes=("forward",))
    given = {name: value for name, value in options.items() if value is not None}
    own = {name: value for name, value in given.items() if name in fields}
    shared = {name: value for name, value in given.items() if name not in fields}
    return dataclasses.replace(settings, scan=dataclasses.replace(settings.scan, **shared), **own)


def _scan_settings(data: Mapping[str, Any]) -> ScanSettings:
    return ScanSettings(**_known(data, {field.name for field in dataclasses.fields(ScanSettings)}))


def _known(data: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Options as JSON holds them: lists become tuples."""
    return {
        name: tuple(data[name]) if isinstance(data[name], list) else data[name]
        for name in names
        if name in data
    }


def _load(
    run: Run, scan: ScanSettings, progress: Progress
) -> tuple[nn.Module, Any, tuple[str, ...]]:
    model = run.data.get("model") or {}
    source, kind = str(model.get("source")), model.get("kind")
    if kind == "module":
        raise UsageError(
            "the run is of a model in memory, which cannot be loaded again",
            where=source,
            advice="Call mxdiag.validate(run, model) with it",
        )
    path = str(sample_path(source)) if kind == "sample" else source
    progress.note(f"loading {source}")
    loaded = load_model(
        path,
        dtype=scan.dtype,
        device=scan.device,
        trust_remote_code=scan.trust_remote_code,
        allow_pickle=scan.allow_pickle,
        revision=scan.revision,
    )
    try:
        tokenizer = load_tokenizer(
            path, trust_remote_code=scan.trust_remote_code, revision=scan.revision
        )
    except MxdiagError:
        tokenizer = None  # records of input_ids need none; others say so themselves
    return loaded.model, tokenizer, loaded.absent


def _configurations(plan: Recommended, settings: ImpactSettings) -> list[Configuration]:
    """Plain MXFP4 and what is recommended: on W and on WA forward, on GWA in the other passes."""
    wanted = dataclasses.replace(settings, configs=("all",), operands=("W", "WA", "GWA"))
    pairs = [(c, plan.configuration(c.which, c.operands)) for c in configurations(wanted)]
    return [configuration for pair in pairs for configuration in pair]


def _keep(run: Run, impact: dict[str, Any], validation: dict[str, Any]) -> None:
    """Put both into the run."""
    known = run.data.get("impact")
    if not known:
        impact |= {
            "predictor": None,
            "settings": validation["settings"],
            "warnings": validation["notes"],
        }
        run.data["impact"] = strict({**impact, "verdict": verdict(impact)})
    elif _same_conditions(known.get("settings"), validation["settings"]):
        for which in _PASSES:
            others = [e for e in known.get(which) or [] if e["config"] != RECOMMENDED]
            own = [e for e in impact[which] if e["config"] == RECOMMENDED]
            known[which] = [*others, *strict(own)]
    else:
        validation["notes"].append(
            "the tables of `impact` were measured with other settings and stay as they are"
        )
    recommendation = run.data.get("recommendation") or {}
    run.data["recommendation"] = {**recommendation, "validation": strict(validation)}


def _same_conditions(a: Any, b: Any) -> bool:
    """Whether two settings make comparable numbers."""
    names = ("scan", "repeats", "jitter")
    first, second = strict(a or {}), strict(b or {})
    return all(first.get(name) == second.get(name) for name in names)
