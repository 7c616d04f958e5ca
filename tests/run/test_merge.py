"""Runs add up: to one scan of all records, or one message that says what differs."""

from __future__ import annotations

import itertools
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mxdiag
from mxdiag.decomposition import Decomposition, decompose, merges_by_maximum, packed_fields
from mxdiag.errors import RunError
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.run.run import Run

RNG = np.random.default_rng(5)
#: Of different lengths, so that no two parts have the same labelled tokens.
RECORDS = [{"input_ids": RNG.integers(0, 400, n).tolist()} for n in (33, 48, 17, 64, 40, 21)]
LABELLED = sum(len(record["input_ids"]) - 1 for record in RECORDS)
SIX = {"gemms": "fprop,dgrad,wgrad"}


def scan(records: list[dict[str, Any]], model: str = "sample:dense", **options: Any) -> Run:
    options = {**SIX, "loss_tokens": LABELLED, **options}
    return mxdiag.scan(model, calibration=records, **options)


def assert_equal(found: Any, wanted: Any, place: str = "") -> None:
    """Equal but for the order in which float64 sums were added up."""
    if isinstance(wanted, dict):
        assert list(found) == list(wanted), place
        for key in wanted:
            assert_equal(found[key], wanted[key], f"{place}.{key}")
    elif isinstance(wanted, list):
        assert len(found) == len(wanted), place
        for i, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_equal(a, b, f"{place}[{i}]")
    elif isinstance(wanted, float):
        # Differences of sums lose the digits that cancel; what they are differences of does not.
        close = 1e-9 if "error_sum" in place or "residual" in place else 1e-12
        assert math.isclose(found, wanted, rel_tol=1e-12, abs_tol=close), (place, found, wanted)
    else:
        assert found == wanted, place


def parts_of(run: Run) -> dict[str, Any]:
    keys = ("tensors", "totals", "coverage", "warnings", "calibration", "corrections", "model")
    return {key: run.data[key] for key in keys}


@pytest.fixture(scope="module")
def whole() -> Run:
    return scan(RECORDS)


@pytest.fixture(scope="module")
def thirds() -> list[Run]:
    return [scan(RECORDS[at : at + 2]) for at in (0, 2, 4)]


def test_three_runs_are_one_scan_of_all_records(whole: Run, thirds: list[Run]) -> None:
    assert_equal(parts_of(mxdiag.merge(thirds)), parts_of(whole))


def test_neither_order_nor_steps_matter(whole: Run, thirds: list[Run], tmp_path: Path) -> None:
    for order in itertools.permutations(range(3)):
        merged = mxdiag.merge([mxdiag.merge([thirds[i] for i in order[:2]]), thirds[order[2]]])
        assert_equal(parts_of(merged), parts_of(whole))
    folders = [str(run.write(tmp_path / str(i))) for i, run in enumerate(thirds)]
    merged = mxdiag.merge(folders)
    assert_equal(parts_of(merged), parts_of(whole))
    again = Run.load(merged.write(tmp_path / "all"))
    assert again.sums.keys() == whole.sums.keys()


def test_an_expert_that_one_run_alone_saw() -> None:
    """Its row has no numbers in the other run, and not even the columns of corrections."""
    options = {"model": "sample:moe", "corrections": "mbs,sr", "loss_tokens": 38}
    records = [{"input_ids": [7, 8, 9, 7]}, {"input_ids": list(range(100, 136))}]
    one, other = (scan([record], **options) for record in records)
    both = scan(records, **options)
    lost = [len(run.data["coverage"]["not_observed"]) for run in (one, other, both)]
    assert lost[0] > lost[2] < lost[1] + lost[0]
    for order in ([one, other], [other, one]):
        merged = mxdiag.merge(order)
        for row in merged.tensors:
            assert ("not_observed_reason" in row) == (row["status"] == "not_observed")
        wanted = {(r["layer"], r["operand"], r["gemm"]): r for r in both.tensors}
        for row in merged.tensors:
            assert_equal(
                dict(sorted(row.items())),
                dict(sorted(wanted[row["layer"], row["operand"], row["gemm"]].items())),
            )
        assert_equal(merged.data["totals"], both.data["totals"])


def test_denominators_must_be_chosen_and_agree() -> None:
    options = {"gemms": "dgrad", "operands": "G", "corrections": "none"}
    a, b = scan(RECORDS[:1], **options), scan(RECORDS[1:2], **options, loss_tokens=7)
    with pytest.raises(RunError, match=r"divided by 217, 7 tokens.*--loss-tokens 79"):
        mxdiag.merge([a, b])
    same = [scan(RECORDS[:1], **options, loss_tokens=None) for _ in range(2)]
    with pytest.raises(RunError, match=r"divided by 32, 32 tokens.*--loss-tokens 64"):
        mxdiag.merge(same)
    without = [scan(RECORDS[:1], operands="W,A", gemms=None, loss_tokens=None) for _ in range(2)]
    assert mxdiag.merge(without).data["calibration"]["records"] == 2


