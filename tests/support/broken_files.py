"""Damaged safetensors files, and what is said of each."""

from __future__ import annotations

LAYER = "model.layers.0.mlp.down_proj.weight"


def entry(
    dtype: object = "F32", shape: object = (2, 2), offsets: object = (0, 16)
) -> dict[str, object]:
    return {LAYER: {"dtype": dtype, "shape": shape, "data_offsets": offsets}}


TWO = {
    "a.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b.weight": {"dtype": "F32", "shape": [2, 2], "data_offsets": [8, 24]},
}

BROKEN_HEADERS = {
    "not JSON": (b"{]", "damaged header"),
    "not UTF-8": (b'{"\xff": 1}', "damaged header"),
    "UTF-16": ('{"a": 1}'.encode("utf-16"), "damaged header"),
    "not an object": (b"[1, 2]", "not an object"),
    "NaN": (b'{"a": NaN}', "NaN is not JSON"),
    "huge number": (b'{"a": ' + b"9" * 5000 + b"}", "damaged header"),
    "deep nesting": (b'{"a":' + b"[" * 200_000, "nested too deeply"),
    "duplicate key": (b'{"a": 1, "a": 2}', "duplicate key 'a'"),
    "lone surrogate": (b'{"\\ud800": {"dtype":"U8","shape":[],"data_offsets":[0,1]}}', "malformed"),
    "entry is no object": ({LAYER: 3}, "malformed"),
    "no dtype": ({LAYER: {"shape": [2], "data_offsets": [0, 8]}}, "malformed"),
    "unknown dtype": (entry(dtype="F3"), "unknown dtype 'F3'"),
    "dtype is a list": (entry(dtype=["F32"]), "unknown dtype"),
    "negative size": (entry(shape=(-2, -2)), "not a list of sizes"),
    "boolean size": (entry(shape=(True, 4)), "not a list of sizes"),
    "float size": (entry(shape=(2.0, 2)), "not a list of sizes"),
    "too many axes": (entry(shape=[1] * 100), "not a list of sizes"),
    "three offsets": (entry(offsets=(0, 8, 16)), "malformed"),
    "reversed offsets": (entry(offsets=(16, 0)), "not a range"),
    "shape beyond its bytes": (entry(shape=(4, 4)), "do not hold shape"),
    "astronomic shape": (entry(shape=(2**62, 2**62)), "do not hold shape"),
    "odd number of 4-bit elements": (entry("F4", (1, 31), (0, 15)), "do not hold shape"),
    "beyond the file": (entry(shape=(2, 2000), offsets=(0, 16_000)), "was cut short"),
    "a hole": (entry(offsets=(8, 24)), "leaves a hole"),
    "an overlap": (TWO, "overlaps another tensor"),
    "metadata is no object": ({"__metadata__": 3}, "__metadata__"),
}

BROKEN_FILES = {
    "empty": (b"", "is empty"),
    "short": (b"\x01\x00\x00", "3 bytes: no safetensors"),
    "git-lfs pointer": (
        b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
        "git lfs pull",
    ),
    "header beyond the file": ((2**63).to_bytes(8, "little") + b"{}", "cut short"),
    "a gigabyte of header": ((10**9).to_bytes(8, "little") + b"{}", "cut short"),
    "trailing bytes": ((2).to_bytes(8, "little") + b"{}junk", "does not describe"),
    "an archive": (b"PK\x03\x04" + bytes(40), "no safetensors"),
}
