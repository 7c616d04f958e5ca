"""`scan`: a model or checkpoint in, a run out."""

from __future__ import annotations

import dataclasses
import datetime
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdiag import __version__
from mxdiag.analyze.runs import recommend
from mxdiag.collect.calibration import listed
from mxdiag.corrections import Correction, parse_corrections
from mxdiag.environment import run_environment
from mxdiag.errors import MxdiagError, UsageError
from mxdiag.progress import QUIET, Progress
from mxdiag.quantize.dispatch import first_use
from mxdiag.rows import Measured, Measurement, not_observed, totals
from mxdiag.run import SCHEMA_VERSION, Run, strict
from mxdiag.samples import PREFIX, calibration_path, sample_path
from mxdiag.settings import ScanSettings, read_config, split_names

if TYPE_CHECKING:
    from torch import nn


UNMEASURED_BY_DESIGN = (
    "attention score and value products",
    "KV cache",
    "convolutions",
)
_WEIGHT_FILES = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt")
_MODELS = "Give a local folder, a .safetensors file, a hub id, sample:dense or sample:moe"
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
        if name in _NAME_LISTS and isinstance(value, (str, list, tuple)):
            value = split_names(value)
        elif name in ("include", "exclude") and isinstance(value, str):
            value = (value,)
        elif isinstance(value, list):
            value = tuple(value)
        chosen[name] = str(value) if isinstance(value, Path) else value
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
    if not isinstance(settings, ScanSettings):
        raise UsageError(f"settings cannot be of type {type(settings).__name__}")
    check_model(model)
    check_loss(loss)
    calibration = listed(calibration)
    corrections = chosen_corrections(settings)
    if first_use(settings.backend):
        progress.note("compiling the CPU kernels (first use; they are cached)")
    if isinstance(model, (str, Path)):
        path, kind = resolve(str(model))
        weights_only = settings.weights_only or path.endswith(_WEIGHT_FILES)
        if weights_only:
            from mxdiag.collect.hub import hub_folder
            from mxdiag.collect.scan_checkpoint import scan_checkpoint

            if kind == "hub":
                path = str(hub_folder(path, settings.revision))
            measured = scan_checkpoint(path, settings, corrections, progress)
        else:
            from mxdiag.collect.scan_model import Request, load_and_scan

            if calibration is None:
                calibration = settings.calib or own_calibration(kind)
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


def check_model(model: object) -> None:
    """Refuse what is neither a name nor a torch module.

    Raises
    ------
    UsageError
        If it is anything else.
    """
    torch = sys.modules.get("torch")
    if isinstance(model, (str, Path)) or (torch and isinstance(model, torch.nn.Module)):
        return
    kind = f"of type {type(model).__name__}"
    if isinstance(model, type):
        kind = f"the class {model.__name__}, only an instance"
    raise UsageError(f"the model cannot be {kind}", advice=f"{_MODELS}, or a torch module")


def check_loss(loss: object) -> None:
    """Refuse a loss that cannot be called.

    Raises
    ------
    UsageError
        If it is no function.
    """
    if loss is not None and not callable(loss):
        raise UsageError(
            f"the loss cannot be of type {type(loss).__name__}",
            advice="Pass a function loss(output, batch) -> scalar tensor",
        )


def chosen_corrections(settings: ScanSettings) -> tuple[Correction, ...]:
    """The corrections that the settings ask for, the sweep's after the others."""
    names = list(settings.corrections)
    return parse_corrections([*names, "sweep"] if settings.sweep else names)


def resolve(model: str) -> tuple[str, str]:
    """Path or hub id, and the kind of source."""
    if not model.strip():
        raise UsageError("the model's name is empty", advice=_MODELS)
    if model.startswith(PREFIX):
        return str(sample_path(model)), "sample"
    if _exists(model):
        return model, "checkpoint"
    named = re.fullmatch(r"[\w.-]{1,96}(/[\w.-]{1,96})?", model) and not model.startswith(".")
    if named and not model.endswith(_WEIGHT_FILES):
        return model, "hub"
    raise MxdiagError(
        "no such file or folder",
        where=model,
        advice=_MODELS,
    )


def _exists(model: str) -> bool:
    try:
        return Path(model).exists()
    except (OSError, ValueError):  # no file can have such a name
        return False


def own_calibration(kind: str) -> Path | None:
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


def natural_key(name: str) -> list[tuple[int, int | str]]:
    """Sorts `layers.10` behind `layers.9`."""
    pieces = re.split(r"(\d+)", name)
    return [(0, int(piece)) if piece.isdecimal() else (1, piece) for piece in pieces]


def _warnings(measurements: Iterable[Measurement]) -> list[str]:
    """What a reader must know before trusting a row."""
    measurements = list(measurements)
    notes = {
        "hold NaN or infinite values": (
            [m for m in measurements if m.decomposition.status == "nonfinite"],
            "their numbers leave those blocks out",
        ),
        "hold float64 values whose squares underflow": (
            [m for m in measurements if m.decomposition.underflows],
            "their energies and shares are unknown",
        ),
    }
    return [
        f"{len(rows)} rows {what}, the first is {rows[0].linear.layer} "
        f"({rows[0].cell.operand}·{rows[0].cell.gemm}): {so}"
        for what, (rows, so) in notes.items()
        if rows
    ]
