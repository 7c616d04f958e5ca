"""The verdict of a gate as JUnit XML and as SARIF 2.1.0."""

from __future__ import annotations

import hashlib
import json
import re
import xml.etree.ElementTree as ET
from typing import Any

from mxdiag import __version__
from mxdiag.commands.gate.verdict import Check, Finding, Verdict
from mxdiag.commands.report.escape import uri_of
from mxdiag.commands.report.text.tables import printable
from mxdiag.run.run import strict

_SARIF_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)
_LEVELS = {"error": "error", "warn": "warning"}


def junit(verdict: Verdict) -> str:
    """JUnit XML: a suite per check, a failed case per violation, one passed case for the rest.

    JUnit knows no warnings: they are passed cases with a word in their output. Control characters,
    which XML 1.0 cannot hold, are shown as escapes.
    """
    root = ET.Element("testsuites", name="mxdiag gate", errors="0", skipped="0", time="0")
    for check in verdict.checks:
        _suite(ET.SubElement(root, "testsuite"), check)
    for key in ("tests", "failures"):
        root.set(key, str(sum(int(suite.get(key, "0")) for suite in root)))
    ET.indent(root)
    return ET.tostring(root, encoding="us-ascii", xml_declaration=True).decode() + "\n"


def _suite(suite: ET.Element, check: Check) -> None:
    rule = printable(check.rule)
    for finding in check.findings:
        case = _case(suite, rule, finding.subject or check.description)
        if finding.level == "error":
            message = printable(finding.message)
            ET.SubElement(case, "failure", message=message, type=rule).text = message
        else:
            ET.SubElement(case, "system-out").text = f"warning: {printable(finding.message)}"
    held = max(0, check.judged - len(check.findings))
    if held or not check.findings:
        others = f" (the other {held:,})" if check.findings else f" ({check.judged:,} judged)"
        _case(suite, rule, check.description + others)
    failures = sum(finding.level == "error" for finding in check.findings)
    counts = {"tests": len(suite), "failures": failures, "errors": 0, "skipped": 0, "time": 0}
    suite.attrib.update({"name": rule, **{key: str(value) for key, value in counts.items()}})


def _case(suite: ET.Element, rule: str, name: str) -> ET.Element:
    return ET.SubElement(
        suite, "testcase", classname=f"mxdiag.{rule}", name=printable(name), time="0"
    )


def sarif(verdict: Verdict) -> str:
    """SARIF 2.1.0: a rule per check, a result per violation at the line of the budget, with a
    fingerprint by rule and row, so that a result is the same one from run to run.
    """
    indices = {check.rule: index for index, check in enumerate(verdict.checks)}
    uri = uri_of(verdict.budget)
    run = {
        "tool": {
            "driver": {
                "name": "mxdiag",
                "version": __version__,
                "rules": [_sarif_rule(check) for check in verdict.checks],
            }
        },
        "columnKind": "unicodeCodePoints",
        "results": [
            _sarif_result(finding, indices[finding.rule], uri) for finding in verdict.findings
        ],
        "properties": {"run": verdict.run, "baseline": verdict.baseline, "notes": verdict.notes},
    }
    log = {"$schema": _SARIF_SCHEMA, "version": "2.1.0", "runs": [run]}
    return json.dumps(strict(log), allow_nan=False) + "\n"


def _sarif_rule(check: Check) -> dict[str, Any]:
    return {
        "id": check.rule,
        "shortDescription": {"text": printable(check.description)},
        "defaultConfiguration": {"level": _LEVELS[check.level]},
    }


def _sarif_result(finding: Finding, index: int, uri: str) -> dict[str, Any]:
    # In a message of SARIF, [text](target) is a link.
    message = re.sub(r"\](?=\()", r"\\]", printable(finding.message))
    identity = (finding.rule, finding.layer, finding.operand, finding.gemm)
    location: dict[str, Any] = {
        "physicalLocation": {
            "artifactLocation": {"uri": uri},
            "region": {"startLine": finding.line},
        }
    }
    if finding.layer:
        location["logicalLocations"] = [
            {
                "name": printable(finding.layer),
                "fullyQualifiedName": printable(finding.subject),
                "kind": "member",
            }
        ]
    return {
        "ruleId": finding.rule,
        "ruleIndex": index,
        "level": _LEVELS[finding.level],
        "message": {"text": message},
        "locations": [location],
        "partialFingerprints": {
            "mxdiag/v1": hashlib.sha256(json.dumps(identity).encode()).hexdigest()
        },
        "properties": finding.as_dict(),
    }