def test_other_models_and_settings_are_refused_by_name(thirds: list[Run]) -> None:
    quick = {"corrections": "none", "operands": "W,A", "gemms": None}
    base = scan(RECORDS[:1], **quick)
    with pytest.raises(RunError, match="scanned with scale_rule 'even', the first run with 'rce"):
        mxdiag.merge([base, scan(RECORDS[:1], **quick, scale_rule="even")])
    with pytest.raises(RunError, match="another model: its source is 'sample:moe'"):
        mxdiag.merge([base, scan(RECORDS[:1], **quick, model="sample:moe")])
    with pytest.raises(RunError, match="two runs or more"):
        mxdiag.merge([base])
    changed = scan(RECORDS[:1], **quick)
    key = next(key for key in changed.sums if key[1] == "W")
    changed.sums[key] = changed.sums[key] + changed.sums[key]
    with pytest.raises(RunError, match=f"another model: the weight of {key[0]}"):
        mxdiag.merge([base, changed])


def test_sums_belong_to_their_run(tmp_path: Path) -> None:
    quick = {"corrections": "none", "operands": "W", "gemms": None}
    run = scan(RECORDS[:1], **quick)
    folder = run.write(tmp_path / "a")
    other = scan(RECORDS[:1], **quick, scale_rule="even").write(tmp_path / "b")
    (folder / "sums.npz").write_bytes((other / "sums.npz").read_bytes())
    with pytest.raises(RunError, match="holds the sums of another run"):
        _ = Run.load(folder).sums
    (folder / "sums.npz").unlink()
    with pytest.raises(RunError, match="cannot be read"):
        _ = Run.load(folder).sums
    data = json.loads((folder / "run.json").read_text())
    data["schema_version"] = 1
    del data["sums"], data["calibration"]
    (folder / "run.json").write_text(json.dumps(data))
    earlier = Run.load(folder)
    assert mxdiag.diff(earlier, run).as_dict()
    with pytest.raises(RunError, match="keeps no sums: it is of schema version 1"):
        mxdiag.merge([earlier, run])


def test_a_run_that_moves_takes_its_sums_along(tmp_path: Path) -> None:
    run = scan(RECORDS[:1], corrections="none", operands="W", gemms=None)
    moved = Run.load(run.write(tmp_path / "a")).write(tmp_path / "b")
    assert Run.load(moved).sums.keys() == run.sums.keys()


def test_the_command_writes_a_run_or_one_message(tmp_path: Path) -> None:
    lines = [json.dumps(record) for record in RECORDS[:2]]
    for i, line in enumerate(lines):
        (tmp_path / f"{i}.jsonl").write_text(line + "\n")

    def command(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "mxdiag", *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=False,
        )

    for i, tokens in enumerate(("79", "80")):
        options = ("--corrections", "none", "--loss-tokens", tokens, "--out", str(i), "--quiet")
        made = command("scan", "sample:dense", "--calib", f"{i}.jsonl", *options)
        assert made.returncode == 0, made.stderr
    refused = command("merge", "0", "1", "--out", "all")
    assert refused.returncode == 2
    assert refused.stderr.count("\n") == 1
    assert "--loss-tokens 79" in refused.stderr
    assert not (tmp_path / "all").exists()
    options = ("--corrections", "none", "--loss-tokens", "79", "--out", "1", "--quiet")
    assert command("scan", "sample:dense", "--calib", "1.jsonl", *options).returncode == 0
    merged = command("merge", "0", "1", "--out", "all")
    assert merged.returncode == 0, merged.stderr
    assert "run written to all" in merged.stdout
    assert Run.load(tmp_path / "all").data["calibration"]["records"] == 2


@given(data=st.data())
@settings(max_examples=25, deadline=None)
def test_packed_vectors_reduce_as_decompositions_add(data: Any) -> None:
    names = data.draw(st.sampled_from(["", "mbs,of", "nvfp4"]))
    tokens = data.draw(st.booleans())
    corrections = parse_corrections(names.split(",") if names else [])
    pair = [
        decompose(
            np.random.default_rng(seed).standard_normal((rows, 64)).astype(np.float32),
            tokens=tokens,
            corrections=corrections,
        )
        for seed, rows in enumerate(data.draw(st.lists(st.integers(1, 40), min_size=2, max_size=2)))
    ]
    own = [c.name for c in corrections]
    fields = packed_fields(own, tokens=tokens)
    a, b = (part.pack() for part in pair)
    assert a.shape == (len(fields),)
    for part in pair:
        same = Decomposition.unpack(part.pack(), "rceil", own, tokens=tokens)
        assert same.metrics() == part.metrics()
        np.testing.assert_array_equal(same.pack(), part.pack())
    reduced = np.where(merges_by_maximum(fields), np.maximum(a, b), a + b)
    np.testing.assert_array_equal(reduced, (pair[0] + pair[1]).pack())
    with pytest.raises(ValueError, match="fields"):
        Decomposition.unpack(a[:-1], "rceil", own, tokens=tokens)
