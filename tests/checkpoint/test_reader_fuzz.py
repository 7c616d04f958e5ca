"""Hostile checkpoints: whatever the bytes, the reader ends in rows or in one `MxdiagError`.

More than 5,000 generated cases: random and mutated headers, lying offsets and shapes, every dtype
under every name that means something, paths that leave the folder, configs of the wrong types,
damaged GGUF files. Each case is watched: what it opens, how long it takes and, over all of them,
how much memory.
"""

from __future__ import annotations

import contextlib
import json
import shutil
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import ckpt_files as files
import ckpt_hostile as hostile
from mxdiag.checkpoint.inventory import checkpoint_inventory
from mxdiag.checkpoint.open import open_checkpoint
from mxdiag.checkpoint.safetensors import DTYPE_BITS
from mxdiag.checkpoint.stored import stored_statistics
from mxdiag.checkpoint.stream import stream
from mxdiag.errors import MxdiagError

#: A case takes about 2 ms; only a runaway loop takes longer than this, however busy the machine.
TOO_LONG_S = 30.0
#: The peak over all cases may grow by buffers and by what hypothesis keeps, in kB.
TOO_MUCH_KB = 400_000


def cases(count: int) -> settings:
    """Settings for `count` cases, the same ones every time."""
    return settings(
        max_examples=count,
        deadline=None,
        derandomize=True,
        database=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=list(HealthCheck),
    )


# ---- watching ----------------------------------------------------------------------------------


class Watch:
    """Records every path that is opened while it is on. Audit hooks cannot be taken out again."""

    def __init__(self) -> None:
        self.on = False
        self.opened: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, arguments: tuple[Any, ...]) -> None:
        if self.on and event == "open":
            self.opened.append(str(arguments[0]))


WATCH = Watch()


def survives(target: Path, folder: Path) -> str:
    """Open, account and stream: "rows", "nothing" or "error"; anything else raises."""
    WATCH.opened.clear()
    WATCH.on = True
    start = time.monotonic()
    try:
        outcome = _read_everything(target)
    except MxdiagError:
        outcome = "error"
    finally:
        WATCH.on = False
    assert time.monotonic() - start < TOO_LONG_S
    assert [p for p in WATCH.opened if not _inside(p, folder)] == []
    return outcome


def _inside(path: str, folder: Path) -> bool:
    return Path(path).resolve().is_relative_to(folder.resolve())


def _read_everything(target: Path) -> str:
    with open_checkpoint(target) as checkpoint:
        found = checkpoint_inventory(checkpoint, include=["*"])
        parts = found.measured_parameters + found.excluded_parameters
        assert parts + found.unsupported_parameters == found.matrix_parameters
        elements = 0
        with np.errstate(all="ignore"):
            for chunk in stream(checkpoint, found.measured):
                elements += chunk.data.size
        for linear in found.measured[:4]:
            stored_statistics(checkpoint, linear)
    assert elements == found.measured_parameters
    return "rows" if elements else "nothing"


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


@pytest.fixture(autouse=True, scope="module")
def memory_is_bounded() -> Iterator[None]:
    before = _peak()
    yield
    assert _peak() - before < TOO_MUCH_KB


def _peak() -> int:
    with contextlib.suppress(OSError):
        for line in Path("/proc/self/status").read_text().splitlines():
            if line.startswith("VmHWM"):
                return int(line.split()[1])
    return 0


def fresh(scratch: Path) -> Path:
    """An empty checkpoint folder beside a secret that must not be read."""
    folder = scratch / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    files.write(scratch / "secret.safetensors", {"x.weight": np.ones((2, 2), np.float32)})
    return folder


# ---- cases -------------------------------------------------------------------------------------


@cases(200)
@given(content=st.binary(max_size=300))
def test_random_bytes(scratch: Path, content: bytes) -> None:
    folder = fresh(scratch)
    (folder / "model.safetensors").write_bytes(content)
    survives(folder, folder)


