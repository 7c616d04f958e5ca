"""Reads a budget file: TOML, checked strictly, with every complaint at its line.

description = "..."

[coverage]                     # what is missing fails unless it is allowed here
allow_not_observed = ["*.experts.*"]
allow_unsupported = []
allow_zero = []                # all-zero tensors have no SQNR
min_parameter_fraction = 0.9

[[rule]]                       # rows, by pattern on layer, role, operand, gemm
name = "weights"               # unique; with the metric it is the stable id: weights/sqnr_db
level = "error"                # or "warn"
operand = "W"                  # one pattern or a list
aggregate = "p95"              # mean, median, p95, worst, energy; absent: every row by itself
after = "mbs+of"               # judge the rows as they are after this correction
bounds = { sqnr_db = { min = 17.0 }, rel_mse = { max = 0.02 } }

[[total]]                      # the run's totals; without `role` the ones over all roles
name = "all-weights"
operand = "W"
gemm = "fprop"
bounds = { sqnr_db = { min = 18.0 } }

[[impact]]                     # the impact's numbers; `layer` selects gradients per layer
name = "rollouts"
pass = "forward"
config = "all"
operands = "WA"
bounds = { kl_mean = { max = 0.05 } }

[[change]]                     # against a baseline: fails beyond the larger of the two, and where
                               # either run has no number (all-zero rows: see allow_zero)
name = "no-regression"
bounds = { sqnr_db = { fall = { absolute = 0.25, relative = 0.01 } } }

[baseline]
allow_vanished = []
"""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from mxdiag.commands.gate import positions
from mxdiag.commands.gate.budget import (
    AFTER_METRICS,
    AGGREGATES,
    BACKWARD_RANGES,
    ENERGY_WEIGHTS,
    FORWARD_RANGES,
    LAYER_RANGES,
    LEVELS,
    METRIC_RANGES,
    Allowance,
    Budget,
    ChangeLimit,
    ChangeRule,
    CoverageRules,
    Globs,
    Limit,
    Rule,
)
from mxdiag.errors import BudgetError
from mxdiag.run.columns import corrected_column, correction_of

Ranges = Mapping[str, tuple[float, float]]

_ROW_FIELDS = ("layer", "role", "operand", "gemm")
_TOTAL_FIELDS = ("role", "operand", "gemm")
_IMPACT_FIELDS = ("config", "operands", "layer")
_PASSES: Mapping[str, Ranges] = {
    "forward": FORWARD_RANGES,
    "backward": BACKWARD_RANGES,
    "both": {**FORWARD_RANGES, **BACKWARD_RANGES},
}
#: Rule ids of the checks that every budget makes start with these.
_RESERVED = ("coverage", "baseline")


@dataclass(slots=True)
class _Table:
    """One table of the document: values are taken from it, and what is left is unknown."""

    values: Mapping[str, Any]
    where: positions.Path
    file: str
    lines: Mapping[positions.Path, int]
    known: list[str] = field(default_factory=list)

    def line(self, key: str | None = None) -> int:
        return positions.line_of(self.lines, self.where if key is None else (*self.where, key))

    def fail(self, what: str, key: str | None = None, advice: str | None = None) -> NoReturn:
        raise BudgetError(what, where=f"{self.file}:{self.line(key)}", advice=advice)

    def take(self, key: str) -> Any:
        self.known.append(key)
        return self.values.get(key)

    def done(self) -> None:
        """Refuse the first key that nobody took."""
        for key in self.values:
            if key not in self.known:
                self.fail(f"unknown key {key!r}", key, _advice(key, self.known))

    def table(self, key: str) -> _Table:
        """A table inside; empty if absent."""
        value = self.take(key)
        if value is not None and not isinstance(value, dict):
            self.fail(f"{key!r} is {_kind(value)}, not a table", key)
        return _Table(value or {}, (*self.where, key), self.file, self.lines)

    def tables(self, key: str) -> list[_Table]:
        """The tables of `[[key]]`; none if absent."""
        value = self.take(key)
        if value is None:
            return []
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            self.fail(f"{key!r} is not a list of tables", key, f"Write [[{key}]] above each")
        return [
            _Table(item, (*self.where, key, index), self.file, self.lines)
            for index, item in enumerate(value)
        ]

    def text(self, key: str, choices: Sequence[str] = ()) -> str | None:
        value = self.take(key)
        if value is None:
            return None
        if not isinstance(value, str) or not value:
            self.fail(f"{key!r} is {_kind(value)}, not a text", key)
        if choices and value not in choices:
            self.fail(f"unknown {key} {value!r}", key, f"Use one of {', '.join(choices)}")
        return value

    def required(self, key: str, choices: Sequence[str] = ()) -> str:
        value = self.text(key, choices)
        if value is None:
            self.fail(f"lacks {key!r}", advice=f"Add {key} = ...")
        return value

    def number(self, key: str, low: float = -math.inf, high: float = math.inf) -> float | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            self.fail(f"{key!r} is {_kind(value)}, not a number", key)
        if (isinstance(value, int) and abs(value) > 2**1023) or not math.isfinite(value):
            self.fail(f"{key!r} is {value}, which bounds nothing", key, "Give a finite number")
        if not low <= value <= high:
            self.fail(f"{key!r} is {value:g}, outside {_interval(low, high)}", key)
        return float(value)

    def globs(self, key: str) -> Globs | None:
        value = self.take(key)
        if value is None:
            return None
        patterns = [value] if isinstance(value, str) else value
        if not isinstance(patterns, list) or not all(isinstance(p, str) for p in patterns):
            self.fail(f"{key!r} is {_kind(value)}, not a pattern or a list of patterns", key)
        return Globs(tuple(patterns))


