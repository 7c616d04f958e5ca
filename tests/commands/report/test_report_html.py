"""The HTML report, its encoding, and the Markdown and Parquet exports."""

from __future__ import annotations

import copy
import html
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pandas as pd
import pytest

from mxdiag.commands.report import summary
from mxdiag.commands.report.export import export_parquet, render_markdown
from mxdiag.commands.report.glossary import MAP_METRICS, TERMS
from mxdiag.commands.report.html import encode, impact
from mxdiag.commands.report.html import page as report_html
from mxdiag.commands.report.html.page import render_html
from mxdiag.commands.report.predictions import predictions
from mxdiag.run.columns import CSV_COLUMNS
from mxdiag.run.run import Run
from report_fixtures import HOSTILE, dense_run, large_run, moe_run, renamed, with_impact


@pytest.fixture(scope="module")
def dense() -> Run:
    return with_impact(dense_run(layers=4), layers=4)


@pytest.fixture(scope="module")
def moe() -> Run:
    return moe_run(layers=3, experts=4)


# ---- the encoding


def test_every_column_survives_the_encoding(moe: Run) -> None:
    encoded = encode.encode_rows(moe)
    assert list(encoded["columns"]) == moe.columns
    for name, column in encoded["columns"].items():
        column = encoded["columns"][column["as"]] if column["kind"] == "same" else column
        found = encode.decode_column(column, encoded["count"])
        for row, value in zip(moe.tensors, found, strict=True):
            expected = row.get(name)
            if name == "shape":
                expected = "x".join(map(str, expected))
            if isinstance(expected, float):
                # float32 holds 24 bits: relative error 2^-24, far below the 6 digits shown.
                assert value == pytest.approx(expected, rel=2**-24, abs=1e-44)
            else:
                assert value == expected, name


@pytest.mark.parametrize(
    ("values", "kind"),
    [
        pytest.param([0.25, 0.25], "constant", id="one value"),
        pytest.param([None, None], "constant", id="all null"),
        pytest.param([1.5, None, -2.0], "float", id="null among numbers"),
        pytest.param([1e300, 1.0], "float", id="beyond float32"),
        pytest.param([math.inf, 1.0], "float", id="infinity is null"),
    ],
)
def test_numbers(values: list, kind: str) -> None:
    column = encode.encode_numbers(values)
    expected = [None if v is None or math.isinf(v) else v for v in values]
    assert column["kind"] == kind
    assert encode.decode_column(column, len(values)) == expected


@pytest.mark.parametrize("distinct", [1, 256, 257, 65536, 65537])
def test_items_index_is_wide_enough(distinct: int) -> None:
    values = [f"n{i}" for i in range(distinct)]
    assert encode.decode_column(encode.encode_items(values), distinct) == values


def test_names_share_only_ascii_starts() -> None:
    names = ["é.a", "é.b", "a.😀.x", "a.😀.y", "a", "", "a.b"]
    column = encode.encode_names(names)
    assert encode.decode_column(column, len(names)) == names
    # JavaScript slices UTF-16 units, Python code points: a shared start must be as long in both.
    for name, shared in zip(names, column["shared"], strict=True):
        assert name[:shared].isascii()


def test_script_json_is_inert_and_exact() -> None:
    value = {"a": HOSTILE, "b": "<!--", "c": "]]>", "d": "\ud800"}
    text = encode.script_json(value)
    assert json.loads(text) == value
    assert not set("<>&\u2028\u2029") & set(text)
    with pytest.raises(ValueError, match="JSON"):
        encode.script_json(float("nan"))


@pytest.mark.parametrize(
    ("layer", "place"),
    [
        ("model.layers.12.mlp.experts.5.gate_proj", ("model.layers", 12)),
        ("transformer.h.0.attn.c_attn", ("transformer.h", 0)),
        ("0.weight", ("", 0)),
        ("lm_head", None),
        ("layer2.x", None),
        ("model.layers.3.mlp.experts.gate_up_proj[7].up_proj", ("model.layers", 3)),
    ],
)
def test_place_of(layer: str, place: tuple | None) -> None:
    assert encode.place_of(layer) == place


def test_stacks_do_not_share_a_depth() -> None:
    run = dense_run(layers=2)
    for row in run.tensors[:42]:
        row["layer"] = row["layer"].replace("model.layers", "encoder.block")
    places = encode.encode_rows(run)["places"]
    assert [(p["stack"], p["depth"]) for p in places] == [("encoder.block", 0), ("model.layers", 1)]


def test_delta_totals_hold_every_block(dense: Run) -> None:
    encoded = encode.encode_rows(dense)
    counted = sum(sum(group["bins"]) for group in encoded["delta"])
    assert counted == sum(sum(row["delta_hist"]) for row in dense.tensors)


# ---- the words


