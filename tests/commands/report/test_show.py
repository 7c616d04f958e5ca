"""One layer in depth: everything the run knows of it, and help for a name that is not there."""

from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from mxdiag.commands.report.text.layer import bars_of, find_layer, layer_details
from mxdiag.commands.report.text.tables import printable
from mxdiag.errors import UsageError
from mxdiag.run.run import Run
from run_fixtures import HOSTILE, IMPACT, hostile_run, make_run, plain_run, row


def show(run: Run, name: str, *, terminal: bool = False, width: int = 100_000) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width, highlight=False)
    console.print(layer_details(run, name, console))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    return re.sub(r"\x1b\[[0-9;]*m", "", text) if terminal else text


def test_all_rows_of_the_layer_are_shown() -> None:
    run = plain_run()
    text = show(run, "model.layers.0.q_proj")
    assert text.startswith("model.layers.0.q_proj\n")
    for item in find_layer(run, "model.layers.0.q_proj"):
        assert f"{item['operand']}·{item['gemm']}" in text
        assert f"SQNR {item['sqnr_db']:.2f} dB" in text
        for share in ("reducible", "recoverable", "irreducible"):
            assert f"{share} {100 * item[share]:.1f} %" in text
        assert f"{item['scale_energy']:.3f} ‖e_scale‖²" in text
        assert f"deadzone {100 * item['deadzone_frac']:.2f} %" in text
    assert text.count("per token") == 2  # A and G
    assert "down_proj" not in text


def test_the_terms_shown_add_up() -> None:
    text = show(plain_run(), "model.layers.0.q_proj")
    line = next(line for line in text.split("\n") if "split" in line)
    found = re.findall(r"(?:([+-]) )?(\d+\.\d+) [‖2]", line)
    terms = [float(f"{sign}{value}") for sign, value in found]
    assert len(terms) == 5
    assert sum(terms) == pytest.approx(1.0, abs=5 * 0.0005)  # five terms of three decimals


def test_a_terminal_gets_bars_and_a_pipe_counts() -> None:
    run = make_run([row("a")])
    counts = run.tensors[0]["delta_hist"]
    piped = show(run, "a")
    assert " ".join(map(str, counts)) in piped
    assert not re.search("[▁-█]", piped)
    drawn = show(run, "a", terminal=True, width=100)
    assert f"+0.00 {bars_of(counts)} +1.00" in drawn
    assert "█" in drawn
    assert "░" in drawn


@pytest.mark.parametrize(
    ("counts", "bars"),
    [([0, 1, 8], " ▁█"), ([1, 1000], "▁█"), ([0, 0], "  "), ([4, 2, 8], "▄▂█")],
)
def test_bars(counts: list[int], bars: str) -> None:
    assert bars_of(counts) == bars


def test_corrections_with_gain_and_cost() -> None:
    run = make_run([row("a", recommended="mbs", reason="scale bias 23 %")])
    text = show(run, "a")
    lines = [line.split() for line in text.split("\n")]
    found = {line[0]: line[1:] for line in lines if line and line[0] in run.corrections}
    sqnr = run.tensors[0]["sqnr_db"]
    # MSE ratio 0.2 is worth 6.99 dB.
    assert found["mbs+of"] == ["0.2", "+6.99", f"{sqnr + 6.9897:.2f}", "+4.3125", "+1", "+0"]
    assert list(found) == ["scale:mse", "mbs", "mxfp8", "mbs+of"]  # cheapest first
    assert "recommended: mbs, scale bias 23 %" in text


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("exact", "there is no error"),
        ("zero", "all zero"),
        ("nan", "1 blocks hold NaN"),
        ("unseen", "not observed: frozen"),
    ],
)
def test_rows_without_an_error_say_why(kind: str, words: str) -> None:
    run = make_run([row("a", kind, not_observed_reason="frozen")])
    text = show(run, "a")
    assert words in text
    assert "None" not in text
    assert "nan" not in text


def test_gradients_of_the_impact() -> None:
    run = plain_run()
    run.data["impact"] = IMPACT
    assert "0.9500" in show(run, "model.layers.0.q_proj")
    assert "gradient" not in show(run, "model.layers.0.down_proj")


@pytest.mark.parametrize("name", HOSTILE)
@pytest.mark.parametrize("terminal", [True, False])
def test_hostile_names_are_found_and_shown_whole(name: str, terminal: bool) -> None:
    text = show(hostile_run(), name, terminal=terminal)
    assert text.startswith(printable(name) + "\n")
    assert not re.search(r"[\x00-\x09\x0b-\x1f]", text)


@pytest.mark.parametrize("width", [80, 100])
def test_it_fits_a_terminal(width: int) -> None:
    text = show(plain_run(), "model.layers.0.q_proj", terminal=True, width=width)
    assert max(map(len, text.split("\n"))) <= width
    assert "…" not in text


def test_the_end_of_a_name_will_do() -> None:
    run = plain_run()
    assert find_layer(run, "0.q_proj")[0]["layer"] == "model.layers.0.q_proj"
    with pytest.raises(UsageError, match=r"2 layers.*model.layers.0.q_proj, model.layers.1.q_proj"):
        find_layer(run, "q_proj")
    with pytest.raises(UsageError, match="no such layer"):
        find_layer(run, "proj")


def test_unknown_layers_get_help() -> None:
    run = plain_run()
    with pytest.raises(UsageError, match=r"Closest: .*model\.layers\.0\.q_proj"):
        find_layer(run, "model.layer.0.qproj")
    with pytest.raises(UsageError, match=r"Closest: model\.layers\.0\.q_proj, model\.layers\.1"):
        find_layer(run, "q_prj")
    with pytest.raises(UsageError, match="excluded by lm_head"):
        find_layer(run, "lm_head")
    with pytest.raises(UsageError, match="It has 4 layers, the first is"):
        find_layer(run, "zzz")
    run.data["coverage"]["unsupported"] = [{"layer": "x", "reason": "GPTQ"}]
    with pytest.raises(UsageError, match="unsupported, GPTQ"):
        find_layer(run, "x")
    with pytest.raises(UsageError, match="It has none"):
        find_layer(make_run([]), "x")