def _kind(value: object) -> str:
    names = {bool: "a boolean", str: "an empty text" if value == "" else "a text", list: "a list"}
    names |= {dict: "a table", int: "a number", float: "a number"}
    return names.get(type(value), "a date or time")


def _interval(low: float, high: float) -> str:
    if math.isinf(high):
        return f"the values it can take, {low:g} and above"
    return f"the values it can take, {'at most' if math.isinf(low) else f'{low:g} to'} {high:g}"


def _advice(name: str, known: Iterable[str]) -> str:
    names = sorted(known)
    close = difflib.get_close_matches(name, names, n=1)
    return f"Did you mean {close[0]!r}" if close else f"Known here: {', '.join(names)}"


def _range(bounds: _Table, metric: str, ranges: Ranges, *, ratios: bool) -> tuple[float, float]:
    if metric in ranges:
        return ranges[metric]
    if not ratios or not correction_of(metric):
        known = [*ranges, corrected_column("mse_ratio", "<correction>")] if ratios else ranges
        bounds.fail(f"unknown metric {metric!r}", metric, _advice(metric, known))
    return (0.0, math.inf)


def _bounds(
    table: _Table, ranges: Ranges, *, ratios: bool
) -> list[tuple[str, _Table, tuple[float, float]]]:
    """Each metric of `bounds`, with its table and the range of its values."""
    bounds = table.table("bounds")
    if not bounds.values:
        table.fail("bounds nothing", advice="Add bounds = { sqnr_db = { min = 17.0 } }")
    return [
        (metric, bounds.table(metric), _range(bounds, metric, ranges, ratios=ratios))
        for metric in bounds.values
    ]


def _limits(table: _Table, ranges: Ranges, *, ratios: bool) -> tuple[Limit, ...]:
    limits = []
    for metric, bound, (low, high) in _bounds(table, ranges, ratios=ratios):
        minimum, maximum = bound.number("min", low, high), bound.number("max", low, high)
        bound.done()
        if minimum is None and maximum is None:
            bound.fail(f"{metric!r} has neither min nor max")
        if minimum is not None and maximum is not None and minimum > maximum:
            bound.fail(f"no {metric} can pass: min {minimum:g} is above max {maximum:g}")
        if minimum is not None:
            limits.append(Limit(metric, "min", minimum, bound.line("min")))
        if maximum is not None:
            limits.append(Limit(metric, "max", maximum, bound.line("max")))
    return tuple(limits)


def _change_limits(table: _Table) -> tuple[ChangeLimit, ...]:
    limits = []
    for metric, bound, _ in _bounds(table, METRIC_RANGES, ratios=True):
        fall, rise = _allowance(bound, "fall"), _allowance(bound, "rise")
        bound.done()
        if fall is None and rise is None:
            bound.fail(f"{metric!r} has neither fall nor rise")
        limits.append(ChangeLimit(metric, fall, rise, bound.line()))
    return tuple(limits)


def _allowance(bound: _Table, key: str) -> Allowance | None:
    if key not in bound.values:
        bound.take(key)
        return None
    table = bound.table(key)
    absolute, relative = table.number("absolute", 0.0), table.number("relative", 0.0)
    table.done()
    if absolute is None and relative is None:
        table.fail(f"{key!r} has neither absolute nor relative")
    return Allowance(absolute or 0.0, relative or 0.0)


def _selection(table: _Table, fields: Sequence[str]) -> dict[str, Any]:
    """The arguments that every kind of rule takes."""
    name = table.required("name")
    if name.split("/")[0] in _RESERVED:
        table.fail(f"the name {name!r} is taken by mxdiag's own checks", "name")
    select = {}
    for key in fields:
        globs = table.globs(key)
        if globs is None:
            continue
        if not globs.patterns:
            table.fail(f"{key!r} is an empty list, which selects nothing", key)
        select[key] = globs
    level = table.text("level", LEVELS) or "error"
    return {"name": name, "level": level, "select": select, "line": table.line()}


