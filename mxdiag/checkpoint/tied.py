"""Which stored embedding is the output head as well: one weight, stored and counted once."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from mxdiag.checkpoint.encodings import Entry
from mxdiag.layers.roles import layer_name, parts_of, role_of

#: Endings of architectures with a head over the vocabulary.
_HEADED = (
    "ForCausalLM",
    "LMHeadModel",
    "LMHead",
    "ForMaskedLM",
    "ForConditionalGeneration",
    "ForPreTraining",
)
#: Tables of input tokens, the one that encoder and decoder share first.
_TABLES = (
    "shared",
    "embed_tokens",
    "wte",
    "word_embeddings",
    "word_embedding",
    "embed_in",
    "tok_embeddings",
    "token_embd",
    "embeddings",
)


def tied_embedding(entries: Iterable[Entry], config: Mapping[str, Any] | None) -> str | None:
    """Name of the embedding that config.json says is the output head too; None if there is none.

    Only `tie_word_embeddings` decides, with an architecture that has a head: what is not stored may
    as well be missing.
    """
    config = config or {}
    text = config.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    if config.get("tie_word_embeddings", inner.get("tie_word_embeddings")) is not True:
        return None
    names = config.get("architectures")
    if isinstance(names, list) and not any(str(name).endswith(_HEADED) for name in names):
        return None
    vocabulary = config.get("vocab_size", inner.get("vocab_size"))
    found: dict[str, str] = {}
    for entry in entries:
        table = parts_of(layer_name(entry.name))[-1]
        fits = len(entry.shape) == 2 and vocabulary in (None, entry.shape[0])
        if fits and table in _TABLES and role_of(layer_name(entry.name)) == "embedding":
            found.setdefault(table, entry.name)
    return next((found[table] for table in _TABLES if table in found), None)
