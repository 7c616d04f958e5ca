"""Opening a checkpoint: which files it consists of, what they hold, and nothing outside its folder.

Accepted: a Hugging Face folder (single or sharded safetensors), one `.safetensors` file, a `.gguf`
file (with the `gguf` package), and pickle files where the caller allows them. Names from an index
are plain relative paths. A link inside the folder may point into the folder, or, in the hub
cache's layout (`<repo>/snapshots/<revision>/...`), into the same `<repo>/blobs`; any other target
is refused. No code from a checkpoint runs.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath, PureWindowsPath
from types import TracebackType
from typing import Any

from mxdiag.checkpoint.decode import Files, Values
from mxdiag.checkpoint.encodings import Entry, entries_of
from mxdiag.checkpoint.safetensors import StoredTensor, read_header, read_json
from mxdiag.errors import CheckpointError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
#: What a user is told of weights that came from pickle files.
PICKLED = "read through pickle with torch.load(weights_only=True), because --allow-pickle was given"
_SHARD = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.safetensors")
_MERGE_FIRST = "Merge it into its base model first (peft: merge_and_unload, then save_pretrained)"
_CONVERT = (
    "Convert it to safetensors (load it in transformers, then save_pretrained), or pass "
    "--allow-pickle to read it with torch.load(weights_only=True)"
)


@dataclass(slots=True)
class Checkpoint:
    """What a checkpoint holds. Use it as a context manager, or call `close`.

    Attributes
    ----------
    path
        What the caller named.
    files
        Every weight file that is read.
    entries
        Name -> `Entry`: each weight and buffer, quantized ones under their unquantized name.
    config
        config.json, or None if there is none.
    warnings
        Sentences for the user.
    """

    path: Path
    files: list[Path]
    entries: dict[str, Entry]
    config: dict[str, Any] | None = None
    warnings: list[str] = field(default_factory=list)
    handles: Files = field(default_factory=Files, repr=False)

    @property
    def architecture(self) -> str | None:
        """First entry of `architectures` in config.json, else the model_type."""
        names = (self.config or {}).get("architectures")
        if isinstance(names, list) and names and isinstance(names[0], str):
            return names[0]
        return self.model_type

    @property
    def model_type(self) -> str | None:
        """`model_type` of config.json."""
        value = (self.config or {}).get("model_type")
        return value if isinstance(value, str) else None

    def values(self, name: str) -> Values:
        """Reader of one entry's numbers; a `CheckpointError` if it cannot be decoded."""
        entry = self.entries.get(name)
        if entry is None:
            raise CheckpointError(f"holds no tensor {name!r}", where=self.path)
        if entry.values is None:
            raise CheckpointError(
                f"{name}: {entry.unsupported or entry.dtype} is not read", where=self.path
            )
        return entry.values(self.handles)

    def close(self) -> None:
        """Close the files."""
        self.handles.close()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def open_checkpoint(path: str | Path, *, allow_pickle: bool = False) -> Checkpoint:
    """Open a checkpoint folder or file without reading any weight.

    Parameters
    ----------
    path
        A folder, or a `.safetensors`, `.gguf` or (with `allow_pickle`) pickle file.
    allow_pickle
        Read `.bin` and `.pt` files through torch's restricted unpickler.

    Raises
    ------
    CheckpointError
        Anything wrong with it: what, where, and what to do.
    """
    given = Path(path)
    try:
        resolved = given.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise CheckpointError("does not exist", where=given, advice="Check the path") from None
    if resolved.is_dir():
        return _open_folder(given, resolved, allow_pickle)
    name = given.name.lower()
    config = _config_beside(given)
    if name.endswith(".safetensors"):
        if name.startswith("adapter_model"):
            raise CheckpointError(
                "is an adapter without its base model", where=given, advice=_MERGE_FIRST
            )
        return _from_safetensors(given, {given: None}, config, [])
    if name.endswith(".gguf"):
        return _from_gguf(given, given)
    if name.endswith(PICKLES):
        return _from_pickle(given, [given], config, allow_pickle)
    if name.endswith(".index.json"):
        raise CheckpointError(
            "is an index, not weights", where=given, advice="Pass the folder it lies in"
        )
    raise CheckpointError(
        "is no checkpoint file", where=given, advice="Pass a folder, a .safetensors or a .gguf file"
    )


# ---- folders -----------------------------------------------------------------------------------


