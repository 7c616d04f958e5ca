"""The terminal's view of an impact: forward, backward, causes, and what to do first.

A number is followed by its standard deviation over repeats, where that shows in its digits. One
that lies within two of them of "no effect", or of the one over resampled records if that is larger,
is noise: dimmed on a terminal, marked `~` everywhere.
"""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mxdiag.commands.impact.verdict import NOISE_SDS, ImpactEntry
from mxdiag.commands.report.impact_columns import (
    BACKWARD,
    ROLLOUT_TITLES,
    ImpactColumn,
    columns_of,
    is_noise,
    order,
)
from mxdiag.commands.report.text.tables import printable

TERMINAL_FORWARD = columns_of(
    "kl_mean",
    "agreement",
    "loss_change",
    "entropy_change",
    "t_eff_measured",
    "t_eff_predicted",
    "routing_changed",
)
TERMINAL_ROLLOUT = columns_of(
    "first_divergence_mean",
    "identical",
    "log_ratio_abs_mean",
    "log_ratio_abs_p95",
    "ess",
    "outside_clip",
)
_SHARES = (("scale", "scale bias"), ("deadzone", "deadzone"), ("grid", "grid noise"))


def _cell(entry: ImpactEntry, column: ImpactColumn) -> Text:
    value, sd = entry.get(column.name), entry.get(f"{column.name}_sd")
    if value is None:
        return Text("–")
    text = f"{value:.{column.digits}f}"
    noise = is_noise(entry, column)
    if sd is not None and round(sd, column.digits):  # else not to be seen in the digits shown
        text += f" ± {sd:.{column.digits}f}"
    return Text(f"~{text}" if noise else text, style="dim" if noise else "")


def _table(
    entries: Iterable[ImpactEntry], columns: Iterable[ImpactColumn], title: str
) -> Table | None:
    entries = list(entries)
    used = [c for c in columns if any(entry.get(c.name) is not None for entry in entries)]
    if not used:
        return None
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.box, table.pad_edge, table.show_edge = None, False, False
    table.add_column("config", no_wrap=True)
    table.add_column("operands", no_wrap=True)
    for column in used:
        table.add_column(column.head, justify="right", no_wrap=True)
    last = None
    for entry in sorted(entries, key=order):
        if last not in (None, entry["operands"]):
            table.add_row()
        last = entry["operands"]
        name = Text(printable(str(entry["config"])))
        table.add_row(name, str(entry["operands"]), *(_cell(entry, c) for c in used))
    return table


def _causes(entries: Iterable[ImpactEntry]) -> Table | None:
    """Shapley's attribution: what each component adds to the total."""
    entries = list(entries)
    if not entries:
        return None
    title = "Causes (Shapley: the parts add up to the total)"
    table = Table(title=title, title_justify="left", title_style="bold", header_style="bold")
    table.box, table.pad_edge, table.show_edge = None, False, False
    for head in ("measure", "pass", "operands"):
        table.add_column(head, no_wrap=True)
    for _, label in (*_SHARES, ("total", "total")):
        table.add_column(label, justify="right", no_wrap=True)
    for entry in entries:
        columns = [
            ImpactColumn(name, label, 4, 0.0) for name, label in (*_SHARES, ("total", "total"))
        ]
        table.add_row(
            *(Text(str(entry[key])) for key in ("measure", "pass", "operands")),
            *(_cell(entry, column) for column in columns),
        )
    return table


def _reference(impact: ImpactEntry) -> Text:
    reference = impact.get("reference") or {}
    parts = [f"{reference.get('tokens', 0)} positions"]
    for name, digits in (("loss", 4), ("perplexity", 2), ("entropy", 4)):
        value = reference.get(name)
        if value is not None:
            parts.append(f"{name} {value:.{digits}f}")
    text = Text("reference: ", style="bold")
    text.append(", ".join(parts), style="not bold")
    return text


def impact_summary(impact: ImpactEntry) -> RenderableType:
    """What `mxdiag impact` prints: the tables, then the verdict in words.

    Parameters
    ----------
    impact
        The `impact` part of a run.
    console
        Where it will be printed.
    """
    tables = (
        _table(impact.get("forward") or [], TERMINAL_FORWARD, "Forward"),
        _table(impact.get("backward") or [], BACKWARD, "Backward (weight gradients)"),
        _table(impact.get("both") or [], (*TERMINAL_FORWARD, *BACKWARD), "Forward and backward"),
        _causes(_main_causes(impact)),
        *(
            _table(
                [e for e in impact.get("rollout") or [] if e["mode"] == mode],
                TERMINAL_ROLLOUT,
                title,
            )
            for mode, title in ROLLOUT_TITLES.items()
        ),
    )
    parts: list[RenderableType] = [_reference(impact), Text()]
    for table in tables:
        if table is not None:
            parts += [table, Text()]
    parts.append(
        Text(
            "± is the standard deviation over jittered repeats; ~ marks what lies within "
            f"{NOISE_SDS:g} of them of no effect, or of the one over resampled records where that "
            "is larger; T is the temperature that would do the same",
            style="dim",
        )
    )
    parts += [
        Text(f"warning: {printable(warning)}", style="yellow")
        for warning in impact.get("warnings") or []
    ]
    verdict = impact.get("verdict") or []
    if verdict:
        parts += [Text(), *(Text(printable(sentence), style="bold") for sentence in verdict)]
    return Group(*parts)


def _main_causes(impact: ImpactEntry) -> list[ImpactEntry]:
    """Attributions of all operands, those of both passes where one alone does not say it."""
    entries = impact.get("attribution") or []
    widest = {
        entry["pass"]: max((e["operands"] for e in entries if e["pass"] == entry["pass"]), key=len)
        for entry in entries
    }
    chosen = [entry for entry in entries if entry["operands"] == widest[entry["pass"]]]
    forward = {entry["measure"] for entry in chosen if entry["pass"] == "forward"}
    return [e for e in chosen if e["pass"] != "both" or e["measure"] not in forward]
