"""The options of an impact measurement; no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from mxdiag.commands.scan.settings import ScanSettings, scan_settings
from mxdiag.errors import UsageError
from mxdiag.options import check_types, read_config, split_names

PASSES = ("forward", "backward", "both")
#: Operand sets of each pass, in the order of the tables.
OPERAND_SETS = {"forward": ("W", "A", "WA"), "backward": ("G", "GWA"), "both": ("GWA",)}
#: Records that are run unless asked otherwise: each is run some two hundred times.
DEFAULT_SAMPLES = 4


def _model_options() -> ScanSettings:
    return ScanSettings(samples=DEFAULT_SAMPLES)


@dataclass(frozen=True, slots=True)
class ImpactSettings:
    """What to inject, where, how often.

    `scan` holds the options that a scan shares: model, calibration, scale rule, corrections, seed.
    `configs` are names: `all`, `scale`, `deadzone`, `grid`, `ideal`, `scale+deadzone`,
    `scale+grid`, a correction's, `aqn:SIGMA`, `w4a8`, or the sets `default`, `components`,
    `corrections` (those of `scan`) and `aqn` (`aqn_sigmas`). `operands` None runs each
    configuration on its default sets. `jitter` is relative, on the embeddings' output.
    """

    scan: ScanSettings = field(default_factory=_model_options)
    passes: tuple[str, ...] = PASSES
    configs: tuple[str, ...] = ("default",)
    operands: tuple[str, ...] | None = None
    repeats: int = 3
    aqn_sigmas: tuple[float, ...] = (0.01, 0.003, 0.001)
    jitter: float = 1e-6

    def __post_init__(self) -> None:
        check_types(self)
        known = tuple(dict.fromkeys(name for names in OPERAND_SETS.values() for name in names))
        _some_of("passes", self.passes, PASSES)
        if self.operands is not None:
            _some_of("operands", self.operands, known)
        if not self.configs:
            raise UsageError("--configs names nothing", advice="Use default, or names such as all")
        if self.repeats < 1:
            raise UsageError(f"--repeats must be at least 1, not {self.repeats}")
        if not (math.isfinite(self.jitter) and 0 <= self.jitter <= 0.01):
            raise UsageError(
                f"--jitter {self.jitter} is out of range", advice="Use 0 to 0.01, such as 1e-6"
            )
        for sigma in self.aqn_sigmas:
            if not 0 < sigma <= 1:
                raise UsageError(
                    f"--aqn-sigmas {sigma} is out of range",
                    advice="Use fractions of the weight's rms, such as 0.01",
                )

    def as_dict(self) -> dict[str, Any]:
        """The options by name, those shared with a scan inside `scan`."""
        return dataclasses.asdict(self)


def _some_of(option: str, values: tuple[str, ...], known: tuple[str, ...]) -> None:
    unknown = [value for value in values if value not in known]
    if unknown or not values:
        what = f"--{option} {unknown[0]!r} is not known" if unknown else f"--{option} names nothing"
        raise UsageError(what, advice=f"Use some of {','.join(known)}")


def impact_settings(config: Path | None, options: Mapping[str, Any]) -> ImpactSettings:
    """Settings of an impact measurement: its own options, and those that it shares with a scan.

    `operands` are operand sets here (`W`, `WA`, `GWA` ...). A TOML file holds the shared ones.

    Raises
    ------
    UsageError
        On an unknown option, or a value that it cannot take.
    """
    own = {field.name for field in dataclasses.fields(ImpactSettings)} - {"scan"}
    shared = {name: value for name, value in options.items() if name not in own}
    if shared.get("samples") is None and (
        config is None or "samples" not in read_config(config, ScanSettings)
    ):
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
