"""Stored names and shapes of encodings that are not decoded."""

from __future__ import annotations

import ml_dtypes
import numpy as np

BF16 = np.dtype(ml_dtypes.bfloat16)

NAME = "model.layers.0.mlp.down_proj"

GPTQ = {
    f"{NAME}.qweight": np.zeros((16, 64), np.int32),
    f"{NAME}.qzeros": np.zeros((1, 8), np.int32),
    f"{NAME}.scales": np.ones((1, 64), np.float16),
    f"{NAME}.g_idx": np.zeros(128, np.int32),
}

BNB4 = {
    f"{NAME}.weight": np.zeros((512, 1), np.uint8),
    f"{NAME}.weight.absmax": np.ones(16, np.float32),
    f"{NAME}.weight.quant_map": np.ones(16, np.float32),
    f"{NAME}.weight.quant_state.bitsandbytes__nf4": np.zeros(90, np.uint8),
}

BNB8 = {
    f"{NAME}.weight": np.zeros((32, 32), np.int8),
    f"{NAME}.SCB": np.ones(32, np.float32),
    f"{NAME}.weight_format": np.zeros((), np.uint8),
}

INT4 = {
    f"{NAME}.weight_packed": np.zeros((32, 16), np.int32),
    f"{NAME}.weight_scale": np.ones((32, 1), BF16),
    f"{NAME}.weight_shape": np.array([32, 128], np.int64),
}