def test_worst_layers_are_the_lowest_sqnr_and_one_per_place(moe: Run) -> None:
    worst = summary.worst_layers(moe)
    rows = [moe.tensors[item.row] for item in worst]
    lowest = min(row["sqnr_db"] for row in moe.tensors if row["sqnr_db"] is not None)
    assert rows[0]["sqnr_db"] == lowest
    assert len(worst) == 5
    assert len({(encode.place_of(row["layer"]), row["role"]) for row in rows}) == 5
    assert f"{lowest:.1f}" in worst[0].headline


def test_nonfinite_rows_come_first() -> None:
    run = dense_run(layers=1)
    run.tensors[-1].update(status="nonfinite", nonfinite=3, sqnr_db=None)
    assert summary.worst_layers(run)[0].row == len(run.tensors) - 1
    assert "3 blocks" in summary.worst_layers(run)[0].words


def test_worst_layer_names_its_mechanism_token_and_remedy() -> None:
    run = dense_run(layers=1, cells=(("A", "fprop", -1, "in_features"),))
    run.tensors[3].update(
        sqnr_db=3.0,
        reducible=0.2,
        recoverable=0.5,
        irreducible=0.3,
        deadzone_frac=0.41,
        top_token_share=0.999,
        sqnr_db_token=9.5,
        recommended=None,
    )
    run.tensors[3].update({"mse_ratio:mbs": 0.9, "mse_ratio:of": 0.25, "mse_ratio:mbs+of": 0.2})
    run.tensors[3]["mse_ratio:mxfp8"] = None
    words = summary.worst_layers(run)[0].words.replace("\u00a0", " ")
    assert words.startswith("50 % of the error is values cut to zero (41 % of the elements")
    assert "; 30 % is noise of the 4-bit grid itself; 20 % is scale bias that a finer" in words
    assert "One token holds 99.9 % of the energy; the mean token has 9.5 dB." in words
    # Plain error 3.0 dB; OF is the cheapest that gains 3 dB: 3 + 10 log10(4) = 9.02.
    assert "of brings it to 9.0 dB for 4.25 more bits per element." in words


def test_predictions_stand_beside_measurements(dense: Run) -> None:
    total = next(
        t
        for t in dense.data["totals"]
        if (t["operand"], t["gemm"], t["role"]) == ("W", "fprop", None)
    )
    found = {p.claim: p for p in predictions(dense) if p.cell == "W·fprop"}
    mbs = found["mbs: MSE ratio"]
    assert mbs.predicted == pytest.approx(1 - total["reducible"])
    assert mbs.measured == total["mse_ratio:mbs"]
    sigma = next(p for claim, p in found.items() if "√(L/12)" in claim)
    assert sigma.predicted == pytest.approx(math.sqrt(4 / 12))
    # Independent uniform δ in each of four layers; 3 % is what blocks of this size leave to chance.
    assert sigma.measured == pytest.approx(sigma.predicted, rel=0.03)


def test_impact_table_marks_noise(dense: Run) -> None:
    found = copy.deepcopy(dense.data["impact"])
    found["forward"][0].update(kl_mean=0.1, kl_mean_sd=0.051, loss=3.1 + 0.1, loss_sd=0.049)
    table = impact.tables(found)[0]
    own = next(cells for texts, cells in table.rows if texts == ["all", "W"])
    cells = dict(zip([head for head, _ in table.heads[2:]], own, strict=True))
    assert cells["KL"].noise
    assert not cells["loss"].noise


def test_every_metric_is_explained() -> None:
    assert set(CSV_COLUMNS) <= set(TERMS)
    assert set(MAP_METRICS) <= set(TERMS)
    assert all(term.meaning and term.source for term in TERMS.values())


# ---- the document