def _row_rule(table: _Table, fields: Sequence[str], *, aggregates: bool) -> Rule:
    common = _selection(table, fields)
    aggregate = table.text("aggregate", AGGREGATES) if aggregates else None
    after = table.text("after")
    limits = _limits(table, METRIC_RANGES, ratios=True)
    table.done()
    for limit in limits:
        if after is not None and limit.metric not in AFTER_METRICS:
            table.fail(
                f"{limit.metric!r} is not known after a correction",
                "after",
                f"Bound one of {', '.join(AFTER_METRICS)}, or drop 'after'",
            )
        weighable = limit.metric in ENERGY_WEIGHTS or correction_of(limit.metric)
        if aggregate == "energy" and not weighable:
            table.fail(
                f"{limit.metric!r} of many rows does not follow from their energies",
                "aggregate",
                "Use mean, median, p95 or worst",
            )
    return Rule(**common, limits=limits, aggregate=aggregate, after=after)


def _rule(table: _Table) -> Rule:
    return _row_rule(table, _ROW_FIELDS, aggregates=True)


def _total(table: _Table) -> Rule:
    return _row_rule(table, _TOTAL_FIELDS, aggregates=False)


def _impact(table: _Table) -> Rule:
    which = table.required("pass", tuple(_PASSES))
    common = _selection(table, _IMPACT_FIELDS)
    common["select"] = {"pass": Globs((which,)), **common["select"]}
    ranges = _PASSES[which]
    if "layer" in common["select"]:
        if which == "forward":
            table.fail("the forward pass has no numbers per layer", "layer", "Drop 'layer'")
        ranges = LAYER_RANGES
    limits = _limits(table, ranges, ratios=False)
    table.done()
    return Rule(**common, limits=limits)


def _change(table: _Table) -> ChangeRule:
    common = _selection(table, _ROW_FIELDS)
    limits = _change_limits(table)
    table.done()
    return ChangeRule(**common, limits=limits)


def _coverage(root: _Table) -> CoverageRules:
    table, baseline = root.table("coverage"), root.table("baseline")
    nothing = Globs(())
    coverage = CoverageRules(
        allow_not_observed=table.globs("allow_not_observed") or nothing,
        allow_unsupported=table.globs("allow_unsupported") or nothing,
        allow_zero=table.globs("allow_zero") or nothing,
        allow_vanished=baseline.globs("allow_vanished") or nothing,
        min_parameter_fraction=table.number("min_parameter_fraction", 0.0, 1.0),
        line=table.line(),
    )
    table.done()
    baseline.done()
    return coverage


def _read(path: Path) -> _Table:
    try:
        text = path.read_text(encoding="utf-8")
        values = tomllib.loads(text)
        return _Table(values, (), str(path), positions.line_numbers(text))
    except FileNotFoundError:
        raise BudgetError(
            "no budget here",
            where=path,
            advice="Write one, or let `mxdiag gate RUN --suggest FILE` do it",
        ) from None
    except UnicodeDecodeError as error:
        raise BudgetError(f"not UTF-8 at byte {error.start}", where=path) from None
    except (OSError, tomllib.TOMLDecodeError, RecursionError) as error:
        raise BudgetError(f"not readable TOML: {error}", where=path) from None


def load_budget(path: Path | str) -> Budget:
    """Read and check a budget file.

    Parameters
    ----------
    path
        A TOML file in the format at the top of this module.

    Raises
    ------
    BudgetError
        At the first thing wrong, naming the file and the line: a key, metric or level that does
        not exist, a value of the wrong type, a bound that is NaN, infinite, outside the values
        that the metric can take or contradicts another, a name used twice, nothing bounded.
    """
    root = _read(Path(path))
    description = root.text("description") or ""
    coverage = _coverage(root)
    names: dict[str, int] = {}

    def rules(key: str, build: Callable[[_Table], Any]) -> tuple[Any, ...]:
        built = []
        for table in root.tables(key):
            rule = build(table)
            if rule.name in names:
                table.fail(f"the name {rule.name!r} is used on line {names[rule.name]} too", "name")
            names[rule.name] = table.line("name")
            built.append(rule)
        return tuple(built)

    budget = Budget(
        path=str(path),
        rules=rules("rule", _rule),
        totals=rules("total", _total),
        impacts=rules("impact", _impact),
        changes=rules("change", _change),
        coverage=coverage,
        description=description,
    )
    root.done()
    if not names and "coverage" not in root.values:
        root.fail("bounds nothing", advice="Add a [[rule]]")
    return budget
