"""What the model families call their weights and how they lay them out: data only.

Written from the modeling code of transformers 5 (`models/*/modeling_*.py`) and from the names in
published checkpoints. Everything is keyed by name and by `model_type`. A shape only ever confirms a
name (`linears`: three equal parts of a fused q, k and v; stacks that exist in both orders).
"""

from __future__ import annotations

from dataclasses import dataclass


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


@dataclass(frozen=True, slots=True)
class Stack:
    """Layout of one stored tensor that holds the same projection(s) of every expert.

    Attributes
    ----------
    segments
        Names of the projections inside one expert's matrix, in stored order; empty for a single
        one.
    transposed
        One expert's matrix is stored [in, out] instead of [out, in].
    interleaved
        The segments alternate along the output axis instead of following each other.
    flat
        The experts are stacked along the first axis of a 2-D tensor.
    """

    segments: tuple[str, ...] = ()
    transposed: bool = False
    interleaved: bool = False
    flat: bool = False


GATE_UP = ("gate_proj", "up_proj")
QKV = ("q_proj", "k_proj", "v_proj")
KV = ("k_proj", "v_proj")

_OUT_IN = {"gate_up_proj": Stack(GATE_UP), "down_proj": Stack()}
_IN_OUT = {"gate_up_proj": Stack(GATE_UP, transposed=True), "down_proj": Stack(transposed=True)}

#: model_type -> last name of a stacked expert tensor -> layout. [experts, out, in] unless said
#: otherwise.
STACKS: dict[str, dict[str, Stack]] = dict.fromkeys(
    _words("""
        afmoe axk1 axk2 bailing_hybrid beam cohere2_moe deepseek_ocr2 deepseek_v2 deepseek_v3
        deepseek_v32 deepseek_v4 diffusion_gemma dots1 dots3_note ernie4_5_moe ernie4_5_vl_moe
        exaone_moe flex_olmo flint gemma4 glm4_moe glm4_moe_lite glm4v_moe glm5_next glm_moe_dsa
        granitemoe_swa hunyuan_v1_moe hy_v3 hy_v4 hy_v4_vl jamba kimi_linear kolibri1 laguna
        lara_mini lfm2_moe longcat_flash mellum mimo_v2_flash minimax minimax_m2 minimax_m3_vl
        mistral4 mistral_large4 mixtral muse_spark olmoe phimoe qwen2_moe qwen3_5_moe qwen3_moe
        qwen3_next qwen3_omni_moe qwen3_vl_moe qwen4_exp solar_open step3p7 sarvam_mla sarvam_moe
        unlimited_ocr zaya
    """),
    _OUT_IN,
)
_GRANITE = {"input_linear": Stack(GATE_UP), "output_linear": Stack(), **_OUT_IN}
STACKS |= {
    "gpt_oss": {
        "gate_up_proj": Stack(GATE_UP, transposed=True, interleaved=True),
        "down_proj": Stack(transposed=True),
    },
    "openai_privacy_filter": _IN_OUT,
    "llama4": _IN_OUT,
    "aria": {
        **_IN_OUT,
        "fc1": _IN_OUT["gate_up_proj"],
        "fc2": _IN_OUT["down_proj"],
    },
    "nemotron_h": {"up_proj": Stack(), "down_proj": Stack()},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE,
    # In JetMoE the attention's experts use the same names without a gate: `linears` tells them by
    # path.
    "jetmoe": {"input_linear": Stack(GATE_UP), "output_linear": Stack()},
    "dbrx": {
        "w1": Stack(flat=True),
        "v1": Stack(flat=True),
        "w2": Stack(transposed=True, flat=True),
    },
}

#: Families whose published files hold a stack [experts, in, out] although the live module is
#: [experts, out, in].
STORED_EITHER_WAY = _words("qwen3_vl_moe")

#: Families that use GPT-2's `Conv1D`, whose weight is [in, out], under these names.
CONV1D_TYPES = _words("gpt2 openai-gpt imagegpt decision_transformer")
CONV1D_NAMES = _words("c_attn q_attn c_proj c_fc")

