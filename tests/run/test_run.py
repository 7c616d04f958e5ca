"""Run folders: strict JSON, a CSV that round-trips, files written whole or not at all."""

from __future__ import annotations

import json
import math

import pandas as pd
import pytest

from mxdiag.errors import RunError
from mxdiag.run.columns import CSV_COLUMNS
from mxdiag.run.run import Run, write_atomically

HOSTILE = (
    "a,b",
    'quo"te',
    "new\nline",
    "=cmd()",
    "</script><img onerror=alert(1)>",
    "[/bold]",
    "ünïcode\u2028",
    "carriage\rreturn",
)


def make_run(**changes) -> Run:
    rows = [
        {
            "layer": name,
            "role": "q_proj",
            "expert": None,
            "operand": "W",
            "gemm": "fprop",
            "status": "ok",
            "shape": [2, 32],
            "numel": 64,
            "sqnr_db": 18.1 + index / 3,
            "rel_mse": math.nan,
            "mse_ratio:mbs": 0.9,
        }
        for index, name in enumerate(HOSTILE)
    ]
    data = {
        "schema_version": 1,
        "model": {},
        "settings": {},
        "coverage": {
            "measured": len(HOSTILE),
            "measured_parameters": 64,
            "parameters": 64,
            "parameter_fraction": 1.0,
            "excluded": [],
            "unsupported": [],
            "not_observed": [],
        },
        "tensors": rows,
        "totals": [],
        **changes,
    }
    return Run(data)


def test_csv_round_trips_hostile_names(tmp_path):
    run = make_run()
    run.write(tmp_path)
    frame = pd.read_csv(tmp_path / "tensors.csv", keep_default_na=True)
    assert tuple(frame["layer"]) == HOSTILE
    assert list(frame.columns[: len(CSV_COLUMNS)]) == list(CSV_COLUMNS)
    assert list(frame.columns[len(CSV_COLUMNS) :]) == ["mse_ratio:mbs", "recommended", "reason"]
    assert frame["sqnr_db"][1] == 18.1 + 1 / 3  # the shortest form that reads back exactly


def test_json_is_strict_and_loads_back(tmp_path):
    make_run().write(tmp_path)

    def refuse(name):
        raise AssertionError(name)

    data = json.loads((tmp_path / "run.json").read_text(), parse_constant=refuse)
    assert data["tensors"][0]["rel_mse"] is None
    run = Run.load(tmp_path)
    assert [row["layer"] for row in run.tensors] == list(HOSTILE)
    assert run.frame["sqnr_db"].iloc[2] == pytest.approx(18.1 + 2 / 3, rel=1e-15)
    assert run.frame["expert"].isna().all()
    assert Run.load(tmp_path / "run.json").tensors == run.tensors


def test_a_failing_write_keeps_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "run.json"
    write_atomically(path, "old")

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mxdiag.run.run.os.replace", full)
    with pytest.raises(RunError, match="No space left"):
        write_atomically(path, "new")
    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


def test_an_interrupt_leaves_no_temporary_file(tmp_path, monkeypatch):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("mxdiag.run.run.os.replace", interrupt)
    with pytest.raises(KeyboardInterrupt):
        write_atomically(tmp_path / "x", "new")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (None, "no run here"),
        ("{", "not a readable run"),
        ('{"schema_version": 1, "tensors": NaN}', "NaN is not strict"),
        ("[]", "not a run of mxdiag"),
        ("[" * 100_000, "not a readable run"),
    ],
)
def test_bad_runs_are_one_message(tmp_path, content, match):
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    with pytest.raises(RunError, match=match):
        Run.load(tmp_path)


def test_other_schema_versions_and_broken_rows_are_refused(tmp_path):
    make_run(schema_version=3).write(tmp_path)
    with pytest.raises(RunError, match="schema version 3"):
        Run.load(tmp_path)
    run = make_run()
    run.data["tensors"] = [{"layer": "x"}]
    run.write(tmp_path)
    with pytest.raises(RunError, match="no operand of a GEMM"):
        Run.load(tmp_path)


def test_columns_are_found_once_whatever_the_number_of_rows(tmp_path):
    class Counting(Run):
        walks = 0

        @property
        def corrections(self):
            type(self).walks += 1
            return super().corrections

    run = Counting(make_run().data)
    run.write(tmp_path)
    assert run.frame.shape[0] == len(HOSTILE)
    assert Counting.walks == 2


DAMAGE = {
    "coverage is no object": lambda d: d.update(coverage="x"),
    "coverage.unsupported is no list": lambda d: d["coverage"].update(unsupported=None),
    "coverage.parameters is no number": lambda d: d["coverage"].update(parameters="1"),
    "unknown status 'OK'": lambda d: d["tensors"][0].update(status="OK"),
    "no operand of a GEMM": lambda d: d["tensors"][0].update(operand="G"),
    "lacks its layer": lambda d: d["tensors"][0].update(layer=""),
    "sqnr_db is '18', no number": lambda d: d["tensors"][0].update(sqnr_db="18"),
    "amax is '1000": lambda d: d["tensors"][0].update(amax=10**400),
    "no fraction": lambda d: d["tensors"][0].update(deadzone_frac=-5),
    "mse_ratio:mbs is 'True'": lambda d: d["tensors"][0].update({"mse_ratio:mbs": True}),
    "reason is no text": lambda d: d["tensors"][0].update(reason=[1]),
    "shape is no list": lambda d: d["tensors"][0].update(shape=True),
    "total 0: no object": lambda d: d.update(totals=[["a"]]),
    "corrections.mxfp8 holds no costs": lambda d: d.update(corrections={"mxfp8": -1}),
    "impact.forward is no list": lambda d: d.update(impact={"forward": "x"}),
    "settings is no object": lambda d: d.update(settings=5),
    "schema version True": lambda d: d.update(schema_version=True),
    "sentences is no list": lambda d: d.update(recommendation={"sentences": 3}),
}


@pytest.mark.parametrize("message", DAMAGE)
def test_damaged_runs_are_refused_whole(tmp_path, message):
    """Whatever reads a run stops here: a gate must not pass what it cannot read."""
    run = make_run()
    DAMAGE[message](run.data)
    (tmp_path / "run.json").write_text(json.dumps(run.data).replace("NaN", "null"))
    with pytest.raises(RunError, match=message.replace("'", ".")):
        Run.load(tmp_path)


def test_half_a_surrogate_pair_is_written_as_its_escape(tmp_path):
    write_atomically(tmp_path / "x", "a\ud800b")
    assert (tmp_path / "x").read_bytes() == b"a\\ud800b"
