"""Loading a model and its tokenizer by transformers: quietly, and with one message on failure."""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mxdiag.checkpoint.open import PICKLED, open_checkpoint
from mxdiag.errors import ModelError

#: quant_method -> transformers' config class, and how it is told to give full-precision weights.
_DEQUANTIZING: dict[str, tuple[str, dict[str, bool]]] = {
    "fp8": ("FineGrainedFP8Config", {"dequantize": True}),
    "mxfp4": ("Mxfp4Config", {"dequantize": True}),
    "compressed-tensors": ("CompressedTensorsConfig", {"run_compressed": False}),
}
#: Methods whose models transformers turns into plain ones after they are loaded.
_DEQUANTIZED_AFTERWARDS = ("bitsandbytes",)
_CAUSAL = ("ForCausalLM", "LMHeadModel", "LMHead")


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in eval mode, and what its user must know about it.

    `absent` names the parameters that the checkpoint lacks: transformers gave them random values.
    """

    model: nn.Module
    device: torch.device
    absent: tuple[str, ...] = ()
    warnings: list[str] = field(default_factory=list)


def load_model(
    source: str | Path,
    *,
    dtype: str = "auto",
    device: str = "auto",
    trust_remote_code: bool = False,
    allow_pickle: bool = False,
    revision: str | None = None,
    quiet: bool = True,
) -> LoadedModel:
    """Load a model by the class that its config names.

    Parameters
    ----------
    source
        Local folder, `.gguf` file, or hub id.
    dtype
        "auto" (the checkpoint's own) or a floating-point dtype's name.
    device
        "auto" (a GPU if there is one), "cpu", "cuda", "cuda:1" ...
    trust_remote_code
        Whether code that comes with the checkpoint may run.
    allow_pickle
        Whether weights may come from pickle files (read without running code).
    revision
        Branch, tag or commit on the hub.
    quiet
        Keep transformers' progress bars and messages off the terminal.

    Raises
    ------
    ModelError
        Whatever goes wrong.
    """
    wanted, target = _dtype(dtype), _device(device)
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    path = Path(source)
    if path.suffix == ".gguf":
        source, common["gguf_file"] = path.parent, path.name
    pickled = _check_folder(source, allow_pickle)
    with _quiet(quiet), _explained(source, trust_remote_code):
        from transformers import AutoConfig

        config = AutoConfig.from_pretrained(source, **common)
        notes = [PICKLED] if pickled else []
        notes += _dequantized(config, common)
        if notes and path.is_dir():
            _refuse_cut_blocks(path)
        loader = _model_class(config, trust_remote_code)
        model, info = loader.from_pretrained(
            source,
            dtype=wanted,
            output_loading_info=True,
            use_safetensors=None if allow_pickle or "gguf_file" in common else True,
            **common,
        )
        if _quantization_method(config) in _DEQUANTIZED_AFTERWARDS:
            model = model.dequantize(dtype=config.dtype if wanted == "auto" else wanted)
        model = model.to(target).eval()
    mismatched = [key[0] if isinstance(key, tuple) else key for key in info["mismatched_keys"]]
    absent = tuple(sorted({*info["missing_keys"], *mismatched}))
    if absent:
        shown = ", ".join(absent[:3]) + (" ..." if len(absent) > 3 else "")
        notes.append(
            f"{len(absent)} weights are not in the checkpoint: random, so not measured: {shown}"
        )
    return LoadedModel(model, target, absent, notes)


def load_tokenizer(
    source: str | Path,
    *,
    trust_remote_code: bool = False,
    revision: str | None = None,
    quiet: bool = True,
) -> Any:
    """Load the tokenizer that comes with a model.

    Raises
    ------
    ModelError
        If there is none, or it cannot be loaded.
    """
    common: dict[str, Any] = {"trust_remote_code": trust_remote_code, "revision": revision}
    path = Path(source)
    if path.suffix == ".gguf":
        source, common["gguf_file"] = path.parent, path.name
    advice = (
        "Give calibration records with input_ids, or put the tokenizer's files beside the model"
    )
    with _quiet(quiet), _explained(source, trust_remote_code, "tokenizer", advice):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(source, **common)


class TokenizerOnDemand:
    """The tokenizer that comes with a model, loaded when a text is first read.

    Takes the arguments of `load_tokenizer`. Records of `input_ids` need none, so a model without
    one can be run on them.
    """

    def __init__(self, source: str | Path, **options: Any) -> None:
        self._source, self._options = source, options
        self._loaded: Any = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Tokenize: raises a ModelError if there is no tokenizer."""
        if self._loaded is None:
            self._loaded = load_tokenizer(self._source, **self._options)
        return self._loaded(*args, **kwargs)


def _dtype(name: str) -> torch.dtype | str:
    if name == "auto":
        return name
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype) or not found.is_floating_point or found.itemsize < 2:
        raise ModelError(
            f"no dtype to run a model in: {name!r}", advice="Use auto, float32, bfloat16 or float16"
        )
    return found


def _device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if name.startswith("cuda") and not torch.cuda.is_available():
        raise ModelError(
            f"device {name!r} cannot be used: torch sees no GPU", advice="Use auto or cpu"
        )
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        raise ModelError(
            f"device {name!r} cannot be used: {_first_line(error)}", advice="Use auto or cpu"
        ) from error
    return device


