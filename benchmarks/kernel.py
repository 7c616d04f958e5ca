"""Speed of the fused CPU kernel beside torchao's quantize + dequantize, on 4096 x 8192.

    python benchmarks/kernel.py [--repeats N] [--threads N]

Every timed call gets another tensor, the candidates take turns, and each is judged by its best
time, so that other work on the machine disturbs the ratios as little as possible. The peer of the
strided case is torchao on the same tensor along its contiguous axis, which is the easier task. The
first table's ratios are "times as fast as torchao", the second's "times as long as the plain
decomposition".
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import ml_dtypes
import numpy as np
import torch
from torchao.prototype.mx_formats.config import ScaleCalculationMode
from torchao.prototype.mx_formats.mx_tensor import MXTensor

from mxdiag.formats import RCEIL
from mxdiag.quantize.corrections.registry import parse_corrections
from mxdiag.quantize.cpu import launch as cpu

SHAPE = (4096, 8192)
TENSORS = 4
DTYPES = {"bf16": np.dtype(ml_dtypes.bfloat16), "fp32": np.dtype(np.float32)}

Call = Callable[[np.ndarray], object]


def torchao_round_trip(x: np.ndarray) -> object:
    """to_mx with rceil scales, and back."""
    if x.dtype == np.float32:
        tensor = torch.from_numpy(x)
    else:
        tensor = torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    mx = MXTensor.to_mx(tensor, torch.float4_e2m1fn_x2, 32, scaling_mode=ScaleCalculationMode.RCEIL)
    return mx.dequantize(tensor.dtype)


def best_times(calls: dict[str, Call], tensors: list[np.ndarray], repeats: int) -> dict[str, float]:
    """Seconds of each call's fastest run, the calls taking turns over the tensors."""
    best = dict.fromkeys(calls, float("inf"))
    for call in calls.values():
        call(tensors[0][:64])  # compiles
    for turn in range(repeats):
        for offset, (name, call) in enumerate(calls.items()):
            x = tensors[(turn + offset) % len(tensors)]
            start = time.perf_counter()
            call(x)
            best[name] = min(best[name], time.perf_counter() - start)
    return best


def print_ratios(dtype: str, tensors: list[np.ndarray], repeats: int, threads: int | None) -> None:
    """One dtype's rows: elements per second and the ratio to torchao, beside the target."""
    out = np.empty((*SHAPE, 1), DTYPES[dtype])

    def written(call: Callable[..., object]) -> Call:
        return lambda x: call(x[:, :, None], out=out[: x.shape[0]])

    calls: dict[str, Call] = {
        "torchao": torchao_round_trip,
        "decompose": lambda x: cpu.measure(x[:, :, None], RCEIL, threads=threads),
        "decompose, strided axis": lambda x: cpu.measure(x[None], RCEIL, threads=threads),
        "decoded values": written(
            lambda x, out: cpu.quantize_dequantize(x, RCEIL, out=out, threads=threads)
        ),
        "injected component": written(
            lambda x, out: cpu.inject(x, frozenset({"scale"}), RCEIL, out=out, threads=threads)
        ),
    }
    targets = {"decompose": {"bf16": 80, "fp32": 60}[dtype], "decoded values": 30}
    targets["injected component"] = 30
    if dtype == "bf16":
        targets["decompose, strided axis"] = 50
    times = best_times(calls, tensors, repeats)
    for name, seconds in times.items():
        rate = SHAPE[0] * SHAPE[1] / seconds / 1e9
        target = f"target {targets[name]:>3}" if name in targets else ""
        ratio = times["torchao"] / seconds
        print(f"{dtype}  {name:<26}{rate:8.3f} G/s{ratio:8.1f} x  {target}")


def print_corrections(tensors: list[np.ndarray], repeats: int, threads: int | None) -> None:
    """What the default corrections cost, one by one and together."""
    default = parse_corrections("default")

    def measured(*corrections: object) -> Call:
        return lambda x: cpu.measure(
            x[:, :, None], RCEIL, corrections=corrections, amax=6.0, threads=threads
        )

    calls = {"plain": measured()} | {c.name: measured(c) for c in default}
    calls["all six"] = measured(*default)
    times = best_times(calls, tensors, repeats)
    for name, seconds in times.items():
        target = "target at most 3" if name == "all six" else ""
        print(f"bf16  with {name:<21}{seconds / times['plain']:8.2f} x  {target}")


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=8)
    parser.add_argument("--threads", type=int, default=None)
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    rng = np.random.default_rng(0)
    values = [rng.standard_normal(SHAPE, dtype=np.float32) for _ in range(TENSORS)]
    for name, dtype in DTYPES.items():
        tensors = [x.astype(dtype) for x in values]
        print_ratios(name, tensors, options.repeats, options.threads)
        if name == "bf16":
            print_corrections(tensors, options.repeats, options.threads)


if __name__ == "__main__":
    main()
