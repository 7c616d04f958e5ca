"""A checkpoint's weights streamed: what a row says does not depend on how its weight was cut."""

from __future__ import annotations

import pytest

import ckpt_files as files
import mxdiag
from mxdiag.checkpoint import stream
from mxdiag.commands.scan import checkpoint as scan_checkpoint
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.run.rows import correction_columns


@pytest.mark.parametrize("names", ["all", "hadamard:64,mbs:256"])
def test_a_weight_in_pieces_is_corrected_as_a_whole(tmp_path, monkeypatch, names):
    """Draws of `sr` and `aqn`, scales of a tensor, macro blocks and rotations know no cut."""
    monkeypatch.setattr(stream, "CHUNK_BYTES", 1 << 15)
    monkeypatch.setattr(scan_checkpoint, "CHUNK_BYTES", 1 << 15)
    weight = files.normal(512, 192)
    path = files.write(tmp_path / "m.safetensors", {"model.layers.0.mlp.down_proj.weight": weight})
    corrections = parse_corrections(names)
    options = {"gemms": "fprop,dgrad", "operands": "W", "corrections": names}
    for row in mxdiag.scan(path, weights_only=True, **options).tensors:
        axis = 1 if row["gemm"] == "fprop" else 0
        whole = correction_columns(mxdiag.decompose(weight, axis, corrections=corrections))
        for column, value in whole.items():
            # Float64 sums in another order; errors cancel in their sum.
            close = {"abs": 1e-9} if column.startswith("error_sum") else {"rel": 1e-12}
            assert row[column] == (value if value is None else pytest.approx(value, **close)), (
                column
            )
