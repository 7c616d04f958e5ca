"""Running a model on calibration: what goes in, and the loss whose gradients are measured."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxdiag.errors import CalibrationError, ModelError
from mxdiag.model.calibration import IGNORED_LABEL, Record, check_records, read_records, record_of
from mxdiag.tap.offload import input_device

#: Reads a language model's output and a batch; gives the scalar whose gradients are wanted.
Loss = Callable[[Any, Any], Tensor]


@dataclass(frozen=True, slots=True)
class Batch:
    """One call of the model. `record` is None where the caller gave the model's own inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    record: Record | None = None
    raw: Any = None


def language_task(model: nn.Module) -> str | None:
    """`causal` or `seq2seq` for a model with such a language-model loss, else None."""
    config = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", None)
    if config is None or can_generate is None or not can_generate():
        return None
    return "seq2seq" if getattr(config, "is_encoder_decoder", False) else "causal"


def other_input(model: nn.Module) -> str | None:
    """The input without which a model does not run and that no record holds; None for text models.

    A model with a language-model head runs on text alone, also if it can read images.
    """
    main = str(getattr(model, "main_input_name", "input_ids"))
    if main not in ("input_ids", "inputs_embeds"):
        return main
    config = getattr(model, "config", None)
    if language_task(model) is not None or config is None:
        return None
    if getattr(config, "vision_config", None) is not None:
        return "pixel_values"
    return "input_features" if getattr(config, "audio_config", None) is not None else None


def vocabulary_size(model: nn.Module) -> int | None:
    """Rows of the input embedding, None if the model has none."""
    try:
        embedding = model.get_input_embeddings()  # type: ignore[operator]
    except (AttributeError, NotImplementedError):
        return None
    return getattr(embedding, "num_embeddings", None)


def position_limit(model: nn.Module) -> int | None:
    """The longest sequence that a learned position table allows, as the config tells it."""
    config = getattr(model, "config", None)
    config = getattr(config, "text_config", None) or config
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length"):
        value = getattr(config, name, None)
        if isinstance(value, int) and value > 0:
            return value
    return None


def make_batches(
    model: nn.Module,
    calibration: str | Path | Iterable[Any],
    tokenizer: Any,
    *,
    seq_len: int,
    samples: int | None,
    gradients: bool,
) -> list[Batch]:
    """Batches from a calibration file, records, or the model's own inputs.

    Raises
    ------
    CalibrationError
        If a record cannot be used with this model.
    """
    if isinstance(calibration, (str, Path)):
        records = read_records(Path(calibration), tokenizer, seq_len=seq_len, samples=samples)
    else:
        items = list(calibration)[:samples]
        if not items:
            raise CalibrationError("no calibration record was given")
        if not all(is_record(item) for item in items):
            return [_own_batch(item, model) for item in items]
        records = [
            (
                item if isinstance(item, Record) else record_of(item, tokenizer, f"record {number}")
            ).cut(seq_len)
            for number, item in enumerate(items, start=1)
        ]
    check_records(records, vocabulary_size(model), gradients=gradients)
    return [_record_batch(record, model) for record in records]


def is_record(item: Any) -> bool:
    """Whether it is a record rather than the model's inputs: a dict without tensors."""
    if isinstance(item, Record):
        return True
    return isinstance(item, Mapping) and not any(isinstance(v, Tensor) for v in item.values())


def _record_batch(record: Record, model: nn.Module) -> Batch:
    device = input_device(model)
    kwargs: dict[str, Any] = {}
    if language_task(model) == "seq2seq":
        source, target = record.input_ids, record.labels
        if record.prompt_length:
            source, target = source[: record.prompt_length], target[record.prompt_length :]
        kwargs["labels"] = torch.tensor([target], device=device)
    else:
        source = record.input_ids
    kwargs["input_ids"] = torch.tensor([source], device=device)
    if "use_cache" in inspect.signature(model.forward).parameters:
        kwargs["use_cache"] = False
    return Batch((), kwargs, record)


