"""A whole `mxdiag scan FILE --weights-only` process against a script that reads every tensor once.

The peer opens the file with safetensors and takes `.float().abs().max()` of each tensor. Both run
as processes of their own, interleaved, on a made bf16 file in the page cache, with mxdiag's kernel
cache warm. Prints the wall time ratio (best of the repeats) and the peak resident memory.

    python benchmarks/weights_only.py [--gigabytes 2] [--repeats 3] [--corrections none]
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

PEER = """
import sys
from safetensors import safe_open
with safe_open(sys.argv[1], "pt") as file:
    for name in file.keys():
        file.get_tensor(name).float().abs().max()
"""


def make_file(path: Path, gigabytes: float, rows: int = 4096, columns: int = 8192) -> None:
    """A safetensors file of bf16 normal matrices, written piece by piece."""
    count = max(1, round(gigabytes * 1e9 / (2 * rows * columns)))
    size = 2 * rows * columns
    header = {
        f"model.layers.{i}.mlp.down_proj.weight": {
            "dtype": "BF16",
            "shape": [rows, columns],
            "data_offsets": [i * size, (i + 1) * size],
        }
        for i in range(count)
    }
    text = json.dumps(header).encode()
    rng = np.random.default_rng(0)
    base = rng.standard_normal((rows, columns), np.float32)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for _ in range(count):
            shifted = np.roll(base, int(rng.integers(columns)), 1) * np.float32(rng.uniform(0.5, 2))
            file.write((shifted.view(np.uint32) >> 16).astype(np.uint16).tobytes())


def measured(command: list[str]) -> tuple[float, float]:
    """Wall seconds and peak resident megabytes of a process."""
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(process.stderr.read().decode() if process.stderr else "failed")
    return time.perf_counter() - start, usage.ru_maxrss / 1024


def main() -> None:
    """Make the file, run both, print the ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gigabytes", type=float, default=2.0)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--corrections", default="none")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "big.safetensors"
        # In a process of its own: a child's peak memory begins with its parent's.
        maker = multiprocessing.Process(target=make_file, args=(path, options.gigabytes))
        maker.start()
        maker.join()
        ours = [sys.executable, "-m", "mxdiag", "scan", str(path), "--weights-only", "--quiet"]
        ours += ["--corrections", options.corrections, "--out", folder + "/run"]
        peer = [sys.executable, "-c", PEER, str(path)]
        measured(ours)  # kernels compiled, file in the page cache
        runs = [(measured(ours), measured(peer)) for _ in range(options.repeats)]
    mine, theirs = (min(run[side][0] for run in runs) for side in (0, 1))
    memory, peer_memory = (max(run[side][1] for run in runs) for side in (0, 1))
    print(
        f"mxdiag scan --weights-only --corrections {options.corrections}: "
        f"{mine:.2f} s, {memory:.0f} MB"
    )
    print(f"safe_open + .float().abs().max():  {theirs:.2f} s, {peer_memory:.0f} MB")
    print(f"ratio {mine / theirs:.2f}")


if __name__ == "__main__":
    main()
