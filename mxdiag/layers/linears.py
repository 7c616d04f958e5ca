"""Which stored tensors are weight matrices that multiply activations, told from names and config
alone.

`classify` is the entry point: it turns one stored tensor into the `Linear`s it holds, or says why
it holds none. A `Linear` is an affine view [out, in] of a stored tensor, so that fused projections
(qkv, gate_up), GPT-2's transposed `Conv1D` and stacks of experts need no copy and no special case.
No torch, no transformers, nothing read from a file.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mxdiag.layers import families
from mxdiag.layers.families import Stack
from mxdiag.layers.roles import exclusion, expert_of, layer_name, parts_of, role_of, special_role

__all__ = [
    "Classification",
    "Linear",
    "classify",
    "exclusion",
    "expert_of",
    "is_mask",
    "linears_in",
    "role_of",
    "view_span",
]

ConfigJson = Mapping[str, Any]
#: Nothing real comes near; a hostile header must not make millions of rows.
MAX_EXPERTS = 1 << 16
MAX_AXIS = 1 << 31


@dataclass(frozen=True, slots=True)
class Linear:
    """One weight matrix W of a product Y = X Wᵀ: one `layer` of the results.

    Attributes
    ----------
    layer
        Stored name without `.weight`; a fused tensor's segments add `.q_proj` and the like, a stack
        of experts adds `[e]`, or `[e].gate_proj` where it holds several projections.
    role
        What the family calls it: q_proj, expert.down_proj, router, lm_head ...
    expert
        Index of the expert, None outside mixtures of experts.
    tensor
        Name of the stored tensor it is read from.
    offset, shape, stride
        The view as [out, in], in elements of the stored tensor taken as one row-major array.
    """

    layer: str
    role: str
    expert: int | None
    tensor: str
    offset: int
    shape: tuple[int, int]
    stride: tuple[int, int]

    @property
    def numel(self) -> int:
        """Number of weights."""
        return self.shape[0] * self.shape[1]


@dataclass(frozen=True, slots=True)
class Classification:
    """What one stored tensor is: its `linears`, or why it has none.

    Exactly one holds: `linears` is not empty; `rule` names why it is no product weight
    ("not a linear weight: convolution"); `unsupported` says why it cannot be told or read.
    """

    linears: tuple[Linear, ...] = ()
    rule: str | None = None
    unsupported: str | None = None


def linears_in(name: str, shape: Sequence[int], config: ConfigJson | None = None) -> list[Linear]:
    """Every `Linear` that the stored tensor `name` holds; [] if it is no known product weight."""
    return list(classify(name, shape, config).linears)


def classify(
    name: str,
    shape: Sequence[int],
    config: ConfigJson | None = None,
    *,
    out_in: bool = False,
) -> Classification:
    """What the stored tensor `name` of `shape` is.

    Parameters
    ----------
    name
        Its name in the checkpoint, `.weight` included.
    shape
        Its logical shape (after unpacking, for quantized storage).
    config
        The checkpoint's config.json as a dict, or None. Without it fused tensors stay one row, and
        what only the architecture can tell is unsupported.
    out_in
        The values are known to be [..., out, in] whatever the family usually stores (GGUF files and
        gpt-oss's MXFP4 blocks).
    """
    dims = tuple(int(n) for n in shape)
    layer = layer_name(name)
    parts = parts_of(layer)
    if len(dims) < 2:
        return Classification(rule="not a linear weight: fewer than two axes")
    if min(dims) == 0:
        return Classification(rule="not a linear weight: empty")
    if max(dims) > MAX_AXIS or (len(dims) == 3 and dims[0] > MAX_EXPERTS):
        return Classification(unsupported="sizes beyond any known model")
    weight = name.endswith(".weight")
    stack = (
        _stack_of(parts, _config_for(name, config))
        if len(dims) == 3 or _may_be_flat(parts)
        else None
    )
    if stack is not None and (stack.flat or len(dims) == 3):
        return _split_stack(name, layer, dims, stack, config, out_in)
    headed = families.HEADED.get(_model_type(_config_for(name, config)) or "", {})
    if len(dims) == 3 and parts[-1] in headed:
        rows, cols = dims[1] * dims[2], dims[0]
        shape, stride = (
            ((rows, cols), (1, rows)) if headed[parts[-1]] else ((cols, rows), (rows, 1))
        )
        return Classification(
            (Linear(layer, role_of(layer), expert_of(layer), name, 0, shape, stride),)
        )
    if len(dims) == 2 and _is_product_name(parts, weight):
        return _split_matrix(name, layer, dims, config, out_in)
    reason = _not_linear(parts, weight, len(dims))
    if reason is not None:
        return Classification(rule=f"not a linear weight: {reason}")
    if len(dims) == 2:
        return Classification(unsupported="a 2-D parameter whose use its name does not tell")
    architecture = _model_type(_config_for(name, config)) or "unknown"
    return Classification(
        unsupported=f"a {len(dims)}-D tensor of unknown layout (architecture {architecture})"
    )


def is_mask(name: str, shape: Sequence[int]) -> bool:
    """Whether a stored tensor is a mask that was saved along: a buffer, no parameter."""
    if name.rpartition(".")[2] == families.LOGITS_MASK:
        return True
    return len(shape) == 4 and re.fullmatch(families.MASK_PATTERN, name) is not None


# ---- names ------------------------------------------------------------------------------------


def _is_product_name(parts: list[str], weight: bool) -> bool:
    """A 2-D tensor that multiplies activations: a `.weight`, or a parameter known by name."""
    last = parts[-1]
    if weight:
        if re.fullmatch(families.LINEAR_PATTERN, last) or special_role(parts) is not None:
            return True
        return not re.fullmatch(families.NORM_PATTERN + r"|(\w+_)?conv\d?d?", last)
    return last in families.PRODUCT_PARAMETERS


def _not_linear(parts: list[str], weight: bool, ndim: int) -> str | None:
    last = parts[-1]
    if weight and ndim >= 4:
        return "convolution"
    if ndim == 3 and (weight or last.startswith("original")):
        return "convolution" if any("conv" in part for part in parts[-5:]) else None
    for what, pattern in families.NOT_LINEAR:
        if re.fullmatch(pattern, last):
            return what
    return None


# ---- config ------------------------------------------------------------------------------------


def _config_for(name: str, config: ConfigJson | None) -> ConfigJson | None:
    """The part of a nested config that describes the module `name` belongs to."""
    if config is None:
        return None
    vision = re.search(r"(^|\.)(vision|visual|image_encoder|vit)", name) is not None
    audio = re.search(r"(^|\.)(audio|speech)", name) is not None
    keys = ("vision_config",) if vision else ("audio_config",) if audio else _text_keys(name)
    for key in keys:
        sub = config.get(key)
        if isinstance(sub, Mapping):
            if "model_type" not in sub and "model_type" in config:
                return {**sub, "model_type": config["model_type"]}
            return sub
    return config


def _text_keys(name: str) -> tuple[str, ...]:
    if name.startswith(("decoder.", "model.decoder.")):
        return ("decoder", "text_config", "thinker_config")
    if name.startswith("encoder."):
        return ("encoder", "text_config")
    if name.startswith("qformer."):
        return ("qformer_config",)
    return ("text_config", "llm_config", "language_config")


def _model_type(config: ConfigJson | None) -> str | None:
    value = None if config is None else config.get("model_type")
    if not isinstance(value, str):
        return None
    for suffix in ("_text", "_vision", "_vision_model", "_thinker", "_vision_encoder"):
        value = value.removesuffix(suffix)
    return value


def _integer(config: ConfigJson | None, *keys: str) -> int | None:
    for key in keys:
        value = None if config is None else config.get(key)
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return value
    return None


def _grouped_sizes(config: ConfigJson | None, rows: int) -> tuple[int, ...] | None:
    """Rows of q, k and v from the config's heads, None if they do not add up to `rows`."""
    heads = _integer(config, "num_attention_heads", "n_heads", "n_head")
    hidden = _integer(config, "hidden_size", "d_model", "n_embd")
    if config is None or heads is None:
        return None
    head_dim = _integer(config, "head_dim")
    if head_dim is None:
        head_dim = None if hidden is None else hidden // heads
    attention = config.get("attn_config")
    kv_heads = _integer(config, "num_key_value_heads") or (
        _integer(attention, "kv_n_heads") if isinstance(attention, Mapping) else None
    )
    if head_dim is None:
        return None
    sizes = (heads * head_dim, (kv_heads or heads) * head_dim, (kv_heads or heads) * head_dim)
    return sizes if sum(sizes) == rows else None


# ---- splits ------------------------------------------------------------------------------------


def _split_matrix(
    name: str, layer: str, dims: tuple[int, ...], config: ConfigJson | None, out_in: bool
) -> Classification:
    """A 2-D product weight: one row, or one per segment where the split is known."""
    parts = parts_of(layer)
    own = _config_for(name, config)
    last = parts[-1]
    transposed = families.PRODUCT_PARAMETERS.get(last, False)
    if last in families.CONV1D_NAMES and not out_in:
        if own is None:
            return Classification(
                unsupported="[in, out] or [out, in]: only config.json tells, and it is missing"
            )
        transposed = _model_type(own) in families.CONV1D_TYPES
    rows = dims[1] if transposed else dims[0]
    cols = dims[0] if transposed else dims[1]
    stride = (1, rows) if transposed else (cols, 1)
    names, sizes = _segments(parts, rows, cols, own)
    if not names:
        return Classification(
            (Linear(layer, role_of(layer), expert_of(layer), name, 0, (rows, cols), stride),)
        )
    linears, start = [], 0
    for segment, size in zip(names, sizes, strict=True):
        full = f"{layer}.{segment}"
        linears.append(
            Linear(
                full, role_of(full), expert_of(full), name, start * stride[0], (size, cols), stride
            )
        )
        start += size
    return Classification(tuple(linears))


def _segments(
    parts: list[str], rows: int, cols: int, config: ConfigJson | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    """Names and sizes of the row segments of a fused matrix; empty where the split is not known."""
    last, family = parts[-1], _model_type(config)
    thirds = (families.QKV, (rows // 3,) * 3)
    if last == "in_proj_weight" and rows == 3 * cols:
        return thirds
    if last in families.GATE_UP_HALVES and rows % 2 == 0:
        known = families.GATE_UP_HALVES[last]
        if known is None or family in known:
            return families.GATE_UP, (rows // 2,) * 2
    if family is None:
        return (), ()
    if last == "c_attn" and family in families.CONV1D_TYPES:
        if rows == 2 * cols:
            return families.KV, (rows // 2,) * 2
        return thirds if rows == 3 * cols else ((), ())
    if family in families.QKV_THIRDS.get(last, ()) and rows % 3 == 0:
        return thirds
    sizes = None
    if family in families.QKV_GROUPED.get(last, ()):
        sizes = _grouped_sizes(config, rows)
    elif config is not None and _one_shared_head(last, family, config):
        heads = _integer(config, "num_attention_heads", "n_head", "num_heads")
        hidden = _integer(config, "hidden_size", "n_embd")
        if heads and hidden and hidden + 2 * (hidden // heads) == rows:
            sizes = (hidden, hidden // heads, hidden // heads)
    return (families.QKV, sizes) if sizes is not None else ((), ())


def _one_shared_head(last: str, family: str, config: ConfigJson) -> bool:
    """Multi-query attention: all query heads, then one key head and one value head."""
    if family == "falcon" and last == "query_key_value":
        return bool(config.get("multi_query", True)) and not config.get(
            "new_decoder_architecture", False
        )
    return family == "gpt_bigcode" and last == "c_attn" and bool(config.get("multi_query", True))


def _may_be_flat(parts: list[str]) -> bool:
    return parts[-1] in ("w1", "v1", "w2") and parts[-2:-1] == ["mlp"]


def _stack_of(parts: list[str], config: ConfigJson | None) -> Stack | None:
    family = _model_type(config)
    if family is None:
        return None
    stack = families.STACKS.get(family, {}).get(parts[-1])
    if stack is None:
        return None
    if stack.flat and "experts" not in parts:
        return None
    if family == "jetmoe" and "self_attention" in parts:
        return Stack()  # mixture-of-attention projections have no gate
    return stack


def _split_stack(
    name: str,
    layer: str,
    dims: tuple[int, ...],
    stack: Stack,
    config: ConfigJson | None,
    out_in: bool,
) -> Classification:
    """A tensor that holds every expert: one row per expert and projection."""
    own = _config_for(name, config)
    if stack.flat:
        attention = (own or {}).get("ffn_config")
        experts = _integer(attention if isinstance(attention, Mapping) else own, "moe_num_experts")
        if experts is None or len(dims) != 2 or dims[0] % experts:
            return Classification(
                unsupported="experts stacked along rows: config.json does not tell their number"
            )
        dims = (experts, dims[0] // experts, dims[1])
    transposed = stack.transposed and not out_in
    if not out_in and _model_type(own) in families.STORED_EITHER_WAY:
        transposed = _stored_in_out(layer, dims, own)
    rows, cols = (dims[2], dims[1]) if transposed else (dims[1], dims[2])
    step, inner = (1, rows) if transposed else (cols, 1)
    count = max(1, len(stack.segments))
    if rows % count:
        return Classification(
            unsupported=f"{rows} output rows do not split into {'/'.join(stack.segments)}"
        )
    size = rows // count
    linears = []
    for expert in range(dims[0]):
        for i, segment in enumerate(stack.segments or ("",)):
            full = f"{layer}[{expert}]" + (f".{segment}" if segment else "")
            first, stride = (i, step * count) if stack.interleaved else (i * size, step)
            offset = expert * rows * cols + first * step
            linears.append(
                Linear(full, role_of(full), expert, name, offset, (size, cols), (stride, inner))
            )
    return Classification(tuple(linears))


def _stored_in_out(layer: str, dims: tuple[int, ...], config: ConfigJson | None) -> bool:
    """Families whose files exist in both orders: the hidden size tells, else [in, out]."""
    hidden = _integer(config, "hidden_size")
    if layer.endswith("down_proj"):
        return hidden is None or dims[2] == hidden
    return hidden is None or dims[1] == hidden


def view_span(linear: Linear) -> int:
    """Elements from the start of the stored tensor to the end of the view: bounds a read."""
    return (
        1
        + linear.offset
        + sum((n - 1) * s for n, s in zip(linear.shape, linear.stride, strict=True))
    )