@cases(400)
@given(header=st.binary(max_size=200), data=st.binary(max_size=50), lie=st.integers(-9, 2**64 - 1))
def test_random_headers(scratch: Path, header: bytes, data: bytes, lie: int) -> None:
    folder = fresh(scratch)
    length = len(header) if lie < 0 or lie % 2 else lie
    files.write_raw(folder / "model.safetensors", header, data, length)
    survives(folder, folder)


ENTRY = st.fixed_dictionaries(
    {},
    optional={
        "dtype": st.one_of(st.sampled_from([*DTYPE_BITS, "F3", ""]), hostile.JSON),
        "shape": st.one_of(
            st.lists(st.one_of(hostile.SIZES, hostile.WILD), max_size=5), hostile.JSON
        ),
        "data_offsets": st.one_of(
            st.lists(st.one_of(hostile.SIZES, hostile.WILD), min_size=2, max_size=2), hostile.JSON
        ),
    },
)


@cases(900)
@given(
    header=st.dictionaries(hostile.NAMES, st.one_of(ENTRY, hostile.JSON), max_size=4),
    size=st.integers(0, 200),
)
def test_lying_headers(scratch: Path, header: dict[str, Any], size: int) -> None:
    folder = fresh(scratch)
    files.write_raw(folder / "model.safetensors", header, bytes(size))
    survives(folder, folder)


def test_deep_nesting(scratch: Path) -> None:
    for opening in (b"[", b'{"a":', b'{"a":['):
        for depth in (900, 1100, 10_000, 300_000):
            for target in ("model.safetensors", "config.json"):
                folder = fresh(scratch)
                files.write(folder / "model.safetensors", {})
                raw = opening * depth
                if target == "config.json":
                    (folder / target).write_bytes(raw)
                else:
                    files.write_raw(folder / target, b'{"x":' + raw)
                assert survives(folder, folder) == "error"


@cases(1200)
@given(file=hostile.consistent(), config=hostile.CONFIGS)
def test_any_dtype_and_shape_under_any_name(
    scratch: Path, file: tuple[dict[str, Any], bytes], config: dict[str, Any]
) -> None:
    folder = fresh(scratch)
    files.write_raw(folder / "model.safetensors", *file)
    (folder / "config.json").write_text(json.dumps(config))
    survives(folder, folder)


@cases(1200)
@given(file=hostile.nearly_right(), config=hostile.CONFIGS)
def test_quantized_weights_nearly_right(
    scratch: Path, file: tuple[dict[str, Any], bytes], config: dict[str, Any]
) -> None:
    folder = fresh(scratch)
    files.write_raw(folder / "model.safetensors", *file)
    (folder / "config.json").write_text(json.dumps(config))
    survives(folder, folder)


EDITS = st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 255)), min_size=1, max_size=4)


