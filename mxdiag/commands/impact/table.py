"""The whole measurement: a model and calibration in, the `impact` part of a run out."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from mxdiag.commands.impact.inject.configurations import configurations
from mxdiag.commands.impact.measures.depth import predictor
from mxdiag.commands.impact.results import impact_object
from mxdiag.commands.impact.session import Session
from mxdiag.commands.impact.settings import ImpactSettings
from mxdiag.commands.impact.verdict import verdict
from mxdiag.model.batches import Batch, Loss, language_task, make_batches, position_limit
from mxdiag.model.calibration import Calibration
from mxdiag.progress import QUIET, Progress


def measure_impact(
    model: nn.Module,
    tokenizer: Any,
    calibration: Calibration,
    settings: ImpactSettings,
    *,
    loss: Loss | None = None,
    progress: Progress = QUIET,
    absent: Iterable[str] = (),
) -> dict[str, Any]:
    """Run the model with every configuration that the settings ask for.

    Parameters
    ----------
    model
        A torch module; left as found.
    tokenizer
        Reads text records; None if the records hold `input_ids`.
    calibration
        A file, records, or the model's own inputs.
    settings
        What to inject, and the options shared with a scan.
    loss
        `loss(output, batch) -> scalar` for modules without a language-model loss.
    progress
        Hears how the work gets on.
    absent
        Parameters that the checkpoint lacked.

    Returns
    -------
    dict
        The `impact` object of a run: `reference`, `forward`, `backward`, `both`, `attribution`,
        `rollout` and `per_layer` (empty here), with `predictor`, `verdict`, `settings` and
        `warnings` beside them.

    Raises
    ------
    MxdiagError
        If the options name nothing, or the model does not run on the calibration.
    """
    chosen = configurations(settings)
    gradients = any(configuration.which != "forward" for configuration in chosen)
    notes: list[str] = []
    needs_labels = gradients and loss is None and language_task(model) is not None
    batches = impact_batches(model, tokenizer, calibration, settings, needs_labels, notes)
    session = Session(model, batches, settings, loss=loss, absent=tuple(absent))
    phase = progress.phase("impact", session.passes(chosen), "passes")
    with session.open(gradients=gradients), phase:
        evidence = session.measure(chosen, progress)
    impact = impact_object(evidence, settings.scan.seed)
    scan = settings.scan
    impact["predictor"] = (
        predictor(session.layers, session.inventory, scan.scale_rule, scan.backend)
        if gradients
        else None
    )
    impact["settings"] = settings.as_dict()
    impact["warnings"] = [*notes, *session.injector.notes]
    impact["verdict"] = verdict(impact)
    return impact


def impact_batches(
    model: nn.Module,
    tokenizer: Any,
    calibration: Calibration,
    settings: ImpactSettings,
    needs_labels: bool,
    notes: list[str],
) -> list[Batch]:
    """The records as batches, cut to what the model can hold; `notes` hears of a cut.

    Raises
    ------
    CalibrationError
        If a record cannot be used with this model.
    """
    seq_len, limit = settings.scan.seq_len, position_limit(model)
    if limit is not None and limit < seq_len:
        notes.append(f"records are cut to the model's {limit} positions")
        seq_len = limit
    return make_batches(
        model,
        calibration,
        tokenizer,
        seq_len=seq_len,
        samples=settings.scan.samples,
        gradients=needs_labels,
    )
