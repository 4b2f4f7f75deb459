"""The tokenizer that a GGUF file describes, as files that transformers loads.

transformers makes it of the file's vocabulary; here only what that takes is bounded, as in
`engine/weights/tokenizer.py`. transformers' own reader of the file is not used: it checks nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast

from nesa_node.core.errors import CorruptCheckpointError, UnsupportedModelError
from nesa_node.engine.gguf.header import GgufHeader
from nesa_node.engine.weights.files import MAX_CONFIG_BYTES, convert_parse_errors
from nesa_node.engine.weights.tokenizer import (
    MAX_ADDED_CHARS,
    MAX_ADDED_TOKENS,
    MAX_MERGES,
    MAX_TOKEN_CHARS,
    MAX_TOKENS,
    load_tokenizer,
)

TOKENIZER_MODELS = ("gpt2", "llama")
"""Kinds that the served architectures have: byte-level BPE and SentencePiece's BPE."""
MAX_VOCABULARY_CHARS = 8 << 20
"""Of all tokens: merges are found by cutting each token in two wherever it can be."""
_PROBE = "The 12 caf\u00e9s of 2024:\n  x = y_1*(z-3);\t\u4e2d\u6587 \U0001f642 don't!"
_ADDED_TYPES = (3, 4)
"""Control tokens and those that users defined, which are matched before a text is split."""
_SPECIAL_TOKENS = {
    "bos_token": "bos",
    "eos_token": "eos",
    "unk_token": "unknown",
    "pad_token": "padding",
}


def has_tokenizer(header: GgufHeader) -> bool:
    return "tokenizer.ggml.tokens" in header.metadata


def write_tokenizer(header: GgufHeader, folder: Path) -> None:
    """Write `tokenizer.json`, its config and the chat template into `folder`. Takes seconds.

    The folder has the model's `config.json`, by which transformers chooses a class. Raises
    `UnsupportedModelError` for another kind of tokenizer, and `CorruptCheckpointError`.
    """
    # Imported late: it takes long, and nodes do without.
    from transformers.integrations.gguf.gguf_tokenizer_mapping import convert_gguf_tokenizer

    described, settings = _read_group(header, "tokenizer"), _read_group(header, "tokenizer_config")
    _check_kind(described, header)
    tokens = _check_vocabulary(described, header)
    _check_settings(settings, header)
    if described["tokenizer_type"] == "llama":
        settings.setdefault("add_bos_token", True)  # as llama.cpp does with older files
    for name, key in _SPECIAL_TOKENS.items():
        settings[name] = _find_token(header, key, tokens)
    make: Any = PreTrainedTokenizerFast
    with convert_parse_errors(f"the tokenizer in {header.path}"):
        architecture = str(header.metadata["general.architecture"])
        backend, _ = convert_gguf_tokenizer(architecture, described)
        made = make(tokenizer_object=backend, **settings)
        made.save_pretrained(folder)
    # For some types of models transformers builds a tokenizer of its own from the vocabulary.
    loaded = load_tokenizer(folder)
    if loaded(_PROBE)["input_ids"] != made(_PROBE)["input_ids"]:
        raise UnsupportedModelError(
            f"{header.name} has a tokenizer that transformers takes for another one "
            f"({type(loaded).__name__}), so that texts cannot be read"
        )


def _read_group(header: GgufHeader, group: str) -> dict[str, Any]:
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_TOKENIZER_MAPPING

    names: Mapping[str, str] = GGUF_TOKENIZER_MAPPING[group]
    found = {name: header.metadata.get(f"tokenizer.{key}") for key, name in names.items()}
    return {name: value for name, value in found.items() if value is not None}


def _refuse(header: GgufHeader, reason: str) -> CorruptCheckpointError:
    return CorruptCheckpointError(f"the tokenizer in {header.path} {reason}")


def _check_kind(described: Mapping[str, Any], header: GgufHeader) -> None:
    kind = described.get("tokenizer_type")
    if kind not in TOKENIZER_MODELS:
        raise UnsupportedModelError(
            f"{header.name} has a tokenizer of the kind {kind!r:.40}, which cannot be read; "
            f"these can: {', '.join(TOKENIZER_MODELS)}"
        )


def _check_vocabulary(described: Mapping[str, Any], header: GgufHeader) -> list[str]:
    """The tokens, of which and of whose merges there are not too many."""
    tokens: list[str] = described.get("tokens", [])
    lists = [("tokens", tokens, MAX_TOKENS), ("merges", described.get("merges", []), MAX_MERGES)]
    for name, value, most in lists:
        if not _is_list_of(value, str) or len(value) > most:
            raise _refuse(header, f"has no list of at most {most:,} {name}")
    lengths = [len(token) for token in tokens]
    if max(lengths, default=0) > MAX_TOKEN_CHARS:
        raise _refuse(header, f"has a token of more than {MAX_TOKEN_CHARS} characters")
    if sum(lengths) > MAX_VOCABULARY_CHARS:
        raise _refuse(header, f"has over {MAX_VOCABULARY_CHARS:,} characters in its tokens")
    for name, types in (("scores", (int, float)), ("token_type", (int,))):
        value = described.get(name)
        if value is not None and not (_is_list_of(value, *types) and len(value) == len(tokens)):
            raise _refuse(header, f"has no {name} for each token")
    if "merges" not in described and "scores" not in described:
        raise _refuse(header, "has neither merges nor scores")
    if described["tokenizer_type"] == "gpt2" and len(set(tokens)) != len(tokens):
        raise _refuse(header, "has a token twice")
    kinds = described.get("token_type") or [0] * len(tokens)
    added = [len(token) for token, kind in zip(tokens, kinds, strict=True) if kind in _ADDED_TYPES]
    if len(added) > MAX_ADDED_TOKENS or max(added, default=0) > MAX_ADDED_CHARS:
        raise _refuse(header, f"has more than {MAX_ADDED_TOKENS} special tokens, or a long one")
    return tokens


def _check_settings(settings: Mapping[str, Any], header: GgufHeader) -> None:
    for name in ("add_bos_token", "add_eos_token"):
        if not isinstance(settings.get(name, False), bool):
            raise _refuse(header, f"states {name} as {settings[name]!r:.40}")
    template = settings.get("chat_template", "")
    if not isinstance(template, str) or len(template.encode()) > MAX_CONFIG_BYTES:
        raise _refuse(header, f"has no chat template of at most {MAX_CONFIG_BYTES >> 20} MiB")


def _is_list_of(value: object, *types: type) -> bool:
    return isinstance(value, list) and all(isinstance(item, types) for item in value)


def _find_token(header: GgufHeader, key: str, tokens: list[str]) -> str | None:
    found = header.metadata.get(f"tokenizer.ggml.{key}_token_id")
    if found is None:
        return None
    if type(found) is not int or not 0 <= found < len(tokens):
        raise _refuse(header, f"has no token {found!r:.40} ({key})")
    return tokens[found]
