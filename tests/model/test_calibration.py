"""Calibration files: every record form, and what is refused with file and line."""

from __future__ import annotations

import json

import pytest

from mxdiag.errors import CalibrationError
from mxdiag.model.calibration import Record, check_records, read_records


def tokenizer(text, add_special_tokens=True, verbose=True):
    return {"input_ids": ([1] if add_special_tokens else []) + [ord(c) % 50 + 2 for c in text]}


def write(tmp_path, *records, name="calib.jsonl"):
    path = tmp_path / name
    path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return path


def test_every_record_form(tmp_path):
    path = write(
        tmp_path,
        {"text": "abc"},
        "",
        {"prompt": "ab", "response": "cd", "advantage": -0.5},
        {"input_ids": [5, 6, 7], "labels": [-100, 6, 7]},
        {"input_ids": [5, 6, 7], "advantage": 2},
    )
    text, rollout, labelled, plain = read_records(path, tokenizer)
    assert text.labels == text.input_ids
    assert text.advantage == 1.0
    assert rollout.labels[:3] == (-100,) * 3  # the start token and the prompt
    assert rollout.labels[3:] == rollout.input_ids[3:]
    assert (rollout.advantage, rollout.prompt_length, rollout.predicted) == (-0.5, 3, 2)
    assert (labelled.predicted, labelled.prompt_length) == (2, 1)
    assert (plain.predicted, plain.advantage) == (2, 2.0)


def test_input_ids_need_no_tokenizer_and_text_does(tmp_path):
    assert read_records(write(tmp_path, {"input_ids": [1, 2]}), None)
    with pytest.raises(CalibrationError, match="no tokenizer"):
        read_records(write(tmp_path, {"text": "a"}), None)


def test_long_records_are_cut_and_none_is_dropped(tmp_path):
    path = write(tmp_path, {"text": "a" * 100}, {"text": "b"})
    records = read_records(path, tokenizer, seq_len=10)
    assert [len(r.input_ids) for r in records] == [10, 2]
    assert len(read_records(path, tokenizer, samples=1)) == 1


def test_plain_text_is_cut_into_consecutive_records(tmp_path):
    path = write(tmp_path, "x" * 25, name="calib.txt")
    assert [len(r.input_ids) for r in read_records(path, tokenizer, seq_len=10)] == [10, 10, 6]


@pytest.mark.parametrize(
    ("line", "match"),
    [
        ("{not json", "line 2: not a JSON record"),
        ("[1]", "line 2: a record must be a JSON object"),
        ('{"txt": "a"}', "line 2: a record with the keys txt"),
        ('{"text": ""}', "text must be a non-empty string"),
        ('{"text": "a", "advantage": 1}', "keys advantage, text"),
        ('{"input_ids": []}', "non-empty list of integers"),
        ('{"input_ids": [1, "2"]}', "non-empty list of integers"),
        ('{"input_ids": [1, true]}', "non-empty list of integers"),
        ('{"input_ids": [1, 2], "labels": [1]}', "1 labels for 2 input_ids"),
        ('{"prompt": "a", "response": "b", "advantage": NaN}', "advantage must be a finite"),
        ('{"prompt": "a", "response": "b", "advantage": "high"}', "advantage must be a finite"),
        ('{"input_ids": [1, 2], "advantage": 1' + "0" * 400 + "}", "advantage must be a finite"),
    ],
)
def test_bad_records_name_their_line(tmp_path, line, match):
    with pytest.raises(CalibrationError, match=match):
        read_records(write(tmp_path, {"text": "good"}, line), tokenizer)


def test_bad_files(tmp_path):
    with pytest.raises(CalibrationError, match="No such file"):
        read_records(tmp_path / "none.jsonl", tokenizer)
    with pytest.raises(CalibrationError, match="empty"):
        read_records(write(tmp_path, " \n \n"), tokenizer)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(CalibrationError, match="not UTF-8"):
        read_records(tmp_path / "bytes.txt", tokenizer)


def test_records_are_checked_against_the_model():
    with pytest.raises(CalibrationError, match="token 9 is outside"):
        check_records([Record((1, 9), (1, 1))], 9, gradients=True)
    with pytest.raises(CalibrationError, match="token 12 is outside"):
        check_records([Record((1, 2), (1, 12))], 9, gradients=True)
    silent = Record((1, 2), (-100, -100))
    check_records([silent], 9, gradients=False)
    with pytest.raises(CalibrationError, match="all labels are -100"):
        check_records([silent], 9, gradients=True)


def test_a_byte_order_mark_is_no_text(tmp_path):
    line = json.dumps({"text": "abc"})
    for name in ("calib.jsonl", "calib.txt"):
        content = line if name.endswith("jsonl") else "abc"
        (tmp_path / name).write_text(content, encoding="utf-8")
        plain = read_records(tmp_path / name, tokenizer)
        (tmp_path / name).write_text(content, encoding="utf-8-sig")
        assert read_records(tmp_path / name, tokenizer) == plain


@pytest.mark.parametrize(
    ("encoding", "match"),
    [
        ("utf-16", "not UTF-8 text but UTF-16"),
        ("utf-16-le", "holds NUL characters"),
        ("latin-1", "is not UTF-8 text$|is not UTF-8 text\\."),
    ],
)
@pytest.mark.parametrize("name", ["calib.jsonl", "calib.txt"])
def test_other_encodings_are_named(tmp_path, name, encoding, match):
    text = '{"text": "abc"}' if encoding == "utf-16-le" else '{"text": "abcé"}'
    (tmp_path / name).write_bytes(text.encode(encoding))
    with pytest.raises(CalibrationError, match=match) as caught:
        read_records(tmp_path / name, tokenizer)
    assert "saved as UTF-8" in str(caught.value)
