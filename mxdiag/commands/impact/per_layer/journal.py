"""A file of finished measurements, added one by one, so that a later run goes on; no torch.

One JSON object a line. Each line names the measurement it belongs to by a key, a digest of all that
its numbers depend on; lines of other keys, and lines that were not written to their end, count as
not there.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from mxdiag.errors import RunError

Done = dict[tuple[str, int, int], dict[str, float | None]]
_VALUES = ("kl", "loss")


def digest(*parts: Any) -> str:
    """A key for settings and identities, as JSON values or bytes."""
    total = hashlib.sha256()
    for part in parts:
        data = part if isinstance(part, bytes) else json.dumps(part, sort_keys=True).encode()
        total.update(len(data).to_bytes(8, "little") + data)
    return total.hexdigest()[:32]


class Journal:
    """Finished measurements of one key, by (unit, repeat, record).

    Parameters
    ----------
    path
        The file; made with its folder if there is none. None keeps everything in memory.
    key
        What the numbers depend on: see `digest`.

    Raises
    ------
    RunError
        If the file cannot be read or written.
    """

    def __init__(self, path: Path | str | None, key: str) -> None:
        self.path, self.key = None if path is None else Path(path), key
        self.done: Done = {}
        self._clean = True  # whether the file ends with a whole line
        if self.path is not None:
            self._read(self.path)

    def _read(self, path: Path) -> None:
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            data = path.read_bytes() if path.exists() else b""
        except OSError as error:
            raise self._error("read", error) from None
        self._clean = not data or data.endswith(b"\n")
        for line in data.split(b"\n"):
            found = _entry(line, self.key)
            if found is not None:
                self.done[found[0]] = found[1]

    def add(self, unit: str, repeat: int, record: int, **values: float | None) -> None:
        """Keep one measurement; it is in the file when this returns."""
        self.done[unit, repeat, record] = values
        if self.path is None:
            return
        line = {"key": self.key, "unit": unit, "repeat": repeat, "record": record, **values}
        try:
            with self.path.open("a", encoding="utf-8") as file:
                file.write(("" if self._clean else "\n") + json.dumps(line) + "\n")
        except OSError as error:
            raise self._error("written", error) from None
        self._clean = True

    def _error(self, verb: str, error: OSError) -> RunError:
        return RunError(f"cannot be {verb}: {error.strerror or error}", where=self.path)


def _entry(line: bytes, key: str) -> tuple[tuple[str, int, int], dict[str, float | None]] | None:
    """One line, None if it is of another key or damaged."""
    try:
        fields = json.loads(line)
    except ValueError:
        return None
    if not isinstance(fields, dict) or fields.get("key") != key:
        return None
    unit, repeat, record = (fields.get(name) for name in ("unit", "repeat", "record"))
    if type(unit) is not str or type(repeat) is not int or type(record) is not int:
        return None
    values = {name: fields.get(name, "") for name in _VALUES}
    if not all(value is None or isinstance(value, (int, float)) for value in values.values()):
        return None
    return (unit, repeat, record), values