class _Document(HTMLParser):
    """Every element with its attributes, and the text of scripts and styles."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict]] = []
        self.blocks: list[list] = []
        self.inside = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list) -> None:
        self.elements.append((tag, dict(attrs)))
        self.inside = tag in ("script", "style")
        if self.inside:
            self.blocks.append([tag, dict(attrs), ""])

    def handle_endtag(self, tag: str) -> None:
        self.inside = False

    def handle_data(self, data: str) -> None:
        if self.inside:
            self.blocks[-1][2] += data


def test_document_loads_nothing_and_the_policy_covers_it(dense: Run) -> None:
    document = _Document(render_html(dense))
    attributes = [(name, value) for _, attrs in document.elements for name, value in attrs.items()]
    assert not [name for name, _ in attributes if name in ("src", "style", "srcset", "data")]
    assert not [name for name, _ in attributes if name.startswith("on")]
    assert all(value.startswith("#") for name, value in attributes if name == "href")
    policy = next(a["content"] for t, a in document.elements if a.get("http-equiv"))
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    hashed = 0
    for tag, attrs, content in document.blocks:
        if attrs.get("type") == "application/json":
            json.loads(content)
        elif content.strip():
            hashed += 1
            assert report_html._hash(content) in policy, (tag, content[:60])
    assert hashed == 5  # three style sheets, the libraries, the page's own script


def test_libraries_need_no_eval_and_cannot_end_their_element() -> None:
    for name in (report_html.VENDOR_SCRIPT, *report_html.SCRIPTS):
        script = report_html._asset(name)
        assert not re.search(r"\beval\s*\(|new Function\b", script), name
        assert "</script" not in script.lower()
        assert "<!--" not in script
    for name in (report_html.VENDOR_STYLE, *report_html.STYLES):
        assert "url(" not in report_html._asset(name)


def test_hostile_names_are_text(dense: Run) -> None:
    page = render_html(renamed(dense, HOSTILE))
    document = _Document(page)
    assert not [tag for tag, _ in document.elements if tag in ("img", "iframe", "object")]
    assert "{{7*7}}" in html.unescape(page)
    names = {t for t, _ in document.elements}
    assert names == {t for t, _ in _Document(render_html(dense)).elements}


def test_half_a_surrogate_pair_is_writable(dense: Run) -> None:
    assert render_html(renamed(dense, "model.layers.0.\ud800")).encode()
    assert render_markdown(renamed(dense, "model.layers.0.\ud800")).encode()


def test_negative_reducible_is_shown_left_of_zero(dense: Run) -> None:
    data = copy.deepcopy(dense.data)
    total = next(t for t in data["totals"] if t["role"] is None)
    total.update(reducible=-0.25, recoverable=0.25, irreducible=1.0)
    shares = report_html._share_bars(Run(data))
    pieces = {piece["name"]: piece for piece in shares["bars"][0]["pieces"]}
    # The scale runs from -0.25 to 1.25: zero lies at 1/6 of it.
    assert pieces["reducible"] == {"name": "reducible", "x": 0.0, "width": 16.667}
    assert pieces["irreducible"]["x"] == pytest.approx(100 * 0.5 / 1.5, abs=1e-3)
    assert "-25\u00a0%" in render_html(Run(data))


def test_a_run_with_nothing_measured_renders() -> None:
    run = dense_run(layers=1, cells=(("G", "dgrad", -1, "out_features"),))
    for row in run.tensors:
        row.update({name: None for name, value in row.items() if isinstance(value, float)})
        row.update(status="not_observed", delta_hist=[0] * 32)
    run.data.update(totals=[], corrections={})
    assert "No row has an error" in render_html(run)
    assert "Nothing was measured" in render_markdown(run)


def test_gate_verdict_is_on_the_first_screen(dense: Run) -> None:
    finding = {"rule": "w", "level": "error", "layer": "<b>", "expected": "at least 20 dB"}
    page = render_html(dense, gate={"passed": False, "budget": "b.toml", "violations": [finding]})
    assert "Gate failed" in page
    assert "&lt;b&gt;" in page
    assert "Gate passed" in render_html(dense, gate={"passed": True, "violations": []})
    assert "Gate failed" not in render_html(dense)


def test_coverage_counts_what_is_excluded(dense: Run) -> None:
    covered = dense.data["coverage"]
    share = 100 * covered["measured_parameters"] / covered["parameters"]
    page = render_html(dense).replace("\u00a0", " ")
    assert f"<strong>{share:.1f} %</strong>" in page
    assert "2 excluded (32.8 k parameters)" in page


def test_recommendation_is_told(dense: Run) -> None:
    found = {"targets": {"target_sqnr": 18.0}, "sentences": ["A: nvfp4 on <72> rows"]}
    page = render_html(Run({**dense.data, "recommendation": found}))
    assert "A: nvfp4 on &lt;72&gt; rows" in page
    assert "SQNR of at least 18 dB" in page


def test_size_of_a_large_report_is_bounded() -> None:
    run = large_run(20_000)
    # Per row 39 measurements of 4 bytes and 32 histogram bytes in base64 are 251 bytes; names,
    # counts and indices take the rest. 1.3 MB are the libraries and the frame.
    assert len(render_html(run)) < 1.3e6 + 300 * 20_000


# ---- Markdown and Parquet


def test_markdown_is_short_and_has_the_numbers(moe: Run, dense: Run) -> None:
    text = render_markdown(moe)
    total = next(t for t in moe.data["totals"] if t["role"] is None)
    assert f"{100 * total['reducible']:.1f}\u00a0%" in text
    assert f"{total['sqnr_db']:.2f}" in text
    assert f"{total['mse_ratio:mbs']:.3f}" in text
    assert "closes" in text  # prediction beside measurement
    # A comment on GitHub holds 65,536 characters; ten layers or ten thousand make no difference.
    assert len(render_markdown(large_run(2_000))) < 8_000
    assert len(render_markdown(dense)) < 8_000


def test_markdown_is_inert(dense: Run) -> None:
    text = render_markdown(renamed(dense, f"@team {HOSTILE}\n# head | `x`"))
    assert "<img" not in text
    assert "@team" not in text
    assert not re.search(r"^# head", text, re.MULTILINE)


def test_parquet_round_trip(moe: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow writes Parquet")
    path = export_parquet(moe, tmp_path / "rows.parquet")
    pd.testing.assert_frame_equal(pd.read_parquet(path), moe.frame)
    assert [p.name for p in tmp_path.iterdir()] == ["rows.parquet"]
