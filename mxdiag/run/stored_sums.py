"""`sums.npz`: the additive sums behind every row of a run, so that runs merge exactly.

A NumPy archive without pickled objects. `index` is JSON: the scale rule, and for each group of rows
with the same fields their names (`fields`), the corrections, whether token sums are among them, and
the rows' identities; `group0`, `group1` ... are float64 [rows, fields]. `run.json` holds the digest
of the file that belongs to it.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mxdiag.decomposition import Decomposition, packed_fields
from mxdiag.errors import RunError
from mxdiag.run.columns import Key

SUMS_NPZ = "sums.npz"
_ADVICE = "Scan again: what belongs to a run.json is the file that was written with it"

RowSums = dict[Key, Decomposition]


def encode_sums(rows: Mapping[Key, Decomposition], scale_rule: str) -> bytes:
    """The content of `sums.npz`; the same sums give the same bytes."""
    groups: dict[tuple[tuple[str, ...], bool], list[Key]] = {}
    for key, decomposition in rows.items():
        kind = tuple(decomposition.corrections), decomposition.tokens is not None
        groups.setdefault(kind, []).append(key)
    index = {
        "scale_rule": scale_rule,
        "groups": [
            {
                "corrections": names,
                "tokens": tokens,
                "fields": packed_fields(names, tokens=tokens),
                "rows": keys,
            }
            for (names, tokens), keys in groups.items()
        ],
    }
    arrays = {
        f"group{number}": np.stack([rows[key].pack() for key in keys])
        for number, keys in enumerate(groups.values())
    }
    text = np.frombuffer(json.dumps(index).encode(), np.uint8)
    file = io.BytesIO()
    np.savez_compressed(file, allow_pickle=False, index=text, **arrays)
    return file.getvalue()


def digest_of_sums(content: bytes) -> str:
    """What `run.json` says of its `sums.npz`."""
    return hashlib.sha256(content).hexdigest()


def read_sums(path: Path, digest: str) -> RowSums:
    """The sums of each row of the run whose `run.json` names `digest`.

    Raises
    ------
    RunError
        If the file is missing, damaged, of another run, or of fields that this version lacks.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise RunError(f"cannot be read ({error.strerror})", where=path, advice=_ADVICE) from None
    if digest_of_sums(content) != digest:
        raise RunError("holds the sums of another run", where=path, advice=_ADVICE)
    try:
        with np.load(io.BytesIO(content), allow_pickle=False) as archive:
            return _decoded(archive, path)
    except (ValueError, KeyError, TypeError, zipfile.BadZipFile) as error:
        raise RunError(f"is damaged: {error}", where=path, advice=_ADVICE) from None


def _decoded(archive: Mapping[str, np.ndarray], path: Path) -> RowSums:
    index: dict[str, Any] = json.loads(archive["index"].tobytes())
    found: RowSums = {}
    for number, group in enumerate(index["groups"]):
        names, tokens = tuple(group["corrections"]), bool(group["tokens"])
        if group["fields"] != packed_fields(names, tokens=tokens):
            raise RunError(
                "holds the fields of another version of mxdiag", where=path, advice="Scan again"
            )
        for (layer, operand, gemm), vector in zip(
            group["rows"], archive[f"group{number}"], strict=True
        ):
            found[layer, operand, gemm] = Decomposition.unpack(
                vector, index["scale_rule"], names, tokens=tokens
            )
    return found
