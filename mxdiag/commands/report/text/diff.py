"""What moved between two runs, for people, pull requests and programs."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from rich.console import Group, RenderableType
from rich.text import Text

from mxdiag.commands.diff.compare import Change, Diff, ImpactChange, Pair
from mxdiag.commands.gate.verdict import apart, metric_text
from mxdiag.commands.report.ci.gate import chosen, json_text, markdown_table
from mxdiag.commands.report.escape import github_data, github_line, markdown_code, markdown_text
from mxdiag.commands.report.text.tables import printable

#: What is said of a row, in this order; the other metrics are in the JSON.
_SHOWN = ("sqnr_db", "recoverable", "deadzone_frac", "reducible", "irreducible", "delta_mean")
_KINDS = {
    "nonfinite": "has NaN or infinite values now",
    "vanished": "vanished",
    "appeared": "new",
}
#: GitHub shows this many notices of a step; a log of more lines than these is not read.
_ANNOTATIONS, _LINES = 10, 200


def diff_headline(diff: Diff) -> str:
    """The difference in one line, without names."""
    kinds: dict[str, int] = {}
    for change in diff.changes:
        kinds[change.kind] = kinds.get(change.kind, 0) + 1
    words = {"nonfinite": "non-finite", "status": "of another status"}
    parts = [f"{count:,} {words.get(kind, kind)}" for kind, count in kinds.items()]
    return ", ".join([*parts, f"{diff.unchanged:,} unchanged"]) + " (rows)"


def _from_to(metric: str, pair: Pair) -> str:
    old, new = pair
    if old is not None and new is not None:
        texts = apart(metric, old, new)
        unit = " dB" if texts[0].endswith(" dB") else ""
        return f"{texts[0].removesuffix(unit)} → {texts[1]}"
    words = ["none" if value is None else metric_text(metric, value) for value in pair]
    return " → ".join(words)


def _metrics(metrics: Mapping[str, Pair], names: tuple[str, ...] = _SHOWN) -> str:
    shown = [f"{name} {_from_to(name, metrics[name])}" for name in names if name in metrics]
    if not shown and metrics:
        shown = [f"{name} {_from_to(name, pair)}" for name, pair in list(metrics.items())[:4]]
    return ", ".join(shown)


def _subject(change: Change) -> str:
    return f"{change.layer} {change.operand}·{change.gemm}"


def _what(change: Change) -> str:
    """What happened to a row, without its name."""
    if change.kind in ("nonfinite", "vanished"):
        return _KINDS[change.kind]
    values = _metrics(change.metrics)
    if change.kind == "appeared":
        sqnr = change.metrics.get("sqnr_db", (None, None))[1]
        return "new" if sqnr is None else f"new, sqnr_db {metric_text('sqnr_db', sqnr)}"
    if change.kind == "status":
        values = f"status {change.status[0]} → {change.status[1]}{', ' if values else ''}{values}"
    return values


def _share(change: Change) -> str:
    """The row's contribution to the change of the error, as a signed percentage."""
    return f"{100 * change.error_change:+.2f} %"


def _impact(change: ImpactChange) -> str:
    noise = " (noise: less than 2 standard deviations)" if change.noise else ""
    return f"{change.entry}: {change.metric} {_from_to(change.metric, change.values)}{noise}"


def diff_text(diff: Diff, *, limit: int | None = 20) -> RenderableType:
    """For a terminal or a pipe: the rows that matter most, `limit` of them (None shows all)."""
    parts = [
        Text(printable(f"{diff.before} → {diff.after}")),
        Text(diff_headline(diff), style="bold"),
    ]
    parts += [
        Text(printable(f"warning: {name} was {old}, is {new}"), style="yellow")
        for name, old, new in diff.settings
    ]
    parts += [
        Text(f"total {operand}·{gemm}: {_metrics(metrics)}")
        for (operand, gemm), metrics in diff.totals.items()
    ]
    if diff.changes:
        parts.append(Text("\nchange of error   row"))
    for change in diff.changes[:limit]:
        line = Text(f"{_share(change):>15}   ", style="red" if change.error_change > 0 else "")
        line.append(printable(_subject(change)), style="bold not red")
        line.append(f": {_what(change)}", style="not red")
        parts.append(line)
    if limit is not None and len(diff.changes) > limit:
        parts.append(Text(f"… and {len(diff.changes) - limit:,} more", style="dim"))
    if diff.impact:
        parts.append(Text("\nimpact"))
        parts += [Text(printable(_impact(change))) for change in diff.impact[:limit]]
    return Group(*parts)


def diff_markdown(diff: Diff) -> str:
    """For a comment on a pull request."""
    lines = [
        f"### mxdiag diff: {diff_headline(diff)}",
        "",
        f"From {markdown_code(diff.before)} to {markdown_code(diff.after)}.",
    ]
    if diff.settings:
        lines += ["", *(f"- ⚠️ {markdown_code(f'{n}: {a} → {b}')}" for n, a, b in diff.settings)]
    if diff.totals:
        totals = (
            (f"{operand}·{gemm}", markdown_text(_metrics(metrics)))
            for (operand, gemm), metrics in diff.totals.items()
        )
        lines += ["", *markdown_table(("total", "moved"), totals, len(diff.totals))]
    if diff.changes:
        rows = (
            (_share(change), markdown_code(_subject(change)), markdown_text(_what(change)))
            for change in diff.changes
        )
        columns = ("change of error", "row", "moved")
        lines += ["", *markdown_table(columns, rows, len(diff.changes))]
    if diff.impact:
        lines += ["", *(f"- {markdown_code(_impact(change))}" for change in diff.impact[:50])]
    return "\n".join(lines) + "\n"


def diff_github(diff: Diff) -> str:
    """Workflow commands: a notice per row for the rows that matter most, then plain lines."""
    lines = [
        f"::warning title=mxdiag diff::{github_data(printable(f'{name} was {old}, is {new}'))}"
        for name, old, new in diff.settings[:_ANNOTATIONS]
    ]
    for index, change in enumerate(diff.changes[:_LINES]):
        message = printable(f"{_subject(change)}: {_what(change)} ({_share(change)} of the error)")
        if index < _ANNOTATIONS:
            lines.append(f"::notice title=mxdiag diff::{github_data(message)}")
        else:
            lines.append(github_line(message))
    if len(diff.changes) > _LINES:
        lines.append(f"… and {len(diff.changes) - _LINES:,} more rows")
    lines += [github_line(_impact(change)) for change in diff.impact[:_LINES]]
    return "\n".join([*lines, f"mxdiag diff: {diff_headline(diff)}"]) + "\n"


def _json(diff: Diff) -> str:
    return json_text(diff.as_dict())


_FORMATS: Mapping[str, Callable[[Diff], str | RenderableType]] = {
    "text": diff_text,
    "github": diff_github,
    "json": _json,
    "markdown": diff_markdown,
}
DIFF_FORMATS = tuple(_FORMATS)


def render_diff(diff: Diff, format: str = "text") -> str | RenderableType:
    """The difference in one of DIFF_FORMATS: to be printed for `text`, a string for the others.

    Raises
    ------
    UsageError
        If there is no such format.
    """
    return chosen(_FORMATS, format)(diff)
