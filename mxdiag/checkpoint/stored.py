"""What a weight that is stored in a 4-bit block format says about itself, without being decoded."""

from __future__ import annotations

from mxdiag.checkpoint.decode import Buffers, Fp4Values, Mxfp4Counts
from mxdiag.checkpoint.open import Checkpoint
from mxdiag.checkpoint.stream import CHUNK_BYTES, stored_rows
from mxdiag.layers.linears import Linear


def stored_statistics(checkpoint: Checkpoint, linear: Linear) -> dict[str, float | int] | None:
    """What a weight that is stored as MXFP4 says about itself; None for any other encoding.

    Reads the weight's packed bytes once, without decoding them. See `decode.Mxfp4Counts.summary`
    for the keys.
    """
    if checkpoint.entries[linear.tensor].dtype != "mxfp4":
        return None
    values = checkpoint.values(linear.tensor)
    assert isinstance(values, Fp4Values)
    group = stored_rows(checkpoint, [linear])[0]
    columns = group.members[0].columns
    first, last = columns.start // values.block, -(-columns.stop // values.block)
    counts, buffers = Mxfp4Counts(), Buffers()
    step = max(1, CHUNK_BYTES // group.width)
    for row in range(0, group.count, step):
        rows = min(step, group.count - row)
        start = group.base + row * group.width
        packed, scales = values.read_codes(start, rows * group.width, buffers)
        counts.add(
            packed.reshape(rows, -1, values.block // 2)[:, first:last].reshape(
                -1, values.block // 2
            ),
            scales.reshape(rows, -1)[:, first:last],
        )
    return counts.summary()