def _check_folder(source: str | Path, allow_pickle: bool) -> bool:
    """Refuse what transformers would misunderstand; whether only pickle files hold the weights."""
    folder = Path(source)
    if not folder.is_dir():
        if folder.is_absolute() or str(source).startswith((".", "~")) or folder.is_file():
            raise ModelError(
                "is no folder", where=source, advice="Give a local folder, a .gguf file or a hub id"
            )
        return False
    if not (folder / "config.json").exists() and not any(folder.glob("*.gguf")):
        if (folder / "adapter_config.json").exists():
            raise ModelError(
                "holds an adapter alone, without the model it adapts",
                where=folder,
                advice="Merge it first: PeftModel.from_pretrained(base, folder).merge_and_unload()",
            )
        raise ModelError(
            "has no config.json, so it is no Hugging Face model",
            where=folder,
            advice="Give the folder that holds config.json and the weights, or use --weights-only",
        )
    pickles = [*folder.glob("*.bin"), *folder.glob("*.pt"), *folder.glob("*.pth")]
    only_pickles = bool(pickles) and not any(folder.glob("*.safetensors"))
    if only_pickles and not allow_pickle:
        raise ModelError(
            "has its weights in pickle files only",
            where=folder,
            advice="Convert them to safetensors, or pass --allow-pickle",
        )
    return only_pickles


def _model_class(config: Any, trust_remote_code: bool) -> Any:
    """Return the class named in the config: an auto class for causal models and for remote code."""
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    names = [str(name) for name in (config.architectures or ())]
    auto_map = getattr(config, "auto_map", None) or {}
    if trust_remote_code and auto_map:
        known = (
            "AutoModelForCausalLM",
            "AutoModelForSeq2SeqLM",
            "AutoModelForMaskedLM",
            "AutoModel",
        )
        return getattr(
            transformers, next((name for name in known if name in auto_map), "AutoModel")
        )
    causal = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING
    if causal and (not names or any(name.endswith(_CAUSAL) for name in names)):
        return transformers.AutoModelForCausalLM
    for name in names:
        found = getattr(transformers, name, None)
        if found is not None and hasattr(found, "from_pretrained"):
            return found
    return transformers.AutoModel


def _quantization_method(config: Any) -> str | None:
    """`quant_method` of a checkpoint that is stored quantized."""
    quantization = getattr(config, "quantization_config", None)
    if quantization is None:
        return None
    settings = quantization if isinstance(quantization, dict) else quantization.to_dict()
    return str(settings.get("quant_method"))


def _dequantized(config: Any, arguments: dict[str, Any]) -> list[str]:
    """Ask for dequantized weights where transformers can do that; say so."""
    method = _quantization_method(config)
    if method is None:
        return []
    import transformers

    name, option = _DEQUANTIZING.get(method, ("", {}))
    found = getattr(transformers, name, None)
    if found is not None:
        arguments["quantization_config"] = found(**option)
    elif method not in _DEQUANTIZED_AFTERWARDS:
        return [f"the checkpoint is quantized by {method}: layers that stay packed are unsupported"]
    return [f"the checkpoint is stored as {method}: its weights are dequantized before measuring"]


def _refuse_cut_blocks(folder: Path) -> None:
    """Refuse FP8 weights that are no whole number of blocks: transformers misplaces their scales.

    It takes size / scales as the block (`Fp8Dequantize` in transformers 5.24), where the format
    cuts the last one: DeepSeek-V3's 576 rows are 4 blocks of 128 and one of 64.
    """
    with open_checkpoint(folder, allow_pickle=True) as checkpoint:
        for entry in checkpoint.entries.values():
            match = re.fullmatch(r"fp8\w*\+block(\d+)(?:x(\d+))?", entry.dtype)
            if match is None:
                continue
            rows, cols = int(match[1]), int(match[2] or match[1])
            if entry.shape[-2] % rows or entry.shape[-1] % cols:
                raise ModelError(
                    f"transformers misreads {entry.name}, whose last block of FP8 scales is cut",
                    where=folder,
                    advice="Use --weights-only, which reads it",
                )


@contextmanager
def _quiet(quiet: bool) -> Iterator[None]:
    """Keep libraries from writing to the terminal; their settings come back afterwards."""
    if not quiet:
        yield
        return
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), open(os.devnull, "w") as nowhere, redirect_stderr(nowhere):
            warnings.simplefilter("ignore")
            from transformers.utils import logging as transformers_logging

            bars = transformers_logging.is_progress_bar_enabled()
            transformers_logging.disable_progress_bar()
            try:
                yield
            finally:
                if bars:
                    transformers_logging.enable_progress_bar()
    finally:
        logging.disable(disabled)


@contextmanager
def _explained(
    source: object, trust_remote_code: bool, what: str = "model", advice: str | None = None
) -> Iterator[None]:
    """Turn whatever a library raises into one `ModelError`."""
    try:
        yield
    except ModelError:
        raise
    except Exception as error:
        text = _first_line(error)
        if "trust_remote_code" in str(error) and not trust_remote_code:
            text = f"the {what} needs code that comes with the checkpoint"
            advice = "Read that code, and pass --trust-remote-code if you trust it"
        elif advice is None:
            advice = "Check that the path or id names a complete model, or use --weights-only"
        raise ModelError(
            f"transformers cannot load the {what}: {text}", where=source, advice=advice
        ) from error


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (
        f"{type(error).__name__}: {lines[0].strip().rstrip('.')}" if lines else type(error).__name__
    )
