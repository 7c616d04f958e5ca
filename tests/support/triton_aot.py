"""Compile the Triton kernels ahead of time, with no GPU present, and report what they need.

A program of its own, since it needs a process without TRITON_INTERPRET: `triton_aot.py TARGET...`
prints one JSON object per kernel. `stack` is local memory per thread in bytes, which is where
spilled registers go; `spilled` counts the registers that the AMD compiler says it spilled.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from mxdiag.quantize.triton import measure as triton_kernel
from mxdiag.quantize.triton import tiles as triton_tiles
from mxdiag.quantize.triton import write as triton_write

TARGETS = {
    "cuda-80": GPUTarget("cuda", 80, 32),
    "cuda-90": GPUTarget("cuda", 90, 32),
    "cuda-100": GPUTarget("cuda", 100, 32),
    "hip-gfx942": GPUTarget("hip", "gfx942", 64),
    "hip-gfx950": GPUTarget("hip", "gfx950", 64),
}
#: Name: the kernel, and its compile-time arguments.
KERNELS: dict[str, tuple[Any, dict[str, Any]]] = {
    "measure": (triton_kernel._measure_kernel, {"K_TOKENS": False}),
    "measure-tokens": (triton_kernel._measure_kernel, {"K_TOKENS": True}),
    "values": (triton_write._write_kernel, {"WHAT": 1, "COMPONENTS": 0}),
    "codes": (triton_write._write_kernel, {"WHAT": 0, "COMPONENTS": 0}),
    "inject": (triton_write._write_kernel, {"WHAT": 2, "COMPONENTS": 5}),
}
POINTERS = {
    "bounds": "*fp32",
    "sums": "*fp32",
    "counts": "*i32",
    "delta_hist": "*i32",
    "tokens": "*fp64",
    "scale_codes": "*u8",
}


#: Kernel, element type, and layout: rows along a contiguous K, or columns side by side.
CASES = (
    ("measure", "bf16", "rows"),
    ("measure", "fp32", "rows"),
    ("measure", "fp32", "columns"),
    ("values", "bf16", "rows"),
    ("values", "fp32", "columns"),
    ("codes", "fp32", "rows"),
    ("inject", "bf16", "rows"),
    ("inject", "fp32", "rows"),
)
#: Slow to compile, and the same code with three more sums: for one target of each vendor.
SLOW_CASE = ("measure-tokens", "bf16", "columns")
SLOW_CASE_TARGETS = ("cuda-90", "hip-gfx950")


def compile_one(target: str, kernel: str, dtype: str, layout: str) -> Any:
    """Compile as a launch on aligned, contiguous tensors would."""
    fn, constants = KERNELS[kernel]
    element = {"bf16": "*i16", "fp16": "*fp16", "fp32": "*fp32"}[dtype]
    pointers = {**POINTERS, "x": element, "out": "*u8" if kernel == "codes" else element}
    rows = layout == "rows"
    constants = {
        **constants,
        "AXIS": int(rows),
        "LANES": triton_tiles.ROW_LANES if rows else triton_tiles.SIDE_LANES,
        "SHORT": dtype != "fp32",
    }
    unit = "_k_stride" if rows else "_inner_stride"
    constants.update({name: 1 for name in fn.arg_names if f"_{name}".endswith(unit)})
    signature, attrs = {}, {}
    for index, name in enumerate(fn.arg_names):
        if name in constants:
            signature[name] = "constexpr"
            continue
        signature[name] = pointers.get(name, "i64" if name == "K" else "i32")
        if (
            name in pointers
            or name in ("K", "inner")
            or name.endswith(("outer_stride", "k_stride"))
        ):
            attrs[(index,)] = [["tt.divisibility", 16]]
    return triton.compile(
        ASTSource(fn, signature, constexprs=constants, attrs=attrs),
        target=TARGETS[target],
        options={
            "num_warps": triton_tiles.THREADS // TARGETS[target].warp_size,
            "enable_fp_fusion": kernel.startswith("measure"),
        },
    )


def cuda_resources(compiled: Any) -> dict[str, Any]:
    """Registers and stack from the machine code, and what to look for in the PTX."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(compiled.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [tool, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    ptx = compiled.asm["ptx"]
    return {
        "registers": int(re.findall(r"REG:(\d+)", usage)[0]),
        "stack": int(re.findall(r"STACK:(\d+)", usage)[0]),
        "spilled": None,
        "fma": len(re.findall(r"\bfma\.rn\.f(?:32|32x2|64)\b", ptx)),
        "flushes": sorted(set(re.findall(r"\b\w+(?:\.\w+)*\.ftz\.f32\b", ptx))),
        "exact_division": "div.rn.f64" in ptx,
        "wide_loads": "ld.global.v4" in ptx,
    }


def hip_resources(compiled: Any) -> dict[str, Any]:
    """The same from the metadata and the text of AMD's assembly."""
    assembly = compiled.asm["amdgcn"]

    def field(name: str) -> int:
        return int(re.findall(rf"\.{name}:\s*(\d+)", assembly)[0])

    keeps_subnormals = re.findall(r"amdhsa_float_denorm_mode_32 (\d)", assembly) == ["3"]
    return {
        "registers": field("vgpr_count"),
        "stack": field("private_segment_fixed_size"),
        "spilled": field("vgpr_spill_count"),
        "fma": len(re.findall(r"\bv_(?:pk_)?(?:fma|fmac)_f32", assembly)),
        "flushes": [] if keeps_subnormals else ["denorm_mode_32"],
        "exact_division": "v_div_fixup_f64" in assembly,
        "wide_loads": "_load_dwordx4" in assembly,
    }


def narrow_offsets(compiled: Any) -> int:
    """Pointer steps with 32-bit offsets, those by constants aside."""
    steps = re.findall(r"tt\.addptr .* : (tensor<.*), tensor<\S*xi32>", compiled.asm["ttir"])
    return len(steps)


def one_block_per_thread(compiled: Any) -> bool:
    """Whether a warp's threads stand side by side, each with a whole column of the tile."""
    layout = r"sizePerThread = \[1, 1\], threadsPerWarp = \[1, (?:32|64)\], warpsPerCTA = \[1, \d\]"
    return re.search(layout, compiled.asm["ttgir"]) is not None


def main(targets: list[str]) -> None:
    for target in targets:
        for case in (*CASES, SLOW_CASE) if target in SLOW_CASE_TARGETS else CASES:
            compiled = compile_one(target, *case)
            resources = cuda_resources if TARGETS[target].backend == "cuda" else hip_resources
            row = dict(zip(("target", "kernel", "dtype", "layout"), (target, *case), strict=True))
            row |= resources(compiled) | {"narrow_offsets": narrow_offsets(compiled)}
            row["one_block_per_thread"] = one_block_per_thread(compiled)
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
