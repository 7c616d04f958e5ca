"""A headless Chromium for the tests of the report, and the page that it opens."""

from __future__ import annotations

import shutil
import time
from pathlib import Path

import pytest

from mxdiag.commands.report.html.page import render_html
from mxdiag.run.run import Run

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
READY = "document.documentElement.dataset.tableMs !== undefined"


@pytest.fixture(scope="module")
def browser():
    if CHROMIUM is None:
        pytest.skip("no Chromium on this machine")
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright drives the browser")
    with sync_api.sync_playwright() as playwright:
        instance = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        yield instance
        instance.close()


@pytest.fixture
def visit(browser, tmp_path: Path):
    """Opens a run's report; fails at the end on any console message, error or request."""
    contexts, complaints = [], []

    def open_report(run: Run, **options):
        gate = options.pop("gate", None)
        path = tmp_path / f"report{len(contexts)}.html"
        path.write_text(render_html(run, gate=gate), encoding="utf-8")
        context = browser.new_context(viewport={"width": 1440, "height": 900}, **options)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: complaints.append(str(error)))

        def note(request) -> None:
            if request.url != path.as_uri():
                complaints.append(f"request: {request.url}")

        page.on("request", note)
        page.goto(path.as_uri())
        until(page, READY)
        return page

    yield open_report
    for context in contexts:
        context.close()
    assert complaints == []


def until(page, expression: str) -> None:
    """Wait for an expression to hold. The page's policy forbids the evaluation of strings, on which
    playwright's own waiting for functions rests.
    """
    deadline = time.monotonic() + 30
    while not page.evaluate(expression):
        assert time.monotonic() < deadline, expression
        page.wait_for_timeout(20)
