"""`impact`: what each error component, and each correction, does to the whole model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdiag.analyze.scanning import (
    check_loss,
    check_model,
    own_calibration,
    resolve,
    scan,
    scan_settings,
)
from mxdiag.collect.calibration import listed
from mxdiag.errors import UsageError
from mxdiag.progress import QUIET, Progress
from mxdiag.run import Run, strict
from mxdiag.settings import read_config, split_names

if TYPE_CHECKING:
    from torch import nn

    from mxdiag.injection.command import Extras
    from mxdiag.injection.settings import ImpactSettings

#: Parts of an impact that stay in a run when it is measured again without them.
_KEPT = ("rollout", "per_layer", "per_layer_ranking", "per_layer_notes")


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
        if name in ("passes", "configs", "operands") and isinstance(value, (str, list, tuple)):
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
        Rollouts, and one layer at a time.
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
    from mxdiag.injection.command import Extras, measure_all
    from mxdiag.injection.configurations import configurations
    from mxdiag.injection.settings import ImpactSettings

    if settings is None:
        settings = impact_settings(None, options)
    elif options:
        raise UsageError("give either settings or options, not both")
    if not isinstance(settings, ImpactSettings):
        raise UsageError(f"settings cannot be of type {type(settings).__name__}")
    extras = Extras() if extras is None else extras
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
        kind = resolve(str(model))[1]
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
        from mxdiag.collect.scan_model import load

        loaded, tokenizer = load(resolve(str(model))[0], settings.scan, progress)
        model, absent, notes = loaded.model, loaded.absent, loaded.warnings
    measured = measure_all(model, tokenizer, calibration, settings, extras, loss, progress, absent)
    measured["warnings"] = [*notes, *measured["warnings"]]
    before = run.data.get("impact") or {}
    kept = {name: before[name] for name in _KEPT if before.get(name) and not measured.get(name)}
    run.data["impact"] = strict({**measured, **kept})
    return run


def validate(run: Run, *, progress: Progress = QUIET, **options: Any) -> dict[str, Any]:
    """Run the run's model with the recommended corrections: see `mxdiag.injection.validation`."""
    from mxdiag.injection.validation import validate as measure
    from mxdiag.injection.validation import validation_settings

    settings = validation_settings(run, **options)
    return measure(run, settings=settings, progress=progress)