#: Fused q, k, v rows that follow each other with grouped key/value heads: sizes come from the
#: config.
QKV_GROUPED = {"qkv_proj": _words("phi3 phi4_multimodal"), "Wqkv": _words("dbrx")}
#: Fused q, k, v rows of equal size that follow each other ([3, heads, head_dim], not [heads, 3,
#: head_dim]).
QKV_THIRDS = {
    "Wqkv": _words("mpt modernbert modernbert-decoder"),
    "qkv": _words("""
        blip blip_2 instructblip instructblipvideo cohere_compass deepseek_ocr2 dots3_note
        ernie4_5_vl_moe florence2 glm4v glm4v_moe glm5_next glm_image glm_ocr got_ocr2 hiera
        mgp_str qwen2_vl qwen2_5_vl qwen3_vl qwen3_vl_moe qwen2_5_omni qwen3_omni_moe qwen3_5
        qwen3_5_moe sam sam_hq
    """),
}
#: 2-D fused gate and up projections: `name` -> families; None is every family that uses the name.
GATE_UP_HALVES: dict[str, frozenset[str] | None] = {
    "gate_up_proj": None,
    "input_linear": _words("granitemoeshared granitemoehybrid granitemoe_swa"),
}
#: 2-D parameters that are no module's `.weight` and yet multiply activations -> stored [in, out].
PRODUCT_PARAMETERS = {
    "in_proj_weight": False,  # nn.MultiheadAttention
    "q_proj_weight": False,
    "k_proj_weight": False,
    "v_proj_weight": False,
    "mm_input_projection_weight": True,  # Gemma 3
    "hc_fn": False,  # hyper-connections
    "fn": False,
}
#: Families with 3-D products: last name -> stored [in, heads, head_dim] (True) or [out, heads,
#: head_dim].
HEADED = {"xlnet": {"q": True, "k": True, "v": True, "r": True, "o": False}}
#: Last or next-to-last names of output heads over the vocabulary.
LM_HEADS = _words("""
    lm_head lm_heads lm_loss embed_out output_embeddings generator_lm_head unembed head_out
""")
#: Whole names (by ending) of heads over the vocabulary that have other last names.
LM_HEAD_ENDINGS = (
    "predictions.decoder",
    "lm_head.decoder",
    "model.proj_out",
    "vocab_projector",
    "pred_layer.proj",
)
#: Names that are heads over the vocabulary only at the top level of a checkpoint.
LM_HEAD_TOP = _words("output proj_out head lm_head decoder")

#: Lookup tables (nn.Embedding and its like), by last name.
EMBEDDINGS = _words("""
    wte wpe shared embed_in position_embd token_embd token_types relative_attention_bias
    rel_attn_bias pe_k codebook bias_values level_embed reference_points tok_embeddings
""")
EMBEDDING_PATTERN = (
    r"(.*_)?(embed|embeds|embedding|embeddings|emb|embs|token|tokens)"
    r"(_(\d+|layers?|table|global|per_layer))?"
    r"|embed_(tokens|positions|timestep|global|token|text_tokens|audio_tokens)\w*"
    r"|(row|column|queries)_embedder|HashBucketCodepointEmbedder_\d+|quer(y|ies)_feat\w*"
)
EMBEDDING_ENDINGS = ("transformer.w", "norm.shift", "norm.scale")
#: Names that look like tables or convolutions and are linear layers.
LINEAR_PATTERN = (
    r"patch_embed(ding)?|class_embed|vision_embed_tokens|embed_(return|state|action)"
    r"|relative_pos_embeddings|box_linear_embeddings|predictor_embeddings"
    r"|xpath_unitseq\d_embeddings|pointwise_conv\d?"
)
ROUTERS = _words("router gate shared_expert_gate wg ffn_gate_inp ffn_gate_inp_shexp")
#: Parents of a module called `gate` that make it a router; so does any that ends in `_moe`.
ROUTER_PARENTS = _words("mlp moe ffn feed_forward router mixer experts ff")

#: Last names that make a layer's role too general alone: the parent's name goes in front.
GENERIC = _words("dense linear proj layer output weight fc out projection decoder lin")

NORM_PATTERN = (
    r".*norm\d*(_\w+)?|ln(_\w+|\d+)?|.*_ln|layernorm\w*|lambda\w*|gamma\w*|layer_?scale\w*"
    r"|scale|scaling"
)
#: Causal masks that older GPT-2-like checkpoints store as 4-D floats: buffers, not parameters.
MASK_PATTERN = r".*\b(attn|attention)\.(masked_)?bias"
#: BART's mask of the vocabulary, a buffer likewise.
LOGITS_MASK = "final_logits_bias"
#: Parameters of two or more axes that are no product weight: what they are, and a pattern of
#: their last name.
NOT_LINEAR: tuple[tuple[str, str], ...] = (
    ("norm or scale", NORM_PATTERN),
    ("bias", r".*(_|^)bias(_\w+)?|b|bias\w*|b[qkvo]"),
    ("convolution", r".*conv\w*"),
    (
        "relative-position table",
        r"emb_rel_\w|gru_rel_pos\w*|attention_biases|rpb|rel_pos\w*|.*relative_position\w*"
        r"|rel_position\w*|r_kernel",
    ),
    (
        "position table",
        r".*pos(ition(al)?)?_?(embed|emb|enc)\w*|positional\w*|pos_\w+|position_\w+"
        r"|time_embeddings",
    ),
    (
        "learned token or table",
        r"(\w*_)?tokens?(_\w+)?|(\w+_)?(embed(ding)?s?|emb|embd)(_avg|_parameter)?|query|queries"
        r"|quer(y|ies)_\w+|latents?(_\w+)?|latent_query|probe|\w+_newline|view_separator"
        r"|codevectors|codebook|embedded|masked_spec_embed|\w*prompt\w*|no_object_pointer"
        r"|pad_\w+|\w*_feature_extensor|pooling_attention_query|translate|embed(ed)?",
    ),
    ("state-space parameter", r"A_log|A|D|dt_bias|.*_log|ssm_[ad]"),
    ("time-mixing parameter", r"time_(mix|decay|first|faaaa|maa)\w*|x_[rwkvag]"),
    (
        "scalar table",
        r"sinks?|alpha\w*|.*temperature|tau|layer_weights|logit_\w+|inv_freq|running_\w+"
        r"|log_scale",
    ),
)
