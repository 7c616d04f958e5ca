"""Writes a budget that a run meets."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence

from mxdiag.commands.gate.budget import Globs
from mxdiag.commands.gate.measures import UNMEASURED
from mxdiag.errors import BudgetError, UsageError
from mxdiag.run.columns import Row, finite
from mxdiag.run.run import Run

RULE_GRANULARITIES = ("auto", "row", "role")
#: Above this many rows `auto` writes a rule per role instead of one per row: a file of more than
#: some ten thousand lines is not one that anybody reviews.
MAX_ROWS = 2000
_MAX_NAMES = 50


def suggest_budget(
    run: Run,
    *,
    sqnr_margin: float = 0.25,
    frac_margin: float = 0.05,
    granularity: str = "auto",
) -> str:
    """A budget, as TOML, that this run meets with a margin.

    Per row: SQNR at least sqnr_db - sqnr_margin, recoverable and deadzone_frac at most
    themselves + frac_margin. A row without error has to stay so. What was not observed or is
    unsupported is allowed by name.

    Parameters
    ----------
    sqnr_margin
        In dB.
    frac_margin
        Added to fractions.
    granularity
        `row`; `role`: one rule per role, operand and GEMM with the worst row's values; `auto`:
        `row` up to 2000 rows, above that `role`.

    Raises
    ------
    UsageError
        If a margin is negative or no number, or the granularity is unknown.
    BudgetError
        If no budget can pass: a row has non-finite values, or nothing was measured.
    """
    for name, margin in (("SQNR", sqnr_margin), ("fraction", frac_margin)):
        if not 0 <= margin < math.inf:
            raise UsageError(f"the {name} margin is {margin}", advice="Give zero or more")
    if granularity not in RULE_GRANULARITIES:
        raise UsageError(
            f"unknown granularity {granularity!r}", advice=f"Use {', '.join(RULE_GRANULARITIES)}"
        )
    broken = [
        row["layer"] for row in run.tensors if row["status"] == "nonfinite" or row.get("nonfinite")
    ]
    if broken:
        raise BudgetError(f"no budget can pass: {broken[0]!r} holds a NaN or an infinity")
    rows = [row for row in run.tensors if row["status"] not in UNMEASURED]
    if not rows:
        raise BudgetError("no budget can pass: nothing was measured")
    by_row = granularity == "row" or (granularity == "auto" and len(rows) <= MAX_ROWS)
    groups = _by_row(rows) if by_row else _by_role(rows)
    parts = [_head(len(rows), by_row, sqnr_margin, frac_margin), _coverage(run)]
    parts += [
        _rule(name, select, group, sqnr_margin, frac_margin)
        for name, (select, group) in groups.items()
    ]
    return "\n".join(parts)


def _text(value: str) -> str:
    """A TOML basic string."""
    escapes = {'"': '\\"', "\\": "\\\\", "\n": "\\n", "\t": "\\t", "\r": "\\r"}

    def escape(match: re.Match[str]) -> str:
        return escapes.get(match.group(), f"\\u{ord(match.group()):04x}")

    return '"' + re.sub(r'["\\\x00-\x1f\x7f]', escape, value) + '"'


def _list(values: Sequence[str]) -> str:
    return "[]" if not values else "[\n" + "".join(f"    {_text(v)},\n" for v in values) + "]"


Groups = Mapping[str, tuple[Mapping[str, str], list[Row]]]


def _by_row(rows: Iterable[Row]) -> Groups:
    return {
        f"{row['layer']} {row['operand']} {row['gemm']}": (
            {"layer": row["layer"], "operand": row["operand"], "gemm": row["gemm"]},
            [row],
        )
        for row in rows
    }


def _by_role(rows: Iterable[Row]) -> Groups:
    groups: dict[str, tuple[Mapping[str, str], list[Row]]] = {}
    for row in rows:
        role = row.get("role")
        # A row without a role can only be named by its layer.
        who = {"layer": row["layer"]} if role is None else {"role": role}
        select = {**who, "operand": row["operand"], "gemm": row["gemm"]}
        name = f"{role or row['layer']} {row['operand']} {row['gemm']}"
        groups.setdefault(name, (select, []))[1].append(row)
    return groups


def _head(rows: int, by_row: bool, sqnr_margin: float, frac_margin: float) -> str:
    how = "a rule per row" if by_row else "a rule per role, operand and GEMM, after its worst row"
    return (
        f"# Suggested by mxdiag from a run of {rows} rows: {how}.\n"
        f"# Margins: {sqnr_margin:g} dB of SQNR, {frac_margin:g} of fractions.\n"
    )


def _coverage(run: Run) -> str:
    """`[coverage]` allowing what this run lacks, by name; by pattern where the names are many."""
    coverage = run.data.get("coverage") or {}
    unseen = [row["layer"] for row in run.tensors if row["status"] == "not_observed"]
    unseen += [item.get("layer") for item in coverage.get("not_observed") or []]
    unread = [item.get("layer") for item in coverage.get("unsupported") or []]
    lines = ["[coverage]"]
    for key, names in (("allow_not_observed", unseen), ("allow_unsupported", unread)):
        patterns = list(dict.fromkeys(Globs.escape(name) for name in names if name))
        if len(patterns) > _MAX_NAMES:
            lines.append("# Numbers are patterns here, since the names are many.")
            loose = (re.sub(r"\d+", "*", Globs.escape(name)) for name in names if name)
            patterns = list(dict.fromkeys(loose))
        lines.append(f"{key} = {_list(patterns)}")
    fraction = finite(coverage.get("parameter_fraction"))
    if fraction is not None and fraction > 0:
        lines.append(f"min_parameter_fraction = {_down(min(fraction, 1.0), 4):g}")
    return "\n".join(lines) + "\n"


def _down(value: float, digits: int) -> float:
    """Rounded down, so that a minimum stays met."""
    rounded = round(value, digits)
    return rounded if rounded <= value else round(rounded - 10.0**-digits, digits)


def _up(value: float, digits: int) -> float:
    """Rounded up, so that a maximum stays met."""
    return -_down(-value, digits)


def _rule(
    name: str,
    select: Mapping[str, str],
    rows: Sequence[Row],
    sqnr_margin: float,
    frac_margin: float,
) -> str:
    bounds = []
    sqnr = _known(rows, "sqnr_db", min)
    if sqnr is not None:
        bounds.append(f"sqnr_db = {{ min = {_down(sqnr - sqnr_margin, 2)!r} }}")
    elif all(row["status"] == "exact" for row in rows):
        bounds.append("rel_mse = { max = 0.0 }")
    recoverable = _known(rows, "recoverable", max)
    if recoverable is not None:
        bounds.append(f"recoverable = {{ max = {_up(recoverable + frac_margin, 4)!r} }}")
    deadzone = _known(rows, "deadzone_frac", max)
    if deadzone is not None:
        bounds.append(f"deadzone_frac = {{ max = {min(_up(deadzone + frac_margin, 4), 1.0)!r} }}")
    lines = ["[[rule]]", f"name = {_text(name)}"]
    lines += [f"{key} = {_text(Globs.escape(value))}" for key, value in select.items()]
    lines.append(f"bounds = {{ {', '.join(bounds)} }}")
    return "\n".join(lines) + "\n"


def _known(
    rows: Sequence[Row], metric: str, worst: Callable[[Iterable[float]], float]
) -> float | None:
    values = [value for row in rows if (value := finite(row.get(metric))) is not None]
    return worst(values) if values else None
