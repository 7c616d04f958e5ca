"""The one list of columns: what is derived, written, explained and checked follows it."""

from __future__ import annotations

import copy
import json
import math
from typing import Any

import jsonschema
import pytest

import mxdiag
from mxdiag.decomposition import METRICS
from mxdiag.errors import RunError
from mxdiag.run.columns import (
    CORRECTION_COLUMNS,
    CSV_COLUMNS,
    IDENTITY_COLUMNS,
    ROW_COLUMNS,
    column_of,
    corrected_column,
    correction_of,
)
from mxdiag.run.run import Run
from paths import ROOT

PAGE = ROOT / "docs" / "columns.md"


@pytest.fixture(scope="module")
def run() -> Run:
    return mxdiag.scan("sample:moe", samples=1, seq_len=32, gemms="fprop,dgrad,wgrad")


def test_derived_columns_are_the_metrics_in_their_order() -> None:
    assert (*IDENTITY_COLUMNS, *METRICS) == CSV_COLUMNS
    assert len({column.name for column in ROW_COLUMNS}) == len(ROW_COLUMNS)


def test_every_value_of_a_run_is_a_column(run: Run) -> None:
    kinds: dict[str, Any] = {
        "text": str,
        "integer": int,
        "number": (int, float),
        "fraction": (int, float),
        "sizes": list,
        "counts": list,
    }
    for row in run.tensors:
        for key, value in row.items():
            column = column_of(key)
            assert column is not None, key
            assert value is None or isinstance(value, kinds[column.kind]), (key, value)
            if column.kind == "fraction" and value is not None:
                assert 0 <= value <= 1


def test_one_spelling_of_the_columns_of_corrections(run: Run) -> None:
    assert correction_of(corrected_column("mse_ratio", "mbs:64+of:1.0")) == "mbs:64+of:1.0"
    assert correction_of(corrected_column("gain", "mbs"), "gain") == "mbs"
    for other in ("mse_ratio", "sqnr_db", "sqnr_db:mbs", "x:mse_ratio:mbs"):
        assert correction_of(other) is None
    found = {key.partition(":")[0] for row in run.tensors for key in row if ":" in key}
    assert found == {column.name for column in CORRECTION_COLUMNS}


def as_page() -> str:
    """The documentation's list of columns."""
    lines = [
        "# Columns",
        "",
        "<!-- made from mxdiag/run/columns.py; a test says what it must be -->",
        "",
    ]
    lines += [
        "A row of `run.json` (`tensors[]`) and of `tensors.csv` is one (layer, operand, product)."
    ]
    lines += [
        "Every value but layer, operand, gemm and status may be null: undefined, or not observed.",
        "",
    ]
    groups = {
        "What was measured": [c for c in ROW_COLUMNS if c.of == "identity"],
        "Derived from the sums": [c for c in ROW_COLUMNS if c.of == "sums"],
        "Chosen by `recommend`": [c for c in ROW_COLUMNS if c.of == "choice"],
        "In `run.json` alone": [c for c in ROW_COLUMNS if c.of == "detail"],
        "Of each evaluated correction: `<column>:<correction>`": list(CORRECTION_COLUMNS),
    }
    for title, columns in groups.items():
        lines += [f"## {title}", "", "| column | unit | meaning | formula |", "|---|---|---|---|"]
        for column in columns:
            cells = (f"`{column.name}`", column.unit or column.kind, column.meaning, column.formula)
            lines.append("| " + " | ".join(cell.replace("|", "∣") for cell in cells) + " |")
        lines.append("")
    return "\n".join(lines)


def test_the_documentation_lists_the_columns() -> None:
    wanted = as_page()
    assert PAGE.read_text(encoding="utf-8") == wanted, f"docs/columns.md should be:\n\n{wanted}"


def test_the_published_schema_holds_for_runs(run: Run) -> None:
    schema = mxdiag.schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    validator = jsonschema.Draft202012Validator(schema)
    validator.validate(run.data)
    described = schema["properties"]["tensors"]["items"]["properties"]
    assert set(described) == {column.name for column in ROW_COLUMNS}


DAMAGE: dict[str, Any] = {
    "a text for a number": {"sqnr_db": "18"},
    "a fraction above 1": {"deadzone_frac": 1.5},
    "an unknown status": {"status": "OK"},
    "no layer": {"layer": ""},
    "an operand of no product": {"operand": "B"},
    "a text for a ratio": {"mse_ratio:mbs": "low"},
    "a fraction of a correction": {"underflow_frac:mbs": -1},
}


@pytest.mark.parametrize("case", DAMAGE)
def test_schema_and_loading_refuse_the_same_damage(run: Run, case: str, tmp_path: Any) -> None:
    data = copy.deepcopy(run.data)
    data["tensors"][0] |= DAMAGE[case]
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, mxdiag.schema())
    (tmp_path / "run.json").write_text(json.dumps(data))
    with pytest.raises(RunError, match="row 0"):
        Run.load(tmp_path)


def test_the_command_prints_the_schema(capsys: pytest.CaptureFixture[str], tmp_path: Any) -> None:
    from mxdiag.cli import main

    with pytest.raises(SystemExit) as end:
        main(["schema"])
    assert end.value.code == 0
    assert json.loads(capsys.readouterr().out) == mxdiag.schema()
    with pytest.raises(SystemExit):
        main(["schema", "--out", str(tmp_path / "s.json")])
    assert json.loads((tmp_path / "s.json").read_text()) == mxdiag.schema()


def test_floats_that_are_not_finite_are_null(run: Run) -> None:
    assert all(
        value is None or math.isfinite(value)
        for row in run.tensors
        for value in row.values()
        if isinstance(value, float)
    )
