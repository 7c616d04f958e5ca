"""The options of a scan: one dataclass, filled from arguments, a TOML file or the command line."""

from __future__ import annotations

import dataclasses
import tomllib
import types
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdiag.errors import UsageError
from mxdiag.formats import SCALE_RULES
from mxdiag.gemms import choose_cells
from mxdiag.quantize.dispatch import BACKENDS

DEVICES = ("auto", "cpu", "cuda")
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True, slots=True)
class ScanSettings:
    """What to measure and how. Field names are the option names with underscores.

    `gemms` None measures W in fprop, A in fprop and G in dgrad; a list measures every operand of
    the GEMMs in it. `samples` None runs every calibration record. `corrections` holds `default`,
    `all`, `none` or names; `sweep` `scale` adds the scale-precision sweep.
    """

    operands: tuple[str, ...] = ("W", "A", "G")
    gemms: tuple[str, ...] | None = None
    scale_rule: str = "rceil"
    weights_only: bool = False
    calib: str | None = None
    seq_len: int = 512
    samples: int | None = 16
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
        _one_of("scale-rule", self.scale_rule, tuple(SCALE_RULES))
        _one_of("device", self.device, DEVICES)
        _one_of("dtype", self.dtype, DTYPES)
        _one_of("backend", self.backend, BACKENDS)
        if self.sweep is not None:
            _one_of("sweep", self.sweep, ("scale",))
        for name in ("seq_len", "samples"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UsageError(f"--{name.replace('_', '-')} must be at least 1, not {value}")

    def as_dict(self) -> dict[str, Any]:
        """The options by name, for `run.json`."""
        return dataclasses.asdict(self)


def check_types(settings: Any) -> None:
    """Refuse options of a wrong type, by name.

    Raises
    ------
    UsageError
        If a field of the dataclass is not what its hint says.
    """
    for name, hint in typing.get_type_hints(type(settings)).items():
        value = getattr(settings, name)
        kinds = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
        if not any(_has_type(value, kind) for kind in kinds):
            raise UsageError(f"--{name.replace('_', '-')} cannot be {value!r}")


def _has_type(value: Any, kind: Any) -> bool:
    """Whether a value is of a kind; an integer is a float as well, True is no integer."""
    if typing.get_origin(kind) is tuple:
        item_kind = typing.get_args(kind)[0]
        return type(value) is tuple and all(_has_type(item, item_kind) for item in value)
    return type(value) is kind or (kind is float and type(value) is int)


def _one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(
            f"--{option} {value!r} is not known", advice=f"Use one of {', '.join(known)}"
        )


def split_names(value: str | typing.Iterable[str]) -> tuple[str, ...]:
    """Names from `a,b` or from a list of such."""
    pieces = [value] if isinstance(value, str) else list(value)
    return tuple(name.strip() for piece in pieces for name in piece.split(",") if name.strip())


def read_config(path: Path) -> dict[str, Any]:
    """Scan options from a TOML file; keys are the option names, dashes or underscores.

    Raises
    ------
    UsageError
        If the file cannot be read, is not TOML, or holds an unknown option or a wrong type.
    """
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(f"cannot read: {error.strerror or error}", where=path) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"not valid TOML: {error}", where=path) from None
    hints = typing.get_type_hints(ScanSettings)
    options: dict[str, Any] = {}
    for key, value in content.items():
        name = key.replace("-", "_")
        if name not in hints:
            known = ", ".join(sorted(hint.replace("_", "-") for hint in hints))
            raise UsageError(f"unknown option {key!r}", where=path, advice=f"Known: {known}")
        options[name] = _converted(value, hints[name], key, path)
    return options


def _converted(value: Any, hint: Any, key: str, path: Path) -> Any:
    allowed = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    if any(typing.get_origin(kind) is tuple for kind in allowed):
        strings = isinstance(value, list) and all(isinstance(item, str) for item in value)
        if isinstance(value, str) or strings:
            return split_names(value)
    elif any(type(value) is kind for kind in allowed):
        return value
    raise UsageError(f"option {key!r} cannot be {value!r}", where=path)
