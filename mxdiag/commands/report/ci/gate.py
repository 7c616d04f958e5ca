"""The verdict of a gate in the formats that people and CI systems read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from mxdiag.commands.gate.verdict import Check, Finding, Verdict
from mxdiag.commands.report.ci.junit_sarif import junit, sarif
from mxdiag.commands.report.escape import (
    github_data,
    github_line,
    github_property,
    markdown_code,
    markdown_text,
    relative_path,
)
from mxdiag.commands.report.text.tables import printable
from mxdiag.errors import UsageError
from mxdiag.run.run import strict

#: GitHub shows this many annotations of each level per step, and drops the others.
_ANNOTATIONS = 10
#: A comment on a pull request holds 65,536 characters; a job's summary more.
_MARKDOWN_LIMIT = 60_000
_STYLES = {"error": "bold red", "warn": "yellow"}


def counted(number: int, noun: str) -> str:
    """`1 error`, `2 errors`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def gate_headline(verdict: Verdict) -> str:
    """The verdict in one line, without names."""
    errors, warnings = (len(verdict.of_level(level)) for level in ("error", "warn"))
    word = "within budget" if verdict.passed else "over budget"
    parts = [counted(len(verdict.checks), "check")]
    parts += [counted(errors, "error")] if errors else []
    parts += [counted(warnings, "warning")] if warnings else []
    return f"{word}: {', '.join(parts)}"


def gate_text(verdict: Verdict, *, limit: int | None = 20) -> RenderableType:
    """For a terminal or a pipe.

    Parameters
    ----------
    limit
        Findings shown per check, the worst first; None shows all.
    """
    head = Text(printable(f"{verdict.run} against {verdict.budget}"))
    if verdict.baseline is not None:
        head.append(printable(f", baseline {verdict.baseline}"))
    style = "bold green" if verdict.passed else "bold red"
    parts = [Text(gate_headline(verdict), style=style), head]
    failed = [check for check in verdict.checks if not check.passed]
    for check in sorted(failed, key=lambda check: check.level != "error"):
        parts += _check_lines(check, verdict.budget, limit)
    parts.append(Text())
    held = len(verdict.checks) - len(failed)
    parts.append(Text(f"{counted(held, 'check')} held", style="dim"))
    parts += [Text(f"note: {printable(note)}") for note in verdict.notes]
    parts += [Text(f"hint: {printable(hint)}") for hint in verdict.hints[:limit]]
    return Group(*parts)


def _worst_first(findings: Iterable[Finding]) -> list[Finding]:
    return sorted(findings, key=lambda finding: -finding.severity)


def _check_lines(check: Check, budget: str, limit: int | None) -> list[Text]:
    title = Text("\n")
    title.append(check.level, style=_STYLES[check.level])
    title.append(printable(f" {check.rule} ({budget}:{check.line}): {check.description}"))
    lines = [title]
    findings = _worst_first(check.findings)
    for finding in findings[:limit]:
        line = Text("  ")
        if finding.subject:
            line.append(f"{printable(finding.subject)}: ", style="bold")
        line.append(printable(f"found {finding.found}, expected {finding.expected}"))
        if finding.remedy:
            line.append(f"; {printable(finding.remedy)}", style="cyan")
        lines.append(line)
    if limit is not None and len(findings) > limit:
        lines.append(Text(f"  … and {len(findings) - limit:,} more", style="dim"))
    return lines


def gate_github(verdict: Verdict) -> str:
    """Workflow commands that annotate the budget's lines, the worst findings first.

    GitHub drops what exceeds its number of annotations, so the others are plain lines of the log.
    """
    lines, rest = [], []
    where = relative_path(verdict.budget)
    place = "" if where is None else f"file={github_property(where)},line="
    for level, command in (("error", "error"), ("warn", "warning")):
        for index, finding in enumerate(verdict.of_level(level)):
            if index >= _ANNOTATIONS:
                rest.append(github_line(f"{command}: {finding.rule}: {finding.message}"))
                continue
            at = f"{place}{finding.line}," if place else ""
            title = github_property(printable(f"mxdiag {finding.rule}"))
            lines.append(
                f"::{command} {at}title={title}::{github_data(printable(finding.message))}"
            )
    if rest:
        lines += [f"::group::{len(rest):,} more findings", *rest, "::endgroup::"]
    lines += [github_line(f"note: {note}") for note in verdict.notes]
    lines += [github_line(f"hint: {hint}") for hint in verdict.hints]
    return "\n".join([*lines, f"mxdiag gate: {gate_headline(verdict)}"]) + "\n"