def mutated(content: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    """Some bytes replaced, and the end cut off one time in three."""
    raw = bytearray(content)
    for position, value in edits:
        raw[position % len(raw)] = value
    return bytes(raw[: cut % len(raw)] if cut % 3 == 0 else raw)


@cases(700)
@given(file=hostile.nearly_right(), edits=EDITS, cut=st.integers(0, 10_000))
def test_mutated_files(
    scratch: Path, file: tuple[dict[str, Any], bytes], edits: list[tuple[int, int]], cut: int
) -> None:
    folder = fresh(scratch)
    path = files.write_raw(folder / "model.safetensors", *file)
    size = len(path.read_bytes()) - len(file[1])
    header = [(position % size, value) for position, value in edits]  # the data cannot be wrong
    path.write_bytes(mutated(path.read_bytes(), header, cut))
    survives(folder, folder)


PATHS = st.one_of(
    st.sampled_from(["model-1.safetensors", "model-1.safetensors", "link.safetensors"]),
    st.sampled_from(
        ["../secret.safetensors", "/etc/passwd", "..", ".", "", "a/../../secret.safetensors",
         "model-1.safetensors", "./model-1.safetensors", "sub/../model-1.safetensors",
         "//secret.safetensors", "..\\secret.safetensors",
         "~/x.safetensors", "sub",
         "\0.safetensors",
         "x" * 300 + ".safetensors"]
    ),
    st.text(max_size=12),
    hostile.JSON,
)  # fmt: skip


@cases(600)
@given(
    names=st.lists(st.sampled_from(["a.weight", "b.weight"]), min_size=1, max_size=2, unique=True),
    paths=st.lists(PATHS, min_size=3, max_size=3),
    whole=st.one_of(st.none(), st.none(), st.none(), hostile.JSON),
)
def test_indexes(scratch: Path, names: list[str], paths: list[Any], whole: Any) -> None:
    folder = fresh(scratch)
    files.write(folder / "model-1.safetensors", {"a.weight": np.ones((2, 2), np.float32)})
    (folder / "link.safetensors").symlink_to(scratch / "secret.safetensors")
    (folder / "sub").mkdir()
    index = {"weight_map": dict(zip(names, paths, strict=False))} if whole is None else whole
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    survives(folder, folder)


@pytest.fixture(scope="module")
def gguf_file(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    gguf = pytest.importorskip("gguf")
    pytest.importorskip("mxdiag.checkpoint.gguf")  # imported here: importing opens files
    path = tmp_path_factory.mktemp("gguf") / "m.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_uint32("llama.attention.head_count", 4)
    writer.add_array("tokenizer.ggml.tokens", ["a", "b"])
    for i, kind in enumerate((gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_0)):
        values = gguf.quants.quantize(files.normal(8, 64, seed=i), kind)
        writer.add_tensor(f"blk.{i}.attn_q.weight", values, raw_dtype=kind)
    writer.add_tensor("blk.0.ffn_up_exps.weight", files.normal(2, 4, 32).reshape(2, 4, 32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path.read_bytes()


@cases(600)
@given(edits=EDITS, cut=st.integers(0, 10_000), early=st.booleans())
def test_mutated_gguf(
    scratch: Path, gguf_file: bytes, edits: list[tuple[int, int]], cut: int, early: bool
) -> None:
    folder = fresh(scratch)
    places = [(position % 400 if early else position, value) for position, value in edits]
    (folder / "m.gguf").write_bytes(mutated(gguf_file, places, cut))
    survives(folder / "m.gguf", folder)


def test_untouched_material_gives_rows(scratch: Path, gguf_file: bytes) -> None:
    """The mutations start from good files, so the cases above are not all refused."""
    folder = fresh(scratch)
    (folder / "m.gguf").write_bytes(gguf_file)
    assert survives(folder / "m.gguf", folder) == "rows"
    outcomes = []
    for seed, parts in enumerate(hostile.QUANTIZED):
        module = (
            hostile.MODULES[seed % 2] if parts[0][0] not in ("", "_blocks") else hostile.MODULES[3]
        )
        sizes = {"r": 4, "c": 64, "1": 1, "e": 2, "g": 2, "6": 16, "h": 32, "s": 4, "b": 1}
        header: dict[str, Any] = {}
        total = 0
        for ending, dtype, shape_of in parts:
            shape = [sizes[c] for c in shape_of]
            nbytes = int(np.prod(shape, dtype=int)) * DTYPE_BITS[dtype] // 8
            offsets = [total, total + nbytes]
            header[module + ending] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
            total += nbytes
        folder = fresh(scratch)
        files.write_raw(folder / "model.safetensors", header, hostile.noise(seed, total))
        (folder / "config.json").write_text('{"model_type": "qwen3_moe"}')
        outcomes.append(survives(folder, folder))
    assert outcomes == ["rows"] * len(hostile.QUANTIZED)
