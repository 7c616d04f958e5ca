"""What a run must hold before any rule is asked: everything observed, supported and finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from mxdiag.commands.gate.budget import Budget
from mxdiag.commands.gate.verdict import Check, Finding, apart
from mxdiag.run.columns import Row, finite
from mxdiag.run.run import Run


def judge_coverage(run: Run, budget: Budget) -> list[Check]:
    """The checks that every budget makes. Only patterns of `[coverage]` make exceptions; for
    non-finite values there are none.
    """
    coverage = run.data.get("coverage") or {}
    allowed, line = budget.coverage, budget.coverage.line

    def check(name: str, what: str, judged: int, found: Iterable[Finding]) -> Check:
        return Check(f"coverage/{name}", "error", what, line, judged, tuple(found))

    missing = {
        (item.get("layer"), item.get("operand"), item.get("gemm")): item for item in _absent(run)
    }
    unsupported = coverage.get("unsupported") or []
    broken = [row for row in run.tensors if row["status"] == "nonfinite" or row.get("nonfinite")]
    checks = [
        check(
            "non-finite",
            "no tensor holds a NaN or an infinity",
            len(run.tensors),
            (
                _finding("coverage/non-finite", line, row, "finite values", _broken(row))
                for row in broken
            ),
        ),
        check(
            "not-observed",
            "every operand was observed",
            len(run.tensors),
            (
                _finding("coverage/not-observed", line, item, "a measurement", _unseen(item))
                for item in missing.values()
                if not allowed.allow_not_observed.match(item.get("layer"))
            ),
        ),
        check(
            "unsupported",
            "every layer is supported",
            len(unsupported),
            (
                _finding("coverage/unsupported", line, item, "a measurement", _unread(item))
                for item in unsupported
                if not allowed.allow_unsupported.match(item.get("layer"))
            ),
        ),
    ]
    if allowed.min_parameter_fraction is not None:
        checks.append(_fraction_check(coverage, allowed.min_parameter_fraction, line))
    return checks


def _absent(run: Run) -> list[Mapping[str, Any]]:
    """What was not observed: the coverage's list, and rows that say so."""
    listed = (run.data.get("coverage") or {}).get("not_observed") or []
    rows = [row for row in run.tensors if row["status"] == "not_observed"]
    return [*rows, *listed]


def _finding(rule: str, line: int, item: Row, expected: str, found: str) -> Finding:
    identity = {key: item.get(key) for key in ("layer", "role", "operand", "gemm")}
    return Finding(rule, "error", expected, found, line, severity=math.inf, **identity)


def _broken(row: Row) -> str:
    blocks = row.get("nonfinite")
    return f"{blocks} blocks with NaN or infinity" if blocks else "NaN or infinity"


def _unseen(item: Row) -> str:
    return f"not observed: {item['reason']}" if item.get("reason") else "not observed"


def _unread(item: Row) -> str:
    parameters = f" ({item['parameters']:,} parameters)" if item.get("parameters") else ""
    return f"unsupported: {item.get('reason') or 'no reason given'}{parameters}"


def _fraction_check(coverage: Mapping[str, Any], minimum: float, line: int) -> Check:
    rule, found = "coverage/parameter-fraction", finite(coverage.get("parameter_fraction"))
    findings: tuple[Finding, ...] = ()
    if found is None or found < minimum:
        texts = apart("", minimum, minimum if found is None else found)
        findings = (
            Finding(
                rule,
                "error",
                f"at least {texts[0]} of the parameters measured",
                "no number" if found is None else texts[1],
                line,
                bound=minimum,
                value=found,
                severity=math.inf,
            ),
        )
    what = f"at least {minimum:g} of the parameters are measured"
    return Check(rule, "error", what, line, 1, findings)
