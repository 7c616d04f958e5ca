"""Names and texts of unknown origin, made safe for each place that shows them."""

from __future__ import annotations

import os
import re
from pathlib import Path
from urllib.parse import quote

from mxdiag.commands.report.text.tables import printable

#: Texts that Markdown shows as they stand. An underscore inside a word is no emphasis.
_HARMLESS = re.compile(r"(?:[A-Za-z0-9 .,:;()·%→+-]|(?<=[A-Za-z0-9])_(?=[A-Za-z0-9]))*")


def markdown_code(text: str) -> str:
    """A text as code, also inside a table: nothing in it is markup, a link or a mention.

    Where it holds what would end a code span or a table's cell, every special character is a
    character reference, which Markdown never reads as structure.
    """
    text = printable(text)
    if text.strip() and not re.search(r"[`|\\]", text):
        return f"`{text}`"
    return f"<code>{re.sub(r'[^A-Za-z0-9 ]', lambda m: f'&#{ord(m.group())};', text)}</code>"


def markdown_text(text: str) -> str:
    """A text as it stands if it cannot be markup or a link, as a code span otherwise."""
    return text if _HARMLESS.fullmatch(text) and "www." not in text else markdown_code(text)


def github_data(text: str) -> str:
    """The message of a GitHub workflow command."""
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def github_property(text: str) -> str:
    """A property's value in a GitHub workflow command."""
    return github_data(text).replace(":", "%3A").replace(",", "%2C")


def github_line(text: str) -> str:
    """A line of a workflow's log that the runner cannot read as a command, old style or new."""
    text = printable(text).replace("##[", "##\\[")
    return f" .{text.lstrip()}" if text.lstrip().startswith("::") else text


def relative_path(path: str) -> str | None:
    """The path from the working directory, with slashes; None if it lies outside."""
    try:
        return Path(os.path.abspath(path)).relative_to(Path.cwd()).as_posix()
    except ValueError:
        return None


def uri_of(path: str) -> str:
    """A URI reference: relative to the working directory if the path lies in it."""
    relative = relative_path(path)
    return Path(os.path.abspath(path)).as_uri() if relative is None else quote(relative)
