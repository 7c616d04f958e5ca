"""Calibration records: what the model is run on.

A JSONL file holds one record a line: `{"text"}`, `{"prompt", "response", "advantage"?}` or
`{"input_ids", "labels"?, "advantage"?}`. Any other file is plain text, cut into consecutive records
of `seq_len` tokens. One record is one batch, so nothing is ever padded. Labels are unshifted, as in
Hugging Face: -100 is not predicted.
"""

from __future__ import annotations

import codecs
import json
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxdiag.errors import CalibrationError, MxdiagError

#: A file of records, or records or a model's own inputs.
Calibration = str | Path | Iterable[Any]
IGNORED_LABEL = -100
_SHAPES = "text, prompt + response (+ advantage), or input_ids (+ labels, advantage)"


@dataclass(frozen=True, slots=True)
class Record:
    """One tokenized record: token ids, labels of equal length, the advantage of its tokens."""

    input_ids: tuple[int, ...]
    labels: tuple[int, ...]
    advantage: float = 1.0
    prompt_length: int = 0

    @property
    def predicted(self) -> int:
        """Tokens that enter the next-token loss: labelled, and not the first."""
        return sum(label != IGNORED_LABEL for label in self.labels[1:])

    def cut(self, seq_len: int) -> Record:
        """The first `seq_len` tokens."""
        return Record(
            self.input_ids[:seq_len],
            self.labels[:seq_len],
            self.advantage,
            min(self.prompt_length, seq_len),
        )


def listed(calibration: Any) -> str | Path | list[Any] | None:
    """A calibration that can be read twice: a file's path, or a list of records or batches.

    Raises
    ------
    CalibrationError
        If it is neither a path nor holds items, or is a single item itself.
    """
    if calibration is None or isinstance(calibration, (str, Path)):
        return calibration
    advice = "Pass a file, or a list of records or of the model's inputs"
    if isinstance(calibration, (Mapping, Record, bytes)):
        raise CalibrationError(
            f"the calibration is a single {type(calibration).__name__}", advice=advice
        )
    try:
        items = iter(calibration)
    except TypeError:
        raise CalibrationError(
            f"the calibration cannot be of type {type(calibration).__name__}", advice=advice
        ) from None
    return list(items)


