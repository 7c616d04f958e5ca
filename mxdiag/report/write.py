"""From a run folder to report files."""

from __future__ import annotations

import sys
from pathlib import Path

from mxdiag.analyze import gate
from mxdiag.errors import UsageError
from mxdiag.report import export, html
from mxdiag.run import Run, write_atomically


def write_report(
    run: Path | str,
    kind: str = "html",
    *,
    out: Path | None = None,
    budget: Path | None = None,
    baseline: Path | None = None,
) -> Path | None:
    """Write a run's report: `html`, `csv`, `markdown` or `parquet`.

    It goes into the run folder (`report.html`, `report.md`, ...), to `out`, or, if that is `-`, to
    standard output. Returns the file's path, None for standard output.

    Raises
    ------
    MxdiagError
        If the run or the budget cannot be read, or the report cannot be written.
    """
    loaded = Run.load(run)
    assert loaded.folder is not None
    path = out or loaded.folder / f"report.{'md' if kind == 'markdown' else kind}"
    if kind == "parquet":
        if str(path) == "-":
            raise UsageError("Parquet is no text", advice="Give --out a file")
        return export.export_parquet(loaded, path)
    if kind == "html":
        verdict = None if budget is None else gate(run, budget, baseline=baseline).as_dict()
        text = html.render_html(loaded, gate=verdict)
    else:
        text = loaded.csv() if kind == "csv" else export.render_markdown(loaded)
    if str(path) == "-":
        sys.stdout.write(text)
        return None
    write_atomically(path, text)
    return path
