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
    CODES,
    FLOAT8,
    PLAIN_DTYPES,
    Files,
    Fp4Values,
    PlainValues,
    ScaledCodesValues,
    Values,
)
from mxdiag.checkpoint.safetensors import StoredTensor

Tensors = Mapping[str, StoredTensor]
Found = tuple["Entry", list[str]]
_LABELS = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_SCALE_DTYPES = frozenset({"F32", "BF16", "F16", "F8_E8M0", "F8_E4M3", "U8"})

#: Scales of an 8-bit tensor T that public checkpoints store as T plus one of these: value = code *
#: scale. `_scale_inv` is DeepSeek-V3's (a factor in spite of its name), `_scale` that of
#: compressed-tensors, ModelOpt, Quark and FBGEMM.
SCALES_OF_A_TENSOR = ("_scale_inv", "_scale")
#: Scales of `M.weight` that stand beside it under the module M. `scale` is DeepSeek's inference
#: format, `scale_weight` that of ComfyUI, `qscale_weight` that of Mistral's own files.
SCALES_OF_A_MODULE = ("scale", "scale_weight", "qscale_weight")
#: Scales of a module's input that a static recipe stores beside its weight; no part of the weight.
SCALES_OF_ACTIVATIONS = (
    "input_scale",
    "input_global_scale",
    "activation_scale",
    "act_scale",
    "scale_input",
    "qscale_act",
)
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
    codes
        What is stored are codes: numbers only once they are decoded with their scale.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    values: Callable[[Files], Values] | None = None
    unsupported: str | None = None
    integer: bool = False
    out_in: bool = False
    codes: bool = False

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
        entry = found.get(name) or (None if name in parts else _plain(tensor, tensors))
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


def _plain(tensor: StoredTensor, tensors: Tensors) -> Entry:
    dtype, name, shape = tensor.dtype, tensor.name, tensor.shape
    if dtype in PLAIN_DTYPES:
        return Entry(name, shape, _LABELS[dtype], lambda files: PlainValues(tensor, files))
    label = _code_label(dtype)
    if dtype in ("BOOL", "I64") or (dtype == "U8" and name.endswith("bias")):
        return Entry(name, shape, label, integer=True)  # indices and masks
    return Entry(name, shape, label, unsupported=_without_scale(name, label, tensors), codes=True)


def _without_scale(name: str, label: str, tensors: Tensors) -> str:
    """Why codes that no known scale belongs to are no weight."""
    if not label.startswith(("fp8", "int8")):
        return f"{label} numbers in no known encoding"
    module = name.removesuffix("weight")
    near = sorted(
        other
        for other in tensors
        if other != name and other.startswith(module) and "scale" in other[len(module) :]
    )
    beside = f"; beside it is {near[0]}" if near and module else ""
    return f"{label} codes without a scale that is known{beside}"


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
    if name.endswith(".weight._data"):
        return _quanto(name, tensor, tensors, quantization)
    if tensor.dtype in FLOAT8 and tensor.dtype != "F8_E8M0" and len(tensor.shape) >= 2:
        return _scaled_codes(name, tensor, tensors, quantization)
    if name.endswith(".weight") and tensor.dtype in ("U8", "F4", "I8"):
        return _byte_weight(name, tensor, tensors, quantization)
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
        return Entry(base, shape, "mxfp4", unsupported=reason, codes=True), parts
    return _mxfp4(base, shape, blocks, scales), parts


def _mxfp4(name: str, shape: tuple[int, ...], packed: StoredTensor, scale: StoredTensor) -> Entry:
    def values(files: Files) -> Values:
        return Fp4Values(packed, scale, shape[-1], 32, files)

    return Entry(name, shape, "mxfp4", values, out_in=True, codes=True)


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
    return Entry(module, (*packed.shape[:-1], last), kind, unsupported=reason, codes=True), parts


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

    return Entry(name, shape, "nvfp4", values, out_in=True, codes=True)


def _byte_weight(
    name: str, tensor: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found | None:
    """A `.weight` of bytes: ModelOpt's FP4, bitsandbytes, or int8 with scales."""
    state = _bitsandbytes_parts(name, tensors)
    if state:
        four_bit = tensor.dtype == "U8"
        kind = "bitsandbytes 4-bit" if four_bit else "bitsandbytes int8"
        shape = (1, tensor.numel * 2) if four_bit else tensor.shape
        return Entry(name, shape, kind, unsupported=f"{kind} weights", codes=True), [name, *state]
    if tensor.dtype == "I8" and name + "_zero_point" not in tensors and len(tensor.shape) >= 2:
        return _scaled_codes(name, tensor, tensors, quantization)
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
    return Entry(
        name, tensor.shape, label, unsupported=f"{label} weights with scales", codes=True
    ), parts


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
    return Entry(
        module + "weight", shape, method, unsupported=f"{method} weights", codes=True
    ), parts


def _scaled_codes(
    name: str, tensor: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found | None:
    """FP8 or int8 codes with the one scale that their names tell; None where there is none."""
    found = _present(tensors, name, SCALES_OF_A_TENSOR)
    if name.endswith(".weight"):
        found += _present(tensors, name.removesuffix("weight"), SCALES_OF_A_MODULE)
    if not found:
        return None
    parts = [name, *found, *_input_scales(tensors, name)]
    if len(found) > 1:
        label = _code_label(tensor.dtype)
        reason = f"{label} codes with {len(found)} scales: {' and '.join(found)}"
        return Entry(name, tensor.shape, label, unsupported=reason, codes=True), parts
    return _times(name, tensor, tensors[found[0]], quantization), parts


def _quanto(
    name: str, tensor: StoredTensor, tensors: Tensors, quantization: Mapping[str, Any]
) -> Found:
    """optimum-quanto: P.weight._data with P.weight._scale, and _shift where it is asymmetric."""
    weight = name.removesuffix("._data")
    parts = [name, *_present(tensors, weight, ("._scale", "._shift"))]
    scale = tensors.get(weight + "._scale")
    if scale is None or weight + "._shift" in tensors or tensor.dtype not in CODES:
        label = f"quanto {tensor.dtype.lower()}"
        return Entry(weight, tensor.shape, label, unsupported=f"{label} codes", codes=True), parts
    return _times(weight, tensor, scale, quantization), parts


def _times(
    name: str, codes: StoredTensor, scale: StoredTensor, quantization: Mapping[str, Any]
) -> Entry:
    """The weight that is codes times a scale; unsupported where the scale's shape is in doubt."""
    label, shape = _code_label(codes.dtype), codes.shape
    blocks = _blocks(shape, scale, quantization) if codes.numel and len(shape) >= 2 else None
    if scale.dtype not in _SCALE_DTYPES or blocks is None:
        reason = (
            f"{label} with scales {list(scale.shape)} of {scale.dtype} for weights {list(shape)}"
        )
        return Entry(name, shape, label, unsupported=reason, codes=True)

    def values(files: Files) -> Values:
        return ScaledCodesValues(codes, scale, blocks, files)

    return Entry(name, shape, f"{label}+{_block_label(blocks, shape)}", values, codes=True)


def _code_label(dtype: str) -> str:
    """The label of a dtype: "fp8_e4m3" for F8_E4M3, "int8" for I8."""
    if dtype in FLOAT8:
        return float8_label(dtype)
    return "int8" if dtype == "I8" else dtype.lower()


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
    return _present(tensors, weight.removesuffix("weight"), SCALES_OF_ACTIVATIONS)


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
