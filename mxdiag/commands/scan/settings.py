"""The options of a scan: one dataclass, filled from arguments, a TOML file or the command line."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdiag.errors import UsageError
from mxdiag.formats import SCALE_RULES
from mxdiag.gemms import choose_cells
from mxdiag.options import check_types, one_of, read_config, split_names
from mxdiag.quantize.corrections.base import Correction
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.quantize.dispatch import BACKENDS

DEVICES = ("auto", "cpu", "cuda")
MODEL_DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ScanSettings:
    """What to measure and how. Field names are the option names with underscores.

    `gemms` None measures W in fprop, A in fprop and G in dgrad; a list measures every operand of
    the GEMMs in it. `samples` None runs every calibration record. `loss_tokens` is what the loss is
    divided by: the labelled tokens of the records by default, those of all records where this run
    is one of several that will be merged. `corrections` holds `default`,
    `all`, `none` or names; `sweep` `scale` adds the scale-precision sweep.
    """

    operands: tuple[str, ...] = ("W", "A", "G")
    gemms: tuple[str, ...] | None = None
    scale_rule: str = "rceil"
    weights_only: bool = False
    calib: str | None = None
    seq_len: int = 512
    samples: int | None = 16
    loss_tokens: int | None = None
    include: tuple[str, ...] = ()
    exclude: tuple[str, ...] = ()
    device: str = "auto"
    dtype: str = "auto"
    backend: str = "auto"
    corrections: tuple[str, ...] = ("default",)
    sweep: str | None = None
    seed: int = 0
    revision: str | None = None
    trust_remote_code: bool = False
    allow_pickle: bool = False

    def __post_init__(self) -> None:
        check_types(self)
        choose_cells(self.operands, self.gemms)
        one_of("scale-rule", self.scale_rule, tuple(SCALE_RULES))
        one_of("device", self.device, DEVICES)
        one_of("dtype", self.dtype, MODEL_DTYPES)
        one_of("backend", self.backend, BACKENDS)
        if self.sweep is not None:
            one_of("sweep", self.sweep, ("scale",))
        for name in ("seq_len", "samples", "loss_tokens"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")

    def as_dict(self) -> dict[str, Any]:
        """The options by name, for `run.json`."""
        return dataclasses.asdict(self)


_NAME_LISTS = ("operands", "gemms", "corrections")


def scan_settings(config: Path | None, options: Mapping[str, Any]) -> ScanSettings:
    """Settings from a TOML file, overruled by the options that are not None.

    Raises
    ------
    UsageError
        On an unknown option, or a value that it cannot take.
    """
    known = {field.name for field in dataclasses.fields(ScanSettings)}
    chosen = {} if config is None else read_config(config, ScanSettings)
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


def chosen_corrections(settings: ScanSettings) -> tuple[Correction, ...]:
    """The corrections that the settings ask for, the sweep's after the others."""
    names = list(settings.corrections)
    return parse_corrections([*names, "sweep"] if settings.sweep else names)
