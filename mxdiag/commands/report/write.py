"""From a run folder to report files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from mxdiag.commands.report import export
from mxdiag.commands.report.html import page
from mxdiag.errors import UsageError
from mxdiag.run.run import Run, write_atomically

KINDS = ("html", "csv", "markdown", "parquet")


def write_report(
    run: Run, kind: str = "html", *, out: Path | None = None, gate: dict[str, Any] | None = None
) -> Path | None:
    """Write a run's report: `html`, `csv`, `markdown` or `parquet`.

    It goes into the run folder (`report.html`, `report.md`, ...), to `out`, or, if that is `-`, to
    standard output. `gate` is the verdict that the HTML shows, as `Verdict.as_dict` gives it.
    Returns the file's path, None for standard output.

    Raises
    ------
    MxdiagError
        If the run was never written and `out` is not given, or the report cannot be written.
    """
    if kind not in KINDS:
        raise UsageError(f"unknown report {kind!r}", advice=f"Use one of {', '.join(KINDS)}")
    if out is None and run.folder is None:
        raise UsageError("the run lies in no folder", advice="Write it first, or give out=FILE")
    path = out or Path(run.folder or ".") / f"report.{'md' if kind == 'markdown' else kind}"
    if kind == "parquet":
        if str(path) == "-":
            raise UsageError("Parquet is no text", advice="Give --out a file")
        return export.export_parquet(run, path)
    if kind == "html":
        text = page.render_html(run, gate=gate)
    else:
        text = run.csv() if kind == "csv" else export.render_markdown(run)
    if str(path) == "-":
        sys.stdout.write(text)
        return None
    write_atomically(path, text)
    return path