def _text_of(path: Path) -> str:
    try:
        text = path.read_text(encoding="utf-8-sig")
    except OSError as error:
        raise CalibrationError(
            f"cannot read the calibration file: {error.strerror or error}", where=path
        ) from None
    except UnicodeDecodeError as error:
        marked = error.object[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        raise CalibrationError(
            f"the calibration file is not UTF-8 text{' but UTF-16' if marked else ''}",
            where=path,
            advice="Give JSONL records or plain text, saved as UTF-8",
        ) from None
    if "\0" in text:  # what UTF-16 or UTF-32 without its mark reads as
        raise CalibrationError(
            "the calibration file holds NUL characters: it is no UTF-8 text",
            where=path,
            advice="Give JSONL records or plain text, saved as UTF-8",
        )
    if not text.strip():
        raise CalibrationError(
            "the calibration file is empty", where=path, advice=f"Write records with {_SHAPES}"
        )
    return text


def read_records(
    path: Path, tokenizer: Any, *, seq_len: int = 512, samples: int | None = None
) -> list[Record]:
    """Read, tokenize and cut the records of a calibration file.

    Parameters
    ----------
    path
        A `.jsonl` file of records, or a plain text file.
    tokenizer
        A Hugging Face tokenizer; None if the records hold `input_ids`.
    seq_len
        Longer records are cut to this many tokens.
    samples
        Take the first so many records; all if None.

    Raises
    ------
    CalibrationError
        If the file cannot be read, is empty, or holds a record that makes no sense.
    """
    text = _text_of(path)
    if path.suffix == ".jsonl":
        records = _jsonl_records(text, path, tokenizer)
    else:
        records = _text_records(text, path, tokenizer, seq_len)
    taken: list[Record] = []
    for record in records:
        if samples is not None and len(taken) >= samples:
            break
        taken.append(record.cut(seq_len))
    return taken


def _tokenize(text: str, tokenizer: Any, where: str, *, special: bool = True) -> list[int]:
    if tokenizer is None:
        raise CalibrationError(
            "the model has no tokenizer to read text with",
            where=where,
            advice="Give records with input_ids",
        )
    try:
        ids = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    except MxdiagError:
        raise
    except Exception as error:  # whatever a tokenizer makes of broken text
        raise CalibrationError(
            f"the tokenizer cannot read the text: {error}", where=where
        ) from None
    if not ids:
        raise CalibrationError("the record has no tokens", where=where)
    return [int(token) for token in ids]


def _text_records(text: str, path: Path, tokenizer: Any, seq_len: int) -> Iterator[Record]:
    ids = _tokenize(text, tokenizer, str(path))
    for start in range(0, len(ids), seq_len):
        piece = tuple(ids[start : start + seq_len])
        if start == 0 or len(piece) > 1:
            yield Record(piece, piece)


def _jsonl_records(text: str, path: Path, tokenizer: Any) -> Iterator[Record]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            fields = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise CalibrationError(f"not a JSON record: {error}", where=where) from None
        if not isinstance(fields, dict):
            raise CalibrationError(
                "a record must be a JSON object", where=where, advice=f"Write {_SHAPES}"
            )
        yield record_of(fields, tokenizer, where)


def record_of(fields: Mapping[str, Any], tokenizer: Any, where: str) -> Record:
    """One record from its fields; `where` names it in an error."""
    keys = set(fields)
    advantage = _advantage(fields.get("advantage", 1.0), where)
    if keys == {"text"}:
        ids = _tokenize(_string(fields, "text", where), tokenizer, where)
        return Record(tuple(ids), tuple(ids))
    if {"prompt", "response"} <= keys <= {"prompt", "response", "advantage"}:
        prompt = _tokenize(_string(fields, "prompt", where), tokenizer, where)
        response = _tokenize(_string(fields, "response", where), tokenizer, where, special=False)
        labels = [IGNORED_LABEL] * len(prompt) + response
        return Record((*prompt, *response), tuple(labels), advantage, len(prompt))
    if "input_ids" in keys and keys <= {"input_ids", "labels", "advantage"}:
        tokens = _integers(fields, "input_ids", where)
        given = _integers(fields, "labels", where) if "labels" in keys else tokens
        if len(given) != len(tokens):
            raise CalibrationError(
                f"{len(given)} labels for {len(tokens)} input_ids",
                where=where,
                advice="Labels are unshifted: one for each token, -100 where none",
            )
        prompt_length = next((i for i, label in enumerate(given) if label != IGNORED_LABEL), 0)
        return Record(tokens, given, advantage, prompt_length)
    raise CalibrationError(
        f"a record with the keys {', '.join(sorted(keys)) or 'none'}",
        where=where,
        advice=f"Write {_SHAPES}",
    )


def _string(fields: Mapping[str, Any], key: str, where: str) -> str:
    value = fields[key]
    if not isinstance(value, str) or not value:
        raise CalibrationError(f"{key} must be a non-empty string", where=where)
    return value


def _integers(fields: Mapping[str, Any], key: str, where: str) -> tuple[int, ...]:
    value = fields[key]
    plain = isinstance(value, list) and all(type(item) is int for item in value)
    if not plain or not value:
        raise CalibrationError(f"{key} must be a non-empty list of integers", where=where)
    return tuple(value)


def _advantage(value: Any, where: str) -> float:
    try:
        number = math.nan if isinstance(value, (bool, str)) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise CalibrationError("advantage must be a finite number", where=where)
    return number


def check_records(records: Sequence[Record], vocabulary: int | None, *, gradients: bool) -> None:
    """Refuse records that the model cannot be run on.

    Raises
    ------
    CalibrationError
        If a token is outside the model's vocabulary, or gradients are wanted and no token of any
        record is predicted.
    """
    if vocabulary is not None:
        for number, record in enumerate(records, start=1):
            labels = (label for label in record.labels if label != IGNORED_LABEL)
            for token in (*record.input_ids, *labels):
                if not 0 <= token < vocabulary:
                    raise CalibrationError(
                        f"token {token} is outside the model's vocabulary of {vocabulary}",
                        where=f"record {number}",
                        advice="Use the model's own tokenizer",
                    )
    if gradients and not any(record.predicted for record in records):
        raise CalibrationError(
            "no token of any record is predicted (all labels are -100), so there is no loss",
            advice="Give labels, or scan with --operands W,A",
        )