def _open_folder(given: Path, folder: Path, allow_pickle: bool) -> Checkpoint:
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError as error:
        raise CheckpointError(f"cannot be listed ({error.strerror})", where=given) from None
    config = read_json(inside(folder, "config.json")) if "config.json" in names else None
    warnings: list[str] = []
    chosen = _choose_safetensors(folder, names, warnings)
    if chosen is not None:
        return _from_safetensors(given, chosen, config, warnings)
    ggufs = [name for name in names if name.endswith(".gguf")]
    if len(ggufs) == 1 or _is_one_in_parts(ggufs):
        return _from_gguf(given, inside(folder, ggufs[0]), lambda name: inside(folder, name))
    if ggufs:
        raise CheckpointError(
            f"holds {len(ggufs)} GGUF files", where=given, advice="Pass one of them"
        )
    pickles = _choose_pickles(folder, names)
    if pickles:
        return _from_pickle(given, pickles, config, allow_pickle)
    raise _nothing_here(given, names)


def _is_one_in_parts(ggufs: list[str]) -> bool:
    """Whether the names are those of the parts of one split GGUF model."""
    from mxdiag.checkpoint.gguf import PART_NAME

    parts = [PART_NAME.fullmatch(name) for name in ggufs]
    return bool(parts) and len({part and (part[1], part[3]) for part in parts}) == 1 and all(parts)


def _nothing_here(given: Path, names: list[str]) -> CheckpointError:
    if "adapter_config.json" in names or "adapter_model.safetensors" in names:
        return CheckpointError(
            "is an adapter without its base model", where=given, advice=_MERGE_FIRST
        )
    if "snapshots" in names and "blobs" in names:
        return CheckpointError(
            "is a hub cache folder",
            where=given,
            advice="Pass the revision's folder inside its snapshots/",
        )
    what = "is an empty folder" if not names else "holds no weights"
    return CheckpointError(
        what, where=given, advice="Expected model.safetensors, a sharded index, or one .gguf file"
    )


def _choose_safetensors(
    folder: Path, names: list[str], warnings: list[str]
) -> dict[Path, set[str] | None] | None:
    """Files -> the tensor names wanted from each (None: all); None if there are no such files."""
    if SINGLE in names:
        if INDEX in names:
            warnings.append(
                f"both {SINGLE} and {INDEX} are there; {SINGLE} is read, as transformers does"
            )
        return {inside(folder, SINGLE): None}
    indexes = [n for n in names if n.endswith(".safetensors.index.json")]
    if indexes:
        index = INDEX if INDEX in indexes else indexes[0]
        if index != INDEX and len(indexes) > 1:
            raise CheckpointError(
                f"holds {len(indexes)} indexes", where=folder, advice="Keep one of them"
            )
        return _from_index(folder, index, names, warnings)
    files = [n for n in names if n.endswith(".safetensors") and not n.startswith("adapter_")]
    if not files:
        return None
    shards = [match for match in map(_SHARD.fullmatch, files) if match]
    if len(files) == 1 and not shards:
        return {inside(folder, files[0]): None}
    if len(shards) == len(files) and len({(m[1], m[3]) for m in shards}) == 1:
        missing = sorted(set(range(1, int(shards[0][3]) + 1)) - {int(m[2]) for m in shards})
        if not missing:
            warnings.append(f"no index beside {len(files)} shards; all of them are read")
            return {inside(folder, n): None for n in files}
        first = f"{shards[0][1]}-{missing[0]:05}-of-{shards[0][3]}.safetensors"
        raise CheckpointError(
            f"{len(missing)} shards are missing, the first is {first}",
            where=folder,
            advice="Download them",
        )
    raise CheckpointError(
        f"holds {len(files)} safetensors files and no index",
        where=folder,
        advice="Pass one of the files",
    )


def _from_index(
    folder: Path, index: str, names: list[str], warnings: list[str]
) -> dict[Path, set[str] | None]:
    where = inside(folder, index)
    table = read_json(where).get("weight_map")
    if not isinstance(table, dict) or not table:
        raise CheckpointError("has no weight_map", where=where, advice="Download the index again")
    wanted: dict[str, set[str]] = {}
    for tensor, file in table.items():
        if not isinstance(file, str):
            raise CheckpointError("weight_map holds something other than file names", where=where)
        wanted.setdefault(file, set()).add(tensor)
    for file in wanted:
        _check_relative(file, where)
    chosen: dict[Path, set[str] | None] = {}
    for file in sorted(wanted):
        if not _exists(folder / file):
            raise CheckpointError(
                f"names shard {file}, which is missing",
                where=where,
                advice="Download the missing shard",
            )
        chosen[inside(folder, file)] = wanted[file]
    unread = [n for n in names if n.endswith(".safetensors") and n not in wanted]
    if unread:
        warnings.append(f"not named by the index, not read: {', '.join(unread[:5])}")
    return chosen


