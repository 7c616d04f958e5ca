"""What a gate found: a check per bound of the budget, and a finding per violation."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

_FINDING_KEYS = (
    "rule",
    "level",
    "layer",
    "role",
    "operand",
    "gemm",
    "metric",
    "expected",
    "found",
    "bound",
    "value",
    "line",
)
_DECIBELS = ("sqnr_db", "sqnr_db_token", "snr_db")


def metric_text(metric: str, value: float, digits: int | None = None) -> str:
    """A metric's value for people, with its unit."""
    if metric in _DECIBELS:
        return f"{value:.{2 if digits is None else digits}f} dB"
    if metric == "nonfinite":
        return f"{value:.{digits or 0}f}"
    return f"{value:.{4 if digits is None else digits + 2}g}"


def apart(metric: str, first: float, second: float) -> tuple[str, str]:
    """Both values, with as many digits as it takes to tell them apart."""
    texts = metric_text(metric, first), metric_text(metric, second)
    for digits in range(2, 18):
        if first == second or texts[0] != texts[1]:
            break
        texts = metric_text(metric, first, digits), metric_text(metric, second, digits)
    return texts


@dataclass(frozen=True, slots=True)
class Fix:
    """A correction that would satisfy the bound, and the metric's value with it."""

    correction: str
    value: float | None
    bits: float | None = None
    gemm_passes: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """For JSON. `value` is null where the correction leaves no error at all."""
        return {
            "correction": self.correction,
            "value": self.value,
            "bits": self.bits,
            "gemm_passes": self.gemm_passes,
        }


@dataclass(frozen=True, slots=True)
class Finding:
    """One violation.

    `rule` is the stable id: the rule's name, the metric and the side of the bound. `expected` and
    `found` are in words; `bound` and `value` are their numbers where there are any. `fixes` are
    the evaluated corrections that would satisfy the bound, cheapest first; None where no
    correction's effect on the metric was measured.
    """

    rule: str
    level: str
    expected: str
    found: str
    line: int = 1
    layer: str | None = None
    role: str | None = None
    operand: str | None = None
    gemm: str | None = None
    metric: str | None = None
    bound: float | None = None
    value: float | None = None
    severity: float = 0.0
    fixes: tuple[Fix, ...] | None = None

    @property
    def subject(self) -> str:
        """What it is about: the layer with operand and GEMM, as far as there is one."""
        product = "·".join(part for part in (self.operand, self.gemm) if part)
        return " ".join(part for part in (self.layer, product) if part)

    @property
    def remedy(self) -> str:
        """The correction that would satisfy the bound, in words; empty where none is known of."""
        if self.fixes is None:
            return ""
        if not self.fixes:
            return "no evaluated correction would satisfy it"
        best = self.fixes[0]
        if best.value is None or self.metric is None:
            return f"{best.correction} would satisfy it (no error left)"
        return f"{best.correction} would satisfy it ({metric_text(self.metric, best.value)})"

    @property
    def message(self) -> str:
        """The whole finding but its rule, as one sentence."""
        subject = f"{self.subject}: " if self.subject else ""
        metric = f"{self.metric} " if self.metric else ""
        remedy = f"; {self.remedy}" if self.remedy else ""
        return f"{subject}{metric}expected {self.expected}, found {self.found}{remedy}"

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        fixes = None if self.fixes is None else [fix.as_dict() for fix in self.fixes]
        return {key: getattr(self, key) for key in _FINDING_KEYS} | {
            "message": self.message,
            "fix": self.remedy or None,
            "correction": fixes[0]["correction"] if fixes else None,
            "corrections": fixes,
        }


@dataclass(frozen=True, slots=True)
class Check:
    """One bound of the budget (or one of mxdiag's own checks) and how many subjects it judged."""

    rule: str
    level: str
    description: str
    line: int
    judged: int
    findings: tuple[Finding, ...] = ()

    @property
    def passed(self) -> bool:
        """Whether nothing was found."""
        return not self.findings


@dataclass(slots=True)
class Verdict:
    """The result of a gate.

    `notes` are things to know that decide nothing; `hints` tell which bounds could be tightened.
    """

    run: str
    budget: str
    baseline: str | None = None
    checks: list[Check] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    hints: list[str] = field(default_factory=list)

    @property
    def findings(self) -> list[Finding]:
        """All violations: errors first, each level from the worst to the mildest."""
        found = [finding for check in self.checks for finding in check.findings]
        return sorted(found, key=lambda finding: (finding.level != "error", -finding.severity))

    def of_level(self, level: str) -> list[Finding]:
        """The violations at one level."""
        return [finding for finding in self.findings if finding.level == level]

    @property
    def passed(self) -> bool:
        """Whether the run is within the budget: no violation at level error."""
        return all(f.level != "error" for check in self.checks for f in check.findings)

    @property
    def exit_code(self) -> int:
        """0 within the budget, 1 over it."""
        return 0 if self.passed else 1

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "schema_version": 1,
            "verdict": "pass" if self.passed else "fail",
            "passed": self.passed,
            "exit_code": self.exit_code,
            "run": self.run,
            "budget": self.budget,
            "baseline": self.baseline,
            "errors": len(self.of_level("error")),
            "warnings": len(self.of_level("warn")),
            "checks": [
                {
                    "rule": check.rule,
                    "level": check.level,
                    "description": check.description,
                    "line": check.line,
                    "judged": check.judged,
                    "violations": len(check.findings),
                }
                for check in self.checks
            ],
            "violations": [finding.as_dict() for finding in self.findings],
            "notes": self.notes,
            "hints": self.hints,
        }