def gate_markdown(verdict: Verdict) -> str:
    """For a pull request's comment or a job's summary: the worst findings, as many as fit."""
    mark = "✅" if verdict.passed else "❌"
    lines = [
        f"### {mark} mxdiag gate {gate_headline(verdict)}",
        "",
        f"Run {markdown_code(verdict.run)}, budget {markdown_code(verdict.budget)}"
        + ("" if verdict.baseline is None else f", baseline {markdown_code(verdict.baseline)}"),
    ]
    findings = verdict.findings
    if findings:
        columns = ("", "rule", "layer", "metric", "expected", "found", "what would satisfy it")
        lines += ["", *markdown_table(columns, map(_row, findings), len(findings))]
    lines += [""] if verdict.notes or verdict.hints else []
    lines += [f"- {markdown_text(note)}" for note in verdict.notes]
    lines += [f"- Hint: {markdown_text(hint)}" for hint in verdict.hints[:20]]
    return "\n".join(lines) + "\n"


def _row(finding: Finding) -> tuple[str, ...]:
    level = "🟥" if finding.level == "error" else "🟨"
    subject = finding.subject and markdown_code(finding.subject)
    return (
        level,
        markdown_code(finding.rule),
        subject,
        markdown_text(finding.metric or ""),
        markdown_text(finding.expected),
        markdown_text(finding.found),
        markdown_text(finding.remedy),
    )


def markdown_table(columns: Iterable[str], rows: Iterable[Iterable[str]], count: int) -> list[str]:
    """A table of `count` rows, cut with a word about the rest where a comment would overflow."""
    columns = list(columns)
    lines = [f"| {' | '.join(columns)} |", f"|{' --- |' * len(columns)}"]
    size = 0
    for shown, row in enumerate(rows):
        line = f"| {' | '.join(row)} |"
        size += len(line) + 1
        if size > _MARKDOWN_LIMIT:
            return [*lines, "", f"… and {count - shown:,} more"]
        lines.append(line)
    return lines


def json_text(content: Mapping[str, Any]) -> str:
    """Strict JSON in ASCII, for any encoding of the output."""
    return json.dumps(strict(dict(content)), allow_nan=False) + "\n"


def _json(verdict: Verdict) -> str:
    return json_text(verdict.as_dict())


_FORMATS: Mapping[str, Callable[[Verdict], str | RenderableType]] = {
    "text": gate_text,
    "github": gate_github,
    "junit": junit,
    "sarif": sarif,
    "json": _json,
    "markdown": gate_markdown,
}
GATE_FORMATS = tuple(_FORMATS)


def render_gate(verdict: Verdict, format: str = "text") -> str | RenderableType:
    """The verdict in one of GATE_FORMATS: something to print for `text`, a string for the others.

    Raises
    ------
    UsageError
        If there is no such format.
    """
    return chosen(_FORMATS, format)(verdict)


def chosen(formats: Mapping[str, Callable[..., Any]], format: str) -> Callable[..., Any]:
    """The renderer of a format.

    Raises
    ------
    UsageError
        If there is no such format.
    """
    if format not in formats:
        raise UsageError(f"unknown format {format!r}", advice=f"Use one of {', '.join(formats)}")
    return formats[format]


def append_summary(path: str | None, content: str) -> str | None:
    """Append Markdown to the file that GitHub names in GITHUB_STEP_SUMMARY.

    Returns
    -------
    str or None
        What went wrong, in words: a summary that cannot be written decides nothing.
    """
    if not path:
        return None
    try:
        with Path(path).open("a", encoding="utf-8") as file:
            file.write(content + "\n")
    except OSError as error:
        return f"no step summary: {error.strerror or error}"
    return None
