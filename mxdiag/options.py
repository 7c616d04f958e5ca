"""Options as typed dataclasses: checked, and read from TOML files."""

from __future__ import annotations

import tomllib
import types
import typing
from pathlib import Path
from typing import Any

from mxdiag.errors import UsageError


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


def one_of(option: str, value: str, known: tuple[str, ...]) -> None:
    """Refuse a value that is not among the known ones, naming the option."""
    if value not in known:
        raise UsageError(
            f"--{option} {value!r} is not known", advice=f"Use one of {', '.join(known)}"
        )


def split_names(value: str | typing.Iterable[str]) -> tuple[str, ...]:
    """Names from `a,b` or from a list of such."""
    pieces = [value] if isinstance(value, str) else list(value)
    return tuple(name.strip() for piece in pieces for name in piece.split(",") if name.strip())


def read_config(path: Path, settings: type) -> dict[str, Any]:
    """Options of a dataclass from a TOML file; keys are the option names, dashes or underscores.

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
    hints = typing.get_type_hints(settings)
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
