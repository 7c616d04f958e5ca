"""Speed of the Triton kernels on a GPU, beside a plain copy and torchao, on one device in one run.

    python benchmarks/launch.py [--shape 4096 8192]

Needs a CUDA or ROCm device; no figures from one are on record yet. `launch` is the kernel alone,
`measure` the public call with its totals brought to the host. Bandwidth counts every tensor that
has to be read or written once; each timed call takes another tensor, and the L2 cache is cleared
before it. torchao quantizes and dequantizes: less than the decomposition, as it takes no sums.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch

TENSORS = 4


def seconds(function: Callable[[torch.Tensor], Any], tensors: list[torch.Tensor]) -> float:
    """Median time of function over the tensors in turn, after warming up."""
    from triton.testing import do_bench

    turn = cycle(tensors)
    return do_bench(lambda: function(next(turn)), return_mode="median") / 1e3


def torchao_round_trip(x: torch.Tensor) -> torch.Tensor:
    """Torchao's to_mx under rceil and back."""
    from torchao.prototype.mx_formats import mx_tensor as mx

    element = torch.float4_e2m1fn_x2
    scales, packed = mx.to_mx(x, element, 32, mx.ScaleCalculationMode.RCEIL)
    return mx.to_dtype(packed.view(torch.uint8), scales, element, 32, x.dtype)


def compare(shape: tuple[int, int], dtype: torch.dtype) -> None:
    """Print one line per operation: G elements/s, GB/s, and the ratios to the copy and torchao."""
    from mxdiag.formats import RCEIL
    from mxdiag.quantize.triton import launch as triton_kernels
    from mxdiag.quantize.triton.measure import _launch_measure

    tensors = [torch.randn(shape, device="cuda").to(dtype) for _ in range(TENSORS)]
    numel, size = tensors[0].numel(), tensors[0].element_size()
    rows = [x[..., None] for x in tensors]
    columns = [x[None] for x in tensors]
    read, written = numel * size, 2 * numel * size
    both = frozenset({"scale", "grid"})

    def launch(x: torch.Tensor) -> Any:
        return _launch_measure(x, RCEIL, False)

    def launch_tokens(x: torch.Tensor) -> Any:
        return _launch_measure(x, RCEIL, True)

    jobs: list[tuple[str, Callable[[torch.Tensor], Any], list[torch.Tensor], int]] = [
        ("copy", torch.Tensor.clone, tensors, written),
        ("torchao to_mx and back", torchao_round_trip, tensors, written),
        ("launch, rows", launch, rows, read),
        ("launch, columns", launch, columns, read),
        ("launch, columns, tokens", launch_tokens, columns, read),
        ("measure, rows", triton_kernels.measure, rows, read),
        ("measure, columns", triton_kernels.measure, columns, read),
        ("quantize_dequantize, rows", triton_kernels.quantize_dequantize, rows, written),
        ("quantize_dequantize, columns", triton_kernels.quantize_dequantize, columns, written),
        ("inject, rows", lambda x: triton_kernels.inject(x, both), rows, written),
    ]
    times: dict[str, float] = {}
    print(f"\n{dtype}, {shape[0]} x {shape[1]}")
    for name, function, inputs, traffic in jobs:
        try:
            times[name] = seconds(function, inputs)
        except ImportError as missing:
            print(f"{name:30} not measured: {missing}")
            continue
        copy_share = (traffic / times[name]) / (written / times["copy"])
        line = f"{name:30} {numel / times[name] / 1e9:8.1f} G/s"
        line += f" {traffic / times[name] / 1e9:8.0f} GB/s {copy_share:6.0%} of the copy"
        if "torchao to_mx and back" in times:
            line += f" {times['torchao to_mx and back'] / times[name]:6.1f} x torchao"
        print(line)


def main() -> int:
    """Time the kernel against its peer, and print the ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", type=int, nargs=2, default=(4096, 8192))
    shape = tuple(parser.parse_args().shape)
    if not torch.cuda.is_available():
        print("This benchmark needs a CUDA or ROCm device; torch sees none.", file=sys.stderr)
        return 2
    print(torch.cuda.get_device_name(), "torch", torch.__version__)
    for dtype in (torch.bfloat16, torch.float32):
        compare(shape, dtype)
    return 0


if __name__ == "__main__":
    sys.exit(main())