def _own_batch(item: Any, model: nn.Module) -> Batch:
    device = input_device(model)
    mask = item.get("attention_mask") if isinstance(item, Mapping) else None
    if isinstance(mask, Tensor) and mask.dim() == 2 and not bool(mask.all()):
        raise CalibrationError(
            "a batch is padded, and padding is no token",
            advice="Give one record a batch, or records of input_ids",
        )
    moved = _to_device(item, device)
    if isinstance(moved, Mapping):
        return Batch((), dict(moved), raw=item)
    args = moved if isinstance(moved, tuple) else (moved,)
    return Batch(args, {}, raw=item)


def _to_device(item: Any, device: torch.device) -> Any:
    if isinstance(item, Tensor):
        moved = item.to(device)
        return moved.clone() if moved.is_inference() else moved
    if isinstance(item, Mapping):
        return {key: _to_device(value, device) for key, value in item.items()}
    if isinstance(item, (list, tuple)):
        return tuple(_to_device(value, device) for value in item)
    return item


def labelled_tokens(batches: Iterable[Batch], task: str | None) -> int:
    """Tokens that the loss is a mean over, in all batches together."""
    records = [batch.record for batch in batches if batch.record is not None]
    if task == "seq2seq":
        return sum(sum(label != IGNORED_LABEL for label in r.labels) for r in records)
    return sum(record.predicted for record in records)


def language_loss(logits: Tensor, batch: Batch, task: str, tokens: int) -> Tensor:
    """Sum over the record's labelled tokens of advantage * NLL, divided by `tokens`.

    With advantage 1 and the labelled tokens of all records as `tokens`, the records' losses add up
    to the mean next-token cross-entropy; with advantages, to a policy-gradient surrogate. `logits`
    is [1, positions, vocabulary]; position i predicts label i + 1, in an encoder-decoder label i.
    """
    assert batch.record is not None
    if task == "seq2seq":
        targets = batch.kwargs["labels"][0]
    else:
        targets = torch.tensor([*batch.record.labels[1:], IGNORED_LABEL], device=logits.device)
    # Positions without a label are ignored, not cut off: the gradient of a slice is a copy.
    logits = logits.squeeze(0)
    unlabelled = len(logits) - len(targets)
    targets = torch.nn.functional.pad(targets, (unlabelled, 0), value=IGNORED_LABEL)
    nll = torch.nn.functional.cross_entropy(
        logits.float(), targets, ignore_index=IGNORED_LABEL, reduction="sum"
    )
    return batch.record.advantage * nll / tokens


@contextmanager
def evaluating(model: nn.Module, seed: int) -> Iterator[None]:
    """Evaluation mode and a seeded generator for a block; every module's mode and the generators'
    state are put back.

    Raises
    ------
    ModelError
        If a parameter is an inference tensor: no gradient can ever be asked of it.
    """
    for name, parameter in model.named_parameters():
        if parameter.is_inference():
            raise ModelError(
                "the parameter was made under torch.inference_mode(), so it cannot be followed",
                where=name,
                advice="Build or load the model outside of it, or scan its weights alone: "
                "operands='W'",
            )
    modes = [(module, module.training) for module in model.modules()]
    devices = [p.device for p in model.parameters() if p.device.type == "cuda"][:1]
    with torch.random.fork_rng(devices=devices):
        torch.manual_seed(seed)
        try:
            model.eval()
            yield
        finally:
            for module, training in modes:
                module.training = training


def run_batch(model: nn.Module, batch: Batch) -> Any:
    """The model's output.

    Raises
    ------
    ModelError
        If the model cannot be run on the batch.
    """
    try:
        return model(*batch.args, **batch.kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        text = " ".join(str(error).split())
        raise ModelError(
            f"the model does not run on the calibration: {text[:300]}",
            where=type(model).__name__,
            advice="Check that the records fit this model, or scan with --weights-only",
        ) from error
