"""`mxdiag env`: what this machine offers."""

from __future__ import annotations

from typing import Any

from mxdiag.cli.output import print_parts


def env() -> None:
    """Show what this machine offers: versions, devices, backends."""
    from mxdiag.commands.env import describe

    for key, value in describe().items():
        print_parts(_described(key, value))


def _described(key: str, value: Any) -> str:
    if isinstance(value, dict):
        lines = (f"  {name}: {'not installed' if v is None else v}" for name, v in value.items())
        return "\n".join([f"{key}:", *lines])
    if isinstance(value, list):
        return f"{key}: {', '.join(value) or 'none'}"
    return f"{key}: {value}"
