"""Reading GGUF files: our own strict header parser, values through the `gguf` package's NumPy
functions.

GGUF is little-endian: magic, version, counts, key/value pairs, tensor descriptions, then the data
at `general.alignment`. Source: the format's description in the ggml repository. Tensors are [out,
in] as NumPy sees them; llama-family files keep q and k with their rotary halves interleaved, which
is undone here. A weight `X.weight` may have a scale `X.scale` beside it, one number or one per
expert, that multiplies it (NVFP4, BitNet). A model may be split over files, each with a header.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mxdiag.checkpoint.decode import (
    PLAIN_DTYPES,
    Buffers,
    Files,
    PlainValues,
    Values,
    read_bytes,
    read_scales,
)
from mxdiag.checkpoint.encodings import Entry
from mxdiag.checkpoint.gguf_names import config_from, expert_names, huggingface_name
from mxdiag.checkpoint.safetensors import DAMAGED, StoredTensor, open_regular, read_into
from mxdiag.errors import CheckpointError
from mxdiag.layers.roles import layer_name, role_of

#: Metadata and tensor descriptions larger than this are not plausible (a vocabulary takes about 10
#: MB).
MAX_GGUF_HEADER_BYTES = 100_000_000
_SCALARS = {
    0: "B",
    1: "b",
    2: "H",
    3: "h",
    4: "I",
    5: "i",
    6: "f",
    7: "?",
    10: "Q",
    11: "q",
    12: "d",
}
_STRING, _ARRAY = 8, 9
#: ggml types that need no decoding.
_PLAIN_TYPES = {"F32": "F32", "F16": "F16", "BF16": "BF16", "F64": "F64"}


class _Header:
    """A cursor over the start of the file; running off its end is an error that names the file."""

    def __init__(self, path: Path) -> None:
        self.path, self.position = path, 0
        with open_regular(path) as handle:
            self.size = os.fstat(handle.fileno()).st_size
            raw = bytearray(min(self.size, MAX_GGUF_HEADER_BYTES))
            read_into(handle, 0, memoryview(raw), path)
        self._raw = memoryview(raw)

    def take(self, count: int) -> memoryview:
        """The next `count` bytes."""
        end = self.position + count
        if end > len(self._raw):
            raise CheckpointError(
                "has a damaged or cut GGUF header", where=self.path, advice=DAMAGED
            )
        piece = self._raw[self.position : end]
        self.position = end
        return piece

    def number(self, code: str) -> Any:
        """One little-endian number of struct type `code`."""
        return struct.unpack("<" + code, self.take(struct.calcsize("<" + code)))[0]

    def text(self) -> str:
        """A string with its 64-bit length."""
        return bytes(self.take(self.number("Q"))).decode("utf-8", "replace")

    def value(self, kind: int, depth: int = 0) -> Any:
        """A metadata value; arrays are walked over and not kept."""
        if kind == _STRING:
            return self.text()
        if kind in _SCALARS:
            return self.number(_SCALARS[kind])
        if kind != _ARRAY or depth > 3:
            raise CheckpointError(
                f"has metadata of unknown type {kind}", where=self.path, advice=DAMAGED
            )
        item, count = self.number("I"), self.number("Q")
        if item in _SCALARS:
            self.take(count * struct.calcsize("<" + _SCALARS[item]))
        else:
            for _ in range(count):
                self.value(item, depth + 1)
        return None


#: How a file that is one of several is called.
PART_NAME = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


def read_gguf(
    path: Path, beside: Callable[[str], Path] | None = None
) -> tuple[list[Path], dict[str, Entry], dict[str, Any]]:
    """The files of a model, its entries, and a config in Hugging Face's words.

    Parameters
    ----------
    path
        The file, or any part of a split one.
    beside
        The path of another part by its name; by default in the same folder.

    Raises
    ------
    CheckpointError
        A file is damaged or missing, or the `gguf` package is not installed.
    """
    try:
        import gguf
    except ImportError:
        raise CheckpointError(
            "needs the gguf package", where=path, advice='Install it: pip install "mxdiag[gguf]"'
        ) from None
    files, metadata, stored = _parts(path, beside or path.with_name, gguf)
    config = config_from(metadata)
    scales = {
        tensor.name: tensor
        for tensor, _ in stored.values()
        if tensor.name.endswith(".scale") and _weight_of(tensor.name) in stored
    }
    entries: dict[str, Entry] = {}
    for tensor, kind in stored.values():
        if tensor.name in scales:
            continue
        scale = scales.get(tensor.name.removesuffix("weight") + "scale")
        for entry in _entries(tensor, kind, scale, config, gguf):
            if entry.name in entries:
                raise CheckpointError(
                    f"holds tensor {entry.name!r} twice", where=tensor.path, advice=DAMAGED
                )
            entries[entry.name] = entry
    # A file without an output head uses the embedding (llama.cpp's rule).
    heads = any(role_of(layer_name(name)) == "lm_head" for name in entries)
    return files, entries, {**config, "tie_word_embeddings": not heads}


def _weight_of(scale: str) -> str:
    return scale.removesuffix("scale") + "weight"


GgufTensors = dict[str, tuple[StoredTensor, Any]]


def _parts(
    path: Path, beside: Callable[[str], Path], gguf: Any
) -> tuple[list[Path], dict[str, Any], GgufTensors]:
    """Files, metadata and tensors of the model that `path` is, or is a part of."""
    metadata, stored = _one_file(path, gguf)
    count = metadata.get("split.count", 1)
    if not isinstance(count, int) or not 1 <= count <= 99999:
        raise CheckpointError(f"has split.count {count}", where=path, advice=DAMAGED)
    if count == 1:
        return [path], metadata, stored
    named = PART_NAME.fullmatch(path.name)
    if named is None or int(named[3]) != count:
        raise CheckpointError(
            f"is one of {count} parts of a model, and its name does not tell the others",
            where=path,
            advice=f"Expected <name>-00001-of-{count:05}.gguf and so on, as llama.cpp names them",
        )
    files: list[Path] = []
    first: dict[str, Any] = {}
    whole: GgufTensors = {}
    for number in range(count):
        name = f"{named[1]}-{number + 1:05}-of-{count:05}.gguf"
        part = path if name == path.name else _existing(beside, name, path)
        metadata, stored = _one_file(part, gguf)
        told = metadata.get("split.no"), metadata.get("split.count")
        if told != (number, count):
            raise CheckpointError(
                f"says that it is part {told[0]} of {told[1]}, against its name",
                where=part,
                advice="Download the parts again",
            )
        twice = next((tensor for tensor in stored if tensor in whole), None)
        if twice is not None:
            raise CheckpointError(f"holds tensor {twice!r} as well", where=part, advice=DAMAGED)
        files.append(part)
        first = first or metadata
        whole |= stored
    total = first.get("split.tensors.count", len(whole))
    if total != len(whole):
        raise CheckpointError(
            f"the {count} parts hold {len(whole)} tensors, not {total}",
            where=path,
            advice="Download the parts again",
        )
    return files, first, whole


def _existing(beside: Callable[[str], Path], name: str, path: Path) -> Path:
    try:
        part = beside(name)
        found = part.exists()
    except CheckpointError:
        found = False
    if not found:
        raise CheckpointError(
            f"needs its other part {name}, which is missing", where=path, advice="Download it"
        )
    return part


def _one_file(path: Path, gguf: Any) -> tuple[dict[str, Any], GgufTensors]:
    header = _Header(path)
    if bytes(header.take(4)) != b"GGUF":
        raise CheckpointError("is no GGUF file", where=path, advice=DAMAGED)
    version, tensors, pairs = header.number("I"), header.number("Q"), header.number("Q")
    if version not in (2, 3):
        raise CheckpointError(f"has GGUF version {version}; 2 and 3 are read", where=path)
    metadata = {}
    for _ in range(pairs):
        key = header.text()
        metadata[key] = header.value(header.number("I"))
    stored: GgufTensors = {}
    for tensor, kind in _descriptions(header, tensors, metadata, gguf):
        if tensor.name in stored:
            raise CheckpointError(f"holds tensor {tensor.name!r} twice", where=path, advice=DAMAGED)
        stored[tensor.name] = tensor, kind
    return metadata, stored


def _descriptions(
    header: _Header, count: int, metadata: dict[str, Any], gguf: Any
) -> Iterator[tuple[StoredTensor, Any]]:
    """Each tensor with its ggml type; byte ranges checked against the file's size."""
    found = []
    for _ in range(count):
        name, axes = header.text(), header.number("I")
        if axes > 8:
            raise CheckpointError(
                f"tensor {name[:200]!r} has {axes} axes", where=header.path, advice=DAMAGED
            )
        dims = [header.number("Q") for _ in range(axes)]
        found.append((name, tuple(reversed(dims)), header.number("I"), header.number("Q")))
    alignment = metadata.get("general.alignment", 32)
    if not isinstance(alignment, int) or not 1 <= alignment <= 1 << 20:
        raise CheckpointError(f"has alignment {alignment}", where=header.path, advice=DAMAGED)
    begin = -(-header.position // alignment) * alignment
    for name, shape, code, offset in found:
        try:
            kind = gguf.GGMLQuantizationType(code)
            block, size = gguf.GGML_QUANT_SIZES[kind]
        except (ValueError, KeyError):
            raise CheckpointError(
                f"tensor {name[:200]!r} has unknown type {code}",
                where=header.path,
                advice="A newer gguf package may know it",
            ) from None
        numel = 1
        for n in shape:
            numel *= n
        row = shape[-1] if shape else 1
        nbytes = numel // block * size
        if row % block or begin + offset + nbytes > header.size:
            raise CheckpointError(
                f"tensor {name[:200]!r} does not fit into the file",
                where=header.path,
                advice=DAMAGED,
            )
        yield StoredTensor(name, kind.name, shape, header.path, begin + offset, nbytes), kind


def _entries(
    tensor: StoredTensor,
    kind: Any,
    scale: StoredTensor | None,
    config: Mapping[str, Any],
    gguf: Any,
) -> Iterator[Entry]:
    """One entry, or one per expert of a stack."""
    name = huggingface_name(tensor.name, config)
    label = {"F32": "float32", "F16": "float16", "BF16": "bfloat16", "F64": "float64"}.get(
        kind.name
    )
    label = label or f"gguf_{kind.name.lower()}"
    if kind.name == "I64":
        yield Entry(name, tensor.shape, label, integer=True)
        return
    stack = len(tensor.shape) == 3
    names = expert_names(name, tensor.shape[0], config) if stack else []
    if scale is not None and scale.numel not in (1, len(names)):
        reason = f"{label} with {scale.numel} scales for weights {list(tensor.shape)}"
        yield Entry(name, tensor.shape, label, unsupported=reason, out_in=True, codes=True)
        return
    if not names:
        factor = None if scale is None else Factor(scale, 0)
        yield _entry(name, label, tensor, kind, _rotary_head(tensor, config), factor, gguf)
        return
    each = tensor.nbytes // tensor.shape[0]
    for i, expert in enumerate(names):
        part = StoredTensor(
            tensor.name,
            tensor.dtype,
            tensor.shape[1:],
            tensor.path,
            tensor.begin + i * each,
            each,
        )
        factor = None if scale is None else Factor(scale, i if scale.numel > 1 else 0)
        yield _entry(expert, label, part, kind, None, factor, gguf)


@dataclass(frozen=True, slots=True)
class Factor:
    """Element `index` of a stored tensor, by which a whole weight is multiplied."""

    scale: StoredTensor
    index: int

    def read(self, files: Files, buffers: Buffers) -> np.ndarray:
        """The number, as a float32 array of one element."""
        return read_scales(self.scale, self.index, 1, files, buffers, "factor")


def _entry(
    name: str,
    label: str,
    tensor: StoredTensor,
    kind: Any,
    head: int | None,
    factor: Factor | None,
    gguf: Any,
) -> Entry:
    def values(files: Files) -> Values:
        if kind.name in _PLAIN_TYPES and head is None and factor is None:
            return PlainValues(tensor, files)
        return GgufValues(tensor, kind, head, factor, files, gguf)

    plain = kind.name in _PLAIN_TYPES
    known = plain or _decodes(kind, gguf)
    reason = None if known else f"{label}, which the installed gguf package does not decode"
    if factor is not None and factor.scale.dtype not in PLAIN_DTYPES:
        known, reason = False, f"{label} with a scale of type {factor.scale.dtype}"
    codes = not plain or factor is not None
    found = values if known else None
    return Entry(name, tensor.shape, label, found, reason, out_in=True, codes=codes)


def _decodes(kind: Any, gguf: Any) -> bool:
    """Whether the installed package decodes this type: asked with one block of zeros."""
    block = np.zeros((1, gguf.GGML_QUANT_SIZES[kind][1]), np.uint8)
    try:
        gguf.quants.dequantize(block, kind)
    except NotImplementedError:
        return False
    return True


def _rotary_head(tensor: StoredTensor, config: Mapping[str, Any]) -> int | None:
    """Rows of one head where the llama converter interleaved the rotary halves, else None."""
    if not config["rotary_interleaved"] or len(tensor.shape) != 2:
        return None
    end = tensor.name.rpartition("blk.")[2].partition(".")[2]
    heads = {
        "attn_q.weight": config.get("num_attention_heads"),
        "attn_k.weight": config.get("num_key_value_heads") or config.get("num_attention_heads"),
    }.get(end)
    if not heads or tensor.shape[0] % (2 * heads):
        return None
    return tensor.shape[0] // heads


class GgufValues:
    """A ggml-quantized tensor, decoded to float32 by `gguf.quants.dequantize`, in whole rows."""

    def __init__(
        self,
        tensor: StoredTensor,
        kind: Any,
        head: int | None,
        factor: Factor | None,
        files: Files,
        gguf: Any,
    ) -> None:
        self._tensor, self._kind, self._head, self._files = tensor, kind, head, files
        self._factor, self._gguf = factor, gguf
        self.granule = tensor.shape[-1]
        plain = kind.name in _PLAIN_TYPES and factor is None
        self.dtype = PLAIN_DTYPES[kind.name] if plain else np.dtype(np.float32)
        block, size = gguf.GGML_QUANT_SIZES[kind]
        self._row_bytes = self.granule // block * size

    def read(self, start: int, count: int, buffers: Buffers) -> np.ndarray:
        """See `Values.read`."""
        first, rows = start // self.granule, count // self.granule
        if self._head is None:
            return self._decode(first, rows, buffers).reshape(-1)
        low = first // self._head * self._head
        high = -(-(first + rows) // self._head) * self._head
        matrix = self._decode(low, high - low, buffers)
        halves = matrix.reshape(-1, self._head // 2, 2, self.granule).swapaxes(1, 2)
        return halves.reshape(-1, self.granule)[first - low : first - low + rows].reshape(-1)

    def _decode(self, first: int, rows: int, buffers: Buffers) -> np.ndarray:
        size = self._row_bytes
        raw = read_bytes(self._files, self._tensor, first * size, rows * size, buffers, "raw")
        if self._kind.name in _PLAIN_TYPES:
            decoded = raw.view(PLAIN_DTYPES[self._kind.name]).reshape(rows, self.granule)
            if self._factor is None:
                return decoded
        with np.errstate(all="ignore"):  # NaN and Inf scales in the data are counted by the kernel
            if self._kind.name not in _PLAIN_TYPES:
                decoded = self._gguf.quants.dequantize(raw.reshape(rows, size), self._kind)
            if self._factor is not None:
                decoded = decoded.astype(np.float32) * self._factor.read(self._files, buffers)
        return np.ascontiguousarray(decoded, np.float32).reshape(rows, self.granule)
