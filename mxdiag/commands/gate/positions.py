"""On which line of a TOML document each key stands. `tomllib` reads values but tells no places.

The scanner below only walks a document that `tomllib` has already accepted, so it validates
nothing: it has to find keys, headers and the ends of values.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

#: Keys and array indices from the document's root.
Path = tuple[str | int, ...]

_BLANK = re.compile(r"(?:[ \t\r\n]|#[^\n]*)*")
_KEY = re.compile(r'[A-Za-z0-9_-]+|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'')
_DOT = re.compile(r"[ \t]*\.[ \t]*")
#: A string in any of TOML's four spellings. A closing triple quote may follow two more quotes.
_STRING = re.compile(
    r'"""(?:[^\\]|\\.)*?"{3,5}(?!")|\'\'\'.*?\'{3,5}(?!\')|"(?:[^"\\\n]|\\.)*"|\'[^\'\n]*\'',
    re.DOTALL,
)
_SCALAR = re.compile(r"[^,\]}#\n]*")


@dataclass(slots=True)
class _Scanner:
    text: str
    at: int = 0
    lines: dict[Path, int] = field(default_factory=dict)
    #: How many tables each array of tables has so far.
    tables: dict[Path, int] = field(default_factory=dict)
    counted: int = 0
    line: int = 1

    def take(self, pattern: re.Pattern[str]) -> str:
        match = pattern.match(self.text, self.at)
        if match is None:
            raise ValueError(f"not valid TOML at character {self.at}")
        self.at = match.end()
        return match.group()

    def starts(self, text: str) -> bool:
        return self.text.startswith(text, self.at)

    def note(self, path: Path, at: int) -> None:
        """The first mention of a path counts. Mentions come in the order of the text."""
        self.line += self.text.count("\n", self.counted, at)
        self.counted = at
        self.lines.setdefault(path, self.line)

    def key(self) -> list[str]:
        parts = []
        while True:
            raw = self.take(_KEY)
            parts.append(next(iter(tomllib.loads(f"{raw} = 0"))) if raw[0] in "\"'" else raw)
            if not _DOT.match(self.text, self.at):
                return parts
            self.take(_DOT)

    def document(self) -> None:
        table: Path = ()
        self.take(_BLANK)
        while self.at < len(self.text):
            table = self.header() if self.starts("[") else self.pair(table)
            self.take(_BLANK)

    def header(self) -> Path:
        start, array = self.at, self.starts("[[")
        self.at += 2 if array else 1
        self.take(re.compile(r"[ \t]*"))
        keys = self.key()
        self.take(re.compile(r"[ \t]*\]\]?"))
        path: Path = ()
        for depth, key in enumerate(keys, 1):
            path = (*path, key)
            self.note(path, start)
            if array and depth == len(keys):
                self.tables[path] = self.tables.get(path, 0) + 1
            if path in self.tables:
                path = (*path, self.tables[path] - 1)
                self.note(path, start)
        return path

    def pair(self, table: Path) -> Path:
        """`key = value`, at the top of a table or inside an inline one; returns the table."""
        start, path = self.at, table
        for key in self.key():
            path = (*path, key)
            self.note(path, start)
        self.take(re.compile(r"[ \t]*=[ \t]*"))
        self.value(path)
        return table

    def value(self, path: Path) -> None:
        if self.starts("["):
            self.items("]", path)
        elif self.starts("{"):
            self.items("}", path)
        elif self.starts('"') or self.starts("'"):
            self.take(_STRING)
        else:
            self.take(_SCALAR)

    def items(self, closing: str, path: Path) -> None:
        self.at += 1
        index = 0
        while True:
            self.take(_BLANK)
            if self.starts(closing):
                self.at += 1
                return
            if closing == "}":
                self.pair(path)
            else:
                self.note((*path, index), self.at)
                self.value((*path, index))
                index += 1
            self.take(_BLANK)
            if self.starts(","):
                self.at += 1


def line_numbers(text: str) -> Mapping[Path, int]:
    """Line (from 1) of the first mention of every key, table and array element.

    Parameters
    ----------
    text
        A TOML document that `tomllib` accepts.

    Returns
    -------
    Mapping
        From the path, such as `("rule", 0, "bounds", "sqnr_db")`, to the line.
    """
    scanner = _Scanner(text)
    scanner.document()
    return scanner.lines


def line_of(lines: Mapping[Path, int], path: Path) -> int:
    """Line of a path, or of the nearest table around it; 1 for the document."""
    while path:
        if path in lines:
            return lines[path]
        path = path[:-1]
    return 1
