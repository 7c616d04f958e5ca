"""What a budget is once it has been read: rules, their selectors and their bounds."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Literal

from mxdiag.decomposition import METRICS

LEVELS = ("error", "warn")
AGGREGATES = ("mean", "median", "p95", "worst", "energy")

_ANY = (-math.inf, math.inf)
_FRACTION = (0.0, 1.0)
_POSITIVE = (0.0, math.inf)

#: The values each metric can take. A power-of-two scale can beat amax / 6, so `reducible` has no
#: lower end, and the parts of an error that cancel against each other may each exceed it.
METRIC_RANGES: Mapping[str, tuple[float, float]] = {
    **dict.fromkeys(METRICS, _POSITIVE),
    **dict.fromkeys(
        ("deadzone_frac", "underflow_frac", "zero_frac", "saturated_frac", "top_token_share"),
        _FRACTION,
    ),
    **dict.fromkeys(
        (
            "sqnr_db",
            "sqnr_db_token",
            "cross_scale_grid",
            "cross_scale_deadzone",
            "closure_residual",
            "delta_mean",
            "gain",
        ),
        _ANY,
    ),
    "reducible": (-math.inf, 1.0),
    "cos_scale_grid": (-1.0, 1.0),
}

#: Impact numbers that a budget can bound. `*_delta` is the value minus the unquantized model's.
FORWARD_RANGES: Mapping[str, tuple[float, float]] = {
    "loss": _POSITIVE,
    "loss_delta": _ANY,
    "kl_mean": _POSITIVE,
    "kl_p95": _POSITIVE,
    "agreement": _FRACTION,
    "entropy": _POSITIVE,
    "entropy_delta": _ANY,
    "t_eff_measured": _POSITIVE,
    "t_eff_predicted": _POSITIVE,
}
BACKWARD_RANGES: Mapping[str, tuple[float, float]] = {"cosine_mean": (-1.0, 1.0)}
LAYER_RANGES: Mapping[str, tuple[float, float]] = {
    "cosine": (-1.0, 1.0),
    "norm_ratio": _POSITIVE,
    "snr_db": _ANY,
}

#: Metrics that can be judged after a correction, whose error a run records.
AFTER_METRICS = ("sqnr_db", "rel_mse", "underflow_frac")

#: How the energy aggregate weighs a row's metric: by ||e||^2, by ||x||^2 or by elements, so that
#: the result is the metric of all elements together. SQNR and relative error are ratios of the two
#: energies themselves.
ENERGY_WEIGHTS: Mapping[str, str] = {
    **dict.fromkeys(("sqnr_db", "rel_mse"), "ratio"),
    **dict.fromkeys(("reducible", "recoverable", "irreducible"), "error"),
    **dict.fromkeys(("scale_energy", "deadzone_energy", "grid_energy"), "error"),
    **dict.fromkeys(("cross_scale_grid", "cross_scale_deadzone"), "error"),
    **dict.fromkeys(("deadzone_frac", "underflow_frac", "zero_frac", "saturated_frac"), "elements"),
    "gain": "signal",
}

#: Metrics of which more is better; of all others less is.
MORE_IS_BETTER = frozenset(
    {"sqnr_db", "sqnr_db_token", "agreement", "cosine", "cosine_mean", "snr_db"}
)


@dataclass(frozen=True, slots=True)
class Globs:
    """Shell-style patterns (`fnmatch`) against whole names; any of them selects.

    An index in brackets, `[5]` or `[*]`, stands for itself: names of fused experts carry one. A
    name equal to a pattern matches it, whatever the pattern holds.
    """

    patterns: tuple[str, ...]
    compiled: tuple[str, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(
            self,
            "compiled",
            tuple(re.sub(r"\[(\d+|\*)\]", r"[[]\1]", pattern) for pattern in self.patterns),
        )

    def match(self, name: object) -> bool:
        """Whether a name is selected. A missing name (None) is not."""
        return isinstance(name, str) and (
            name in self.patterns or any(fnmatchcase(name, glob) for glob in self.compiled)
        )

    @property
    def literals(self) -> tuple[str, ...] | None:
        """The names themselves, if no pattern can match anything else."""
        plain = all(
            not re.search(r"[*?[]", re.sub(r"\[\d+\]", "", pattern)) for pattern in self.patterns
        )
        return self.patterns if plain else None

    def __str__(self) -> str:
        return " or ".join(self.patterns)

    @staticmethod
    def escape(name: str) -> str:
        """The pattern that selects this name alone."""
        classes = {"*": "[*-*]", "?": "[?]", "[": "[[]"}
        parts = re.split(r"(\[\d+\]|[*?[])", name)
        return "".join(classes.get(part, part) for part in parts)


@dataclass(frozen=True, slots=True)
class Limit:
    """One bound: the metric is at least (`min`) or at most (`max`) the value."""

    metric: str
    side: Literal["min", "max"]
    value: float
    line: int

    def holds(self, found: float) -> bool:
        """Whether a number is within the bound."""
        return found >= self.value if self.side == "min" else found <= self.value


@dataclass(frozen=True, slots=True)
class Allowance:
    """A change up to the larger of `absolute` and `relative` times |baseline| passes."""

    absolute: float = 0.0
    relative: float = 0.0

    def permitted(self, reference: float) -> float:
        """The largest change that passes."""
        return max(self.absolute, self.relative * abs(reference))


@dataclass(frozen=True, slots=True)
class ChangeLimit:
    """How far a metric may fall below, or rise above, the baseline; None is no bound."""

    metric: str
    fall: Allowance | None
    rise: Allowance | None
    line: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Selection:
    """What every table of rules has: a name, a level, and which rows it is about.

    `select` maps a field to its patterns; a field that is absent selects everything.
    """

    name: str
    level: str
    select: Mapping[str, Globs]
    line: int

    def selects(self, item: Mapping[str, object]) -> bool:
        """Whether every selector matches."""
        return all(globs.match(item.get(field)) for field, globs in self.select.items())

    @property
    def selection(self) -> str:
        """The selectors in words."""
        return ", ".join(f"{name} {globs}" for name, globs in self.select.items()) or "everything"


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule(Selection):
    """Bounds on rows, on totals or on entries of the impact."""

    limits: tuple[Limit, ...]
    aggregate: str | None = None
    after: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ChangeRule(Selection):
    """Bounds on what a row may change against the baseline."""

    limits: tuple[ChangeLimit, ...]


@dataclass(frozen=True, slots=True)
class CoverageRules:
    """What may be missing. Patterns are matched against layer names."""

    allow_not_observed: Globs = Globs(())
    allow_unsupported: Globs = Globs(())
    allow_zero: Globs = Globs(())
    allow_vanished: Globs = Globs(())
    min_parameter_fraction: float | None = None
    line: int = 1


@dataclass(frozen=True, slots=True)
class Budget:
    """A budget file: see `mxdiag.commands.gate.parse` for its format."""

    path: str
    rules: tuple[Rule, ...] = ()
    totals: tuple[Rule, ...] = ()
    impacts: tuple[Rule, ...] = ()
    changes: tuple[ChangeRule, ...] = ()
    coverage: CoverageRules = field(default_factory=CoverageRules)
    description: str = ""
