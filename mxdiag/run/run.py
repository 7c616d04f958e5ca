"""Run folders: the one place that writes and reads `run.json` and `tensors.csv`."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxdiag.errors import RunError
from mxdiag.run import schema as run_schema
from mxdiag.run.columns import (
    CHOICE_COLUMNS,
    CSV_COLUMNS,
    column_of,
    corrected_column,
    correction_of,
)
from mxdiag.run.stored_sums import SUMS_NPZ, RowSums, digest_of_sums, encode_sums, read_sums

if TYPE_CHECKING:
    import pandas as pd

SCHEMA_VERSION = 2
#: Written by earlier versions and still read: 1 has no `calibration` and no sums.
_READ_AS_WELL = (1,)
RUN_JSON, TENSORS_CSV, REPORT_HTML = "run.json", "tensors.csv", "report.html"

_REQUIRED = ("schema_version", "model", "settings", "coverage", "tensors", "totals")


def write_atomically(path: Path, content: str | bytes) -> None:
    """Write a file whole or not at all: a sibling temporary file, then a rename.

    Raises
    ------
    RunError
        If the file cannot be written; an older file at `path` stays.
    """
    # Half a surrogate pair, which JSON can bring, is written as its escape.
    data = content.encode(errors="backslashreplace") if isinstance(content, str) else content
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "wb") as file:
            file.write(data)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)
        os.replace(temporary, path)
        temporary = None
    except OSError as error:
        raise RunError(
            f"cannot write: {error.strerror or error}",
            where=path,
            advice="Check the folder's permissions and free space",
        ) from error
    finally:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


#: What strict JSON takes as it is.
_STRICT_ALREADY = (int, str, bool, type(None))


def strict(value: Any) -> Any:
    """The same structure fit for strict JSON: non-finite floats are None, numpy scalars plain."""
    kind = type(value)
    if kind is float:
        return value if math.isfinite(value) else None
    if kind in _STRICT_ALREADY:
        return value
    if isinstance(value, dict):
        return {str(key): strict(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [strict(item) for item in value]
    if hasattr(value, "tolist"):
        return strict(value.tolist())
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def to_json(value: Any) -> str:
    """Strict JSON, no NaN and no Infinity, on one line."""
    return json.dumps(strict(value), allow_nan=False, ensure_ascii=False)


def _csv_line(cells: Iterable[Any]) -> str:
    """One line of CSV. csv only quotes the characters of its own line ending, and a lone carriage
    return must be quoted as well: so it ends lines with both, and this one with a newline.
    """
    text = io.StringIO()
    csv.writer(text, lineterminator="\r\n").writerow(cells)
    return text.getvalue()[:-2] + "\n"


def _shape_text(shape: Iterable[int] | str | None) -> str:
    return shape if isinstance(shape, str) else "x".join(str(size) for size in shape or ())


@dataclass(slots=True, repr=False)
class Run:
    """One run: the content of `run.json`, and the sums behind it."""

    data: dict[str, Any]
    folder: Path | None = None
    _sums: RowSums | None = None

    def __repr__(self) -> str:
        return f"Run({self.data['model'].get('source')!r}, {len(self.tensors)} rows)"

    @property
    def tensors(self) -> list[dict[str, Any]]:
        """The rows, one per (layer, operand, gemm)."""
        return self.data["tensors"]

    @property
    def sums(self) -> RowSums:
        """The additive statistics of every row, by (layer, operand, gemm): read when asked for.

        Raises
        ------
        RunError
            If the run has none, or those beside it are not its own.
        """
        if self._sums is None:
            digest = self.data.get("sums")
            if not isinstance(digest, str) or self.folder is None:
                raise RunError(
                    f"keeps no sums: it is of schema version {self.data['schema_version']}",
                    where=self.folder,
                    advice="Scan again with this version of mxdiag",
                )
            self._sums = read_sums(self.folder / SUMS_NPZ, digest)
        return self._sums

    @property
    def corrections(self) -> list[str]:
        """Names of the corrections that the run evaluated."""
        kinds = dict.fromkeys(tuple(row) for row in self.tensors)  # rows with the same keys, once
        names = (correction_of(key) for keys in kinds for key in keys)
        return list(dict.fromkeys(name for name in names if name is not None))

    @property
    def columns(self) -> list[str]:
        """Columns of `tensors.csv`, in order."""
        ratios = (corrected_column("mse_ratio", name) for name in self.corrections)
        return [*CSV_COLUMNS, *ratios, *CHOICE_COLUMNS]

    @property
    def frame(self) -> pd.DataFrame:
        """The rows as a pandas DataFrame with the columns of `tensors.csv`."""
        import pandas as pd

        columns = self.columns  # a walk over all rows: once
        frame = pd.DataFrame.from_records(
            [{column: row.get(column) for column in columns} for row in self.tensors],
            columns=columns,
        )
        frame["shape"] = [_shape_text(shape) for shape in frame["shape"]]
        for name in columns:
            column = column_of(name)
            assert column is not None
            if column.kind == "integer" and name != "numel":
                frame[name] = frame[name].astype("Int64")
            elif column.kind in ("integer", "number", "fraction"):
                frame[name] = pd.to_numeric(frame[name])
        return frame

    def csv(self) -> str:
        """`tensors.csv`: numbers in their shortest exact form, empty where null."""
        columns = self.columns
        lines = [_csv_line(columns)]
        for row in self.tensors:
            cells = {**row, "shape": _shape_text(row.get("shape"))}
            lines.append(
                _csv_line(["" if cells.get(name) is None else cells[name] for name in columns])
            )
        return "".join(lines)

    def write(self, folder: Path | str) -> Path:
        """Write `run.json`, `sums.npz` and `tensors.csv` into the folder, each whole or not at all.

        `run.json` is written last: what stands beside it is then its own.
        """
        folder = Path(folder)
        self.data["tensors"] = strict(self.tensors)
        if self._sums is None and isinstance(self.data.get("sums"), str) and folder != self.folder:
            _ = self.sums  # the folder that they lie in is another
        if self._sums is not None:
            content = encode_sums(self._sums, self.data["settings"]["scale_rule"])
            write_atomically(folder / SUMS_NPZ, content)
            self.data["sums"] = digest_of_sums(content)
        write_atomically(folder / TENSORS_CSV, self.csv())
        write_atomically(folder / RUN_JSON, to_json(self.data) + "\n")
        self.folder = folder
        return folder

    @classmethod
    def load(cls, path: Path | str) -> Run:
        """Read a run folder, or its `run.json`.

        Raises
        ------
        RunError
            If there is none, it is not a run, or a newer mxdiag wrote it.
        """
        path = Path(path)
        file = path / RUN_JSON if path.is_dir() else path
        advice = "Give the folder that `mxdiag scan` wrote"
        try:
            data = json.loads(file.read_bytes(), parse_constant=_refuse_constant)
        except FileNotFoundError:
            raise RunError("no run here", where=file, advice=advice) from None
        except (OSError, ValueError, RecursionError) as error:
            raise RunError(f"not a readable run: {error}", where=file, advice=advice) from None
        if not isinstance(data, dict) or any(key not in data for key in _REQUIRED):
            raise RunError("not a run of mxdiag", where=file, advice=advice)
        version = data["schema_version"]
        if type(version) is not int or version not in (SCHEMA_VERSION, *_READ_AS_WELL):
            raise RunError(
                f"written with schema version {version}, this mxdiag reads {SCHEMA_VERSION}",
                where=file,
                advice="Scan again, or use the version that wrote it",
            )
        wrong = run_schema.fault(data)
        if wrong is not None:
            raise RunError(wrong, where=file, advice="Scan again")
        return cls(data, file.parent)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not strict JSON")