def _check_relative(file: str, where: Path) -> None:
    parts = PurePosixPath(file).parts
    windows = PureWindowsPath(file)
    bad = not parts or PurePosixPath(file).is_absolute() or ".." in parts or "\\" in file
    if bad or windows.drive or windows.root or "\0" in file or not file.endswith(".safetensors"):
        raise CheckpointError(
            f"weight_map entry {file[:200]!r} is not a safetensors file inside the folder",
            where=where,
        )


def inside(folder: Path, name: str) -> Path:
    """`folder / name`, refused if it leads outside the folder or its hub cache's blobs."""
    path = folder / name
    try:
        target = path.resolve(strict=True)
    except (OSError, ValueError, RuntimeError):
        raise CheckpointError(
            "is missing, or a link to nothing", where=path, advice="Download it"
        ) from None
    roots = [folder]
    for parent in (folder, *folder.parents):
        if parent.parent.name == "snapshots":
            roots.append(parent.parent.parent / "blobs")
            break
    if not any(target.is_relative_to(root) for root in roots):
        raise CheckpointError(
            "is a link that leaves the checkpoint's folder",
            where=path,
            advice="Pass the real file or folder",
        )
    return path


def _exists(path: Path) -> bool:
    """Whether there is such a file; a name the file system cannot hold is none."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def _config_beside(file: Path) -> dict[str, Any] | None:
    folder = file.absolute().parent
    if not _exists(folder / "config.json"):
        return None
    return read_json(inside(folder.resolve(), "config.json"))


# ---- formats -----------------------------------------------------------------------------------


def _from_safetensors(
    given: Path,
    chosen: dict[Path, set[str] | None],
    config: dict[str, Any] | None,
    warnings: list[str],
) -> Checkpoint:
    tensors: dict[str, StoredTensor] = {}
    for path, wanted in chosen.items():
        extra = 0
        for tensor in read_header(path):
            if wanted is not None and tensor.name not in wanted:
                extra += 1
                continue
            if tensor.name in tensors:
                raise CheckpointError(
                    f"tensor {tensor.name!r} is also in {tensors[tensor.name].path.name}",
                    where=path,
                )
            tensors[tensor.name] = tensor
        missing = set() if wanted is None else wanted - tensors.keys()
        if missing:
            raise CheckpointError(
                f"lacks {len(missing)} tensors that the index places there, as {min(missing)!r}",
                where=path,
                advice="Index and shards are not of the same checkpoint: download both again",
            )
        if extra:
            warnings.append(
                f"{path.name}: {extra} tensors that the index does not name are not read"
            )
    if tensors and all(re.search(r"\.lora_(A|B|embedding)", name) for name in tensors):
        raise CheckpointError(
            "is an adapter without its base model", where=given, advice=_MERGE_FIRST
        )
    return Checkpoint(given, list(chosen), entries_of(tensors, config), config, warnings)


def _from_gguf(given: Path, file: Path, beside: Callable[[str], Path] | None = None) -> Checkpoint:
    from mxdiag.checkpoint.gguf import read_gguf

    files, entries, config = read_gguf(file, beside)
    return Checkpoint(given, files, entries, config)


def _choose_pickles(folder: Path, names: list[str]) -> list[Path]:
    index = "pytorch_model.bin.index.json"
    if index in names and "pytorch_model.bin" not in names:
        table = read_json(inside(folder, index)).get("weight_map")
        files = set(table.values()) if isinstance(table, dict) else set()
        if not all(isinstance(f, str) and "/" not in f and "\\" not in f for f in files):
            raise CheckpointError(
                "weight_map holds something other than file names", where=folder / index
            )
        return [inside(folder, file) for file in sorted(files)]
    if "pytorch_model.bin" in names:
        return [inside(folder, "pytorch_model.bin")]
    found = [
        n
        for n in names
        if n.endswith(PICKLES)
        and not re.match(r"(training_args|optimizer|scheduler|rng_state|adapter_)", n)
    ]
    return [inside(folder, found[0])] if len(found) == 1 else []


def _from_pickle(
    given: Path, files: Iterable[Path], config: dict[str, Any] | None, allow_pickle: bool
) -> Checkpoint:
    if not allow_pickle:
        raise CheckpointError(
            "is a pickle checkpoint, which can run code when it is loaded",
            where=given,
            advice=_CONVERT,
        )
    from mxdiag.checkpoint.pickle import read_pickles

    files = list(files)
    entries = read_pickles(files)
    return Checkpoint(given, files, entries, config, [PICKLED])
