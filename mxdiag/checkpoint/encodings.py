"""Which stored tensors belong together as one weight, and how that weight is encoded.

`resolve` turns a checkpoint's stored tensors into `Entry`s: a plain float tensor is one entry; a
quantized weight and its scales are one; a weight in an encoding that mxdiag does not decode is one
entry that says so by name. Quantized bytes are never read as numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from mxdiag.checkpoint.decode import (
    FLOAT8,
    PLAIN_DTYPES,
    Files,
    Float8Values,
    Fp4Values,
    PlainValues,
    ScaledFloat8Values,
    Values,
)
from mxdiag.checkpoint.safetensors import StoredTensor

Tensors = Mapping[str, StoredTensor]
Found = tuple["Entry", list[str]]
_LABELS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8"})
#: Block edges tried, in order, where the config does not tell.
_EDGES = (128, 32, 64, 256, 16, 512)


@dataclass(frozen=True, slots=True)
class Entry:
    """One weight (or other tensor) of a checkpoint.

    Attributes
    ----------
    name
        Name it has in the unquantized checkpoint (`...weight`).
    shape
        Logical shape, after unpacking.
    dtype
        Encoding label: "bfloat16", "fp8_e4m3+block128", "mxfp4" ...
    values
        Makes its reader; None if it cannot be decoded or is not a float.
    unsupported
        Why it cannot be decoded, by the name of the encoding.
    integer
        Indices or a mask: a buffer, not a parameter.
    out_in
        The values are [..., out, in] whatever the family usually stores.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: Callable[[Files], Values] | None = None
    unsupported: str | None = None
    integer: bool = False
    out_in: bool = False

    @property
    def numel(self) -> int:
        """Elements, by its logical shape."""
        count = 1
        for n in self.shape:
            count *= n
        return count


def entries_of(tensors: Tensors, config: Mapping[str, Any] | None) -> dict[str, Entry]:
    """Group stored tensors into entries; every stored tensor ends in exactly one of them."""
    quantization = _quantization(config)
    found: dict[str, Entry] = {}
    parts: dict[str, str] = {}
    for name, tensor in tensors.items():
        hit = _quantized(name, tensor, tensors, quantization)
        if hit is not None and (hit[0].name == name or hit[0].name not in tensors):
            found[name] = hit[0]
            parts.update(dict.fromkeys(hit[1], name))
    entries: dict[str, Entry] = {}
    for name, tensor in tensors.items():
        entry = found.get(name) or (None if name in parts else _plain(tensor))
        if entry is not None:
            entries[entry.name] = entry
    return entries


def _quantization(config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    for holder in (config, (config or {}).get("text_config")):
        for key in ("quantization_config", "compression_config"):
            value = holder.get(key) if isinstance(holder, Mapping) else None
            if isinstance(value, Mapping):
                return value
    return {}


def _plain(tensor: StoredTensor) -> Entry:
    dtype, name, shape = tensor.dtype, tensor.name, tensor.shape
    if dtype in PLAIN_DTYPES:
        return Entry(name, shape, _LABELS[dtype], lambda files: PlainValues(tensor, files))
    if dtype in FLOAT8 and dtype != "F8_E8M0":
        return Entry(name, shape, float8_label(dtype), lambda files: Float8Values(tensor, files))
    label = dtype.lower()
    if dtype in ("BOOL", "I64") or (dtype == "U8" and name.endswith("bias")):
        return Entry(name, shape, label, integer=True)  # indices and masks
    return Entry(name, shape, label, unsupported=f"{label} numbers in no known encoding")


def float8_label(dtype: str) -> str:
    """The label of a safetensors dtype: "fp8_e4m3" for F8_E4M3, and so on."""
    return "fp" + dtype.removeprefix("F").lower()


# ---- quantized encodings -----------------------------------------------------------------------


def _quantized(
    name: str, tensor: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found | None:
    """The entry `name` is the main tensor of, and the names of its parts; None if it is none."""
    if name.endswith("_blocks"):
        return _gpt_oss(name, tensor, tensors)
    if name.endswith(".weight_packed"):
        return _packed(name, tensor, tensors, quantization)
    if name.endswith(".qweight"):
        return _integer_packed(name, tensor, tensors, quantization)
    if tensor.dtype in FLOAT8 and len(tensor.shape) >= 2:
        return _scaled_float8(name, tensor, tensors, quantization)
    if name.endswith(".weight") and tensor.dtype in ("U8", "F4", "I8"):
        return _byte_weight(name, tensor, tensors)
    return None


def _gpt_oss(name: str, blocks: StoredTensor, tensors: Tensors) -> Found | None:
    """gpt-oss: X_blocks [..., out, in / 32, 16] uint8 and X_scales [..., out, in / 32] uint8."""
    base = name.removesuffix("_blocks")
    scales = tensors.get(base + "_scales")
    if scales is None or blocks.dtype != "U8" or len(blocks.shape) < 3:
        return None
    shape = (*blocks.shape[:-2], blocks.shape[-2] * 32)
    parts = [name, scales.name]
    fits = blocks.shape[-1] == 16 and scales.shape == blocks.shape[:-1]
    if not fits or scales.dtype not in ("U8", "F8_E8M0"):
        reason = "mxfp4 blocks and scales that disagree in shape"
        return Entry(base, shape, "mxfp4", unsupported=reason), parts
    return _mxfp4(base, shape, blocks, scales), parts


def _mxfp4(name: str, shape: tuple[int, ...], packed: StoredTensor, scale: StoredTensor) -> Entry:
    def values(files: Files) -> Values:
        return Fp4Values(packed, scale, shape[-1], 32, files)

    return Entry(name, shape, "mxfp4", values, out_in=True)


def _packed(
    name: str, packed: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found:
    """compressed-tensors: P.weight_packed with P.weight_scale and friends."""
    module = name.removesuffix("_packed")  # ends in .weight
    ends = ("_scale", "_global_scale", "_zero_point", "_shape", "_g_idx")
    parts = [name, *_present(tensors, module, ends), *_input_scales(tensors, module)]
    scale, one = tensors.get(module + "_scale"), tensors.get(module + "_global_scale")
    if packed.dtype == "U8" and scale is not None and len(packed.shape) >= 2:
        entry = _fp4(module, packed, scale, one, divide=True)
        if entry is not None:
            return entry, parts
    per_byte = (8 if packed.dtype == "U8" else 32) / _weight_bits(quantization)
    last = int(packed.shape[-1] * per_byte) if packed.shape else 0
    kind = str(quantization.get("format") or "pack-quantized")[:40]
    reason = f"compressed-tensors {kind} weights"
    return Entry(module, (*packed.shape[:-1], last), kind, unsupported=reason), parts


def _fp4(
    name: str,
    packed: StoredTensor,
    scale: StoredTensor,
    one: StoredTensor | None,
    *,
    divide: bool,
) -> Entry | None:
    """MXFP4 or NVFP4 from packed bytes [..., in / 2]; None where the scales fit neither."""
    row = packed.shape[-1] if packed.dtype == "F4" else packed.shape[-1] * 2
    shape = (*packed.shape[:-1], row)

    def fits(block: int) -> bool:
        return row % block == 0 and scale.shape == (*shape[:-1], row // block)

    if one is None:
        mx = scale.dtype in ("U8", "F8_E8M0") and fits(32)
        return _mxfp4(name, shape, packed, scale) if mx else None
    if one.numel != 1 or one.dtype not in PLAIN_DTYPES or scale.dtype != "F8_E4M3" or not fits(16):
        return None

    def values(files: Files) -> Values:
        return Fp4Values(packed, scale, row, 16, files, one, divide)

    return Entry(name, shape, "nvfp4", values, out_in=True)


def _byte_weight(name: str, tensor: StoredTensor, tensors: Tensors) -> Found | None:
    """A `.weight` of bytes: ModelOpt's FP4, bitsandbytes, or int8 with scales."""
    state = _bitsandbytes_parts(name, tensors)
    if state:
        four_bit = tensor.dtype == "U8"
        kind = "bitsandbytes 4-bit" if four_bit else "bitsandbytes int8"
        shape = (1, tensor.numel * 2) if four_bit else tensor.shape
        return Entry(name, shape, kind, unsupported=f"{kind} weights"), [name, *state]
    scale = tensors.get(name + "_scale")
    if scale is None:
        return None
    parts = [name, *_present(tensors, name, ("_scale", "_scale_2", "_zero_point"))]
    parts += _input_scales(tensors, name)
    if tensor.dtype in ("U8", "F4") and len(tensor.shape) >= 2:
        entry = _fp4(name, tensor, scale, tensors.get(name + "_scale_2"), divide=False)
        if entry is not None:
            return entry, parts
    label = tensor.dtype.lower()
    return Entry(name, tensor.shape, label, unsupported=f"{label} weights with scales"), parts


def _bitsandbytes_parts(name: str, tensors: Tensors) -> list[str]:
    states = ("quant_state.bitsandbytes__nf4", "quant_state.bitsandbytes__fp4")
    ends = ("absmax", "quant_map", "nested_absmax", "nested_quant_map", *states)
    found = _present(tensors, name + ".", ends)
    return found + _present(tensors, name.removesuffix("weight"), ("SCB", "weight_format"))


def _integer_packed(
    name: str, packed: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found:
    """GPTQ and AWQ: integers packed into int32 with zero points and group scales."""
    module = name.removesuffix("qweight")
    method = str(quantization.get("quant_method") or "GPTQ or AWQ")[:40]
    numel = packed.numel * 32 // _weight_bits(quantization)
    rows = packed.shape[0] if packed.shape else 1
    shape = (rows, numel // rows) if rows else (0, 0)
    parts = [name, *_present(tensors, module, ("qzeros", "scales", "g_idx"))]
    return Entry(module + "weight", shape, method, unsupported=f"{method} weights"), parts


def _scaled_float8(
    name: str, tensor: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found | None:
    """FP8 with `weight_scale_inv` (DeepSeek-V3) or `weight_scale` (compressed-tensors)."""
    found = _present(tensors, name, ("_scale_inv", "_scale"))
    if not found or tensor.dtype == "F8_E8M0":
        return None
    scale, label = tensors[found[0]], float8_label(tensor.dtype)
    parts = [name, *found, *_input_scales(tensors, name)]
    blocks = None if tensor.numel == 0 else _blocks(tensor.shape, scale, quantization)
    if scale.dtype not in _SCALE_DTYPES or blocks is None:
        shapes = f"scales {list(scale.shape)} of {scale.dtype} for weights {list(tensor.shape)}"
        return Entry(name, tensor.shape, label, unsupported=f"{label} with {shapes}"), parts

    def values(files: Files) -> Values:
        return ScaledFloat8Values(tensor, scale, blocks, files)

    label += f"+{_block_label(blocks, tensor.shape)}"
    return Entry(name, tensor.shape, label, values), parts


def _blocks(
    shape: tuple[int, ...], scale: StoredTensor, quantization: Mapping[str, Any]
) -> tuple[int, int] | None:
    """(rows, columns) that share one scale, None if the scale's shape fits no rule."""
    lead, (rows, cols) = shape[:-2], shape[-2:]
    if scale.numel == 1:
        return rows, cols
    if scale.shape == (*lead, rows):
        return 1, cols
    if lead and scale.shape == lead:
        return rows, cols
    if len(scale.shape) != len(shape) or scale.shape[:-2] != lead:
        return None
    told = quantization.get("weight_block_size")
    hints = told if isinstance(told, list) and len(told) == 2 else [None, None]
    down = _edge(rows, scale.shape[-2], hints[0])
    across = _edge(cols, scale.shape[-1], hints[1])
    return None if down is None or across is None else (down, across)


def _edge(length: int, parts: int, hint: object) -> int | None:
    """Elements per scale along one axis, so that `parts` of them cover `length`."""
    if parts == 1:
        return length
    if parts == length:
        return 1
    for edge in (hint, *_EDGES):
        if isinstance(edge, int) and edge > 0 and -(-length // edge) == parts:
            return edge
    return None


def _block_label(blocks: tuple[int, int], shape: tuple[int, ...]) -> str:
    if blocks == shape[-2:]:
        return "tensor"
    if blocks == (1, shape[-1]):
        return "channel"
    return f"block{blocks[0]}" if blocks[0] == blocks[1] else f"block{blocks[0]}x{blocks[1]}"


def _present(tensors: Tensors, prefix: str, endings: Iterable[str]) -> list[str]:
    return [prefix + end for end in endings if prefix + end in tensors]


def _input_scales(tensors: Tensors, weight: str) -> list[str]:
    """Scales of the activations that a static recipe stores beside a weight."""
    return _present(tensors, weight.removesuffix("weight"), ("input_scale", "input_global_scale"))


def _weight_bits(quantization: Mapping[str, Any]) -> int:
    """Bits per packed integer, 4 where the config does not tell."""
    bits = quantization.get("bits", quantization.get("w_bit"))
    groups = quantization.get("config_groups")
    if bits is None and isinstance(groups, Mapping):
        for group in groups.values():
            weights = group.get("weights") if isinstance(group, Mapping) else None
            bits = weights.get("num_bits") if isinstance(weights, Mapping) else None
            break
    if isinstance(bits, int) and not isinstance(bits, bool) and 1 <= bits <= 32:
        return bits
    return 4
