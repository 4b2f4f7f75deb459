"""Loading of a checkpoint's tokenizer; untrusted ones within an allowlist and limits of sizes.

A `tokenizer.json` is a program: forty replacements of a pattern by a longer one exhaust memory for
one letter, and a regular expression may take exponential time. The accepted content is serialized
anew, so that no second parser interprets the original file differently.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import msgspec
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from nesa_node.core.errors import ModelNotFoundError, UnsupportedModelError
from nesa_node.engine.weights.families import is_known_type
from nesa_node.engine.weights.files import (
    check_side_files,
    convert_parse_errors,
    has_more_values,
    read_json,
)

MAX_TOKENS = 300_000
"""The largest of the supported families: BLOOM has 250,680, Gemma 262,208."""
MAX_MERGES = 700_000
MAX_ADDED_TOKENS = 8192
MAX_TOKEN_CHARS = 1024
MAX_ADDED_CHARS = 256
MAX_COMPONENTS = 8
"""Components of one kind in sequence; DeepSeek's tokenizers split seven times."""
_MAX_PATTERN_CHARS = 16
_MAX_COMMAS = 3_000_000
_MAX_BRACKETS = 1_000_000

_CASED = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_SMALL = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_PUNCTUATION = r" ?[^\s\p{L}\p{N}]+"

ALLOWED_REGEXES = frozenset(
    {
        # GPT-2
        rf"'s|'t|'re|'ve|'m|'ll|'d| ?\p{{L}}+| ?\p{{N}}+|{_PUNCTUATION}|\s+(?!\S)|\s+",
        # Llama 3, GPT-4, Phi-4
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n]*|{_SPACES}",
        # Qwen 2, 2.5 and 3
        rf"{_SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_PUNCTUATION}[\r\n]*|{_SPACES}",
        # GPT-4o
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_SMALL}+{_SHORT}?"
        rf"|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_SMALL}*{_SHORT}?"
        rf"|\p{{N}}{{1,3}}|{_PUNCTUATION}[\r\n/]*|{_SPACES}",
        # Mistral (Tekken)
        rf"[^\r\n\p{{L}}\p{{N}}]?{_CASED}*{_SMALL}+|[^\r\n\p{{L}}\p{{N}}]?{_CASED}+{_SMALL}*"
        rf"|\p{{N}}|{_PUNCTUATION}[\r\n/]*|{_SPACES}",
        # Falcon, DeepSeek, and models that split digits
        r"[0-9][0-9][0-9]",
        r"\p{N}",
        r"\p{N}{1,3}",
        "[\r\n]",
        r"\s?\p{L}+",
        r"\s?\p{P}+",
        "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+",
        "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+",
        "[!\"#$%&'()*+,\\-./:;<=>?@\\[\\\\\\]^_`{|}~][A-Za-z]+"
        "|[^\r\n\\p{L}\\p{P}\\p{S}]?[\\p{L}\\p{M}]+| ?[\\p{P}\\p{S}]+[\r\n]*"
        "|\\s*[\r\n]+|\\s+(?!\\S)|\\s+",
        # BLOOM
        " ?[^(\\s|[.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c])]+",
    }
)
"""Split patterns of models of the supported families; each takes linear time."""

ALLOWED_CLASSES = frozenset(
    name + suffix
    for name in ("Llama", "CodeLlama", "GPT2", "Qwen2", "Gemma", "GPTNeoX", "Bloom", "PreTrained")
    for suffix in ("Tokenizer", "TokenizerFast")
) | {"TokenizersBackend"}
"""Tokenizer classes of transformers for the supported families. They build the tokenizer from the
checked vocabulary."""

TokenizerComponent = dict[str, Any]


class _AddedToken(msgspec.Struct):
    id: int
    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool = False
    special: bool = False


class _TokenizerModel(msgspec.Struct):
    vocab: dict[str, int]
    type: str | None = None
    merges: list[str | tuple[str, str]] | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False


class _TokenizerFile(msgspec.Struct):
    model: _TokenizerModel
    added_tokens: list[_AddedToken] = []
    normalizer: TokenizerComponent | None = None
    pre_tokenizer: TokenizerComponent | None = None
    post_processor: TokenizerComponent | None = None
    decoder: TokenizerComponent | None = None
    version: str = "1.0"


def sanitize_tokenizer(content: bytes) -> bytes:
    """Return an untrusted `tokenizer.json` without unused parts (padding, truncation, dropout).

    Raises `UnsupportedModelError` for one that might take excessive time or memory, and for any
    component that is not on the allowlist.
    """
    if has_more_values(content, commas=_MAX_COMMAS, brackets=_MAX_BRACKETS):
        raise _make_refusal("it has too many entries")
    try:
        found = msgspec.json.decode(content, type=_TokenizerFile)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise _make_refusal(str(error)) from error
    _check_vocabulary(found.model)
    if len(found.added_tokens) > MAX_ADDED_TOKENS:
        raise _make_refusal(f"more than {MAX_ADDED_TOKENS} tokens are added to it")
    for token in found.added_tokens:
        if not 0 <= token.id < MAX_TOKENS or not 0 < len(token.content) <= MAX_ADDED_CHARS:
            raise _make_refusal(f"the added token {token.id} is out of bounds")
    _check_components(found.normalizer, "normalizer", "normalizers", _NORMALIZERS)
    _check_components(found.pre_tokenizer, "pre_tokenizer", "pretokenizers", _PRE_TOKENIZERS)
    _check_components(found.post_processor, "post_processor", "processors", _POST_PROCESSORS)
    _check_components(found.decoder, "decoder", "decoders", _DECODERS)
    written = msgspec.to_builtins(found)
    if found.model.type == "WordLevel":
        vocab, unknown = found.model.vocab, found.model.unk_token or ""
        written["model"] = {"type": "WordLevel", "vocab": vocab, "unk_token": unknown}
    return msgspec.json.encode(written | {"truncation": None, "padding": None})


def sanitize_tokenizer_config(raw: object, *, special_tokens: object) -> dict[str, Any]:
    """Return the allowed settings of untrusted tokenizer and special-token configs.

    Keeps the tokenizer class only where it is one of `ALLOWED_CLASSES`, never a file to load it
    from. Raises `UnsupportedModelError`.
    """
    if not isinstance(raw, dict) or not isinstance(special_tokens, dict):
        raise _make_refusal("tokenizer_config.json or special_tokens_map.json is not a JSON object")
    config = {key: special_tokens[key] for key in _SPECIAL_TOKENS if key in special_tokens}
    config |= {key: raw[key] for key in (*_SPECIAL_TOKENS, *_CONFIG_KEYS) if key in raw}
    config |= {key: raw[key] for key in _BOOLEAN_KEYS if isinstance(raw.get(key), bool)}
    if (name := raw.get("tokenizer_class")) in ALLOWED_CLASSES:
        config["tokenizer_class"] = name
    for key in _SPECIAL_TOKENS:
        many = _list_tokens(config.get(key))
        if len(many) > MAX_ADDED_TOKENS or not all(map(_is_special_token, many)):
            raise _make_refusal(
                f"{key} of tokenizer_config.json is not a short token, or lists too many"
            )
    added = config.get("added_tokens_decoder", {})
    if not isinstance(added, dict) or len(added) > MAX_ADDED_TOKENS:
        raise _make_refusal(
            f"added_tokens_decoder is not a table of at most {MAX_ADDED_TOKENS} tokens"
        )
    for key, token in added.items():
        if not (key.isascii() and key.isdigit() and len(key) <= 6 and int(key) < MAX_TOKENS):
            raise _make_refusal(f"{key[:20]!r} is not a valid id of an added token")
        if not isinstance(token, dict) or not _is_special_token(token):
            raise _make_refusal(f"the added token {key} is not a token, or too long")
    return config


_SPECIAL_TOKENS = (
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
    "additional_special_tokens",
    "extra_special_tokens",
)
_BOOLEAN_KEYS = ("legacy", "add_prefix_space", "add_bos_token", "add_eos_token")
_CONFIG_KEYS = (
    "added_tokens_decoder",
    "chat_template",
    "clean_up_tokenization_spaces",
    "model_max_length",
    "split_special_tokens",
)


def _list_tokens(value: object) -> list[object]:
    """List the tokens of a value: one token, a list, or a table by name."""
    if isinstance(value, dict) and "content" not in value:
        return list(value.values())
    return value if isinstance(value, list) else [] if value is None else [value]


def _is_special_token(value: object) -> bool:
    content = value.get("content") if isinstance(value, dict) else value
    return isinstance(content, str) and len(content) <= MAX_ADDED_CHARS


def _make_refusal(reason: str) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"its tokenizer is not loaded, since it comes from an untrusted announcement: {reason}. "
        "Where you trust the model, name it with --model"
    )


def _check_vocabulary(model: _TokenizerModel) -> None:
    if model.type is None and model.merges is not None:
        model.type = "BPE"  # omitted by older versions
    if model.type not in ("BPE", "WordLevel"):
        raise _make_refusal(
            f"its model is {str(model.type)[:40]!r}, which is neither BPE nor WordLevel"
        )
    if len(model.vocab) > MAX_TOKENS or len(model.merges or ()) > MAX_MERGES:
        raise _make_refusal(f"it has more than {MAX_TOKENS:,} tokens or {MAX_MERGES:,} merges")
    if max(map(len, model.vocab), default=0) > MAX_TOKEN_CHARS:
        raise _make_refusal(f"a token has more than {MAX_TOKEN_CHARS} characters")
    ids = model.vocab.values()
    if not 0 <= min(ids, default=0) <= max(ids, default=0) < MAX_TOKENS:
        raise _make_refusal(f"a token's id is not 0 to {MAX_TOKENS - 1:,}")
    for text in (model.unk_token, model.continuing_subword_prefix, model.end_of_word_suffix):
        if len(text or "") > _MAX_PATTERN_CHARS:
            raise _make_refusal("a prefix, a suffix or the unknown token is too long")


ComponentCheck = Callable[[TokenizerComponent], bool]


def _check_components(
    found: TokenizerComponent | None, kind: str, key: str, known: Mapping[str, ComponentCheck]
) -> None:
    parts = list(_flatten(found, key, MAX_COMPONENTS)) if found is not None else []
    if len(parts) > MAX_COMPONENTS:
        raise _make_refusal(f"{kind} has more than {MAX_COMPONENTS} parts")
    counts = Counter(str(part.get("type")) for part in parts)
    for part in parts:
        name = part.get("type")
        check = known.get(name) if isinstance(name, str) else None
        if check is None:
            raise _make_refusal(f"{kind} {str(name)[:40]!r} is not supported")
        if not check(part):
            raise _make_refusal(f"{kind} {name} has unsupported settings")
        if {name, f"{kind} {name}"} & _AT_MOST_ONCE and counts[str(name)] > 1:
            raise _make_refusal(f"{kind} {name} occurs more than once")


def _flatten(part: TokenizerComponent, key: str, depth: int) -> Iterator[TokenizerComponent]:
    if part.get("type") != "Sequence":
        yield part
        return
    inner = part.get(key)
    if not isinstance(inner, list) or len(inner) > MAX_COMPONENTS or not depth:
        raise _make_refusal(f"a sequence has no list of {key}, or too long a one")
    for one in inner:
        if not isinstance(one, dict):
            raise _make_refusal(f"an entry of {key} is not an object")
        yield from _flatten(one, key, depth - 1)


def _allow_any(_part: TokenizerComponent) -> bool:
    return True


def _is_shortening_replacement(part: TokenizerComponent) -> bool:
    """Whether it replaces a string by one that is not longer."""
    pattern, content = _get_text_pattern(part), part.get("content")
    return pattern is not None and isinstance(content, str) and len(content) <= len(pattern)


def _get_text_pattern(part: TokenizerComponent) -> str | None:
    pattern = part.get("pattern")
    text = pattern.get("String") if isinstance(pattern, dict) and len(pattern) == 1 else None
    return text if isinstance(text, str) and 0 < len(text) <= _MAX_PATTERN_CHARS else None


def _is_allowed_split(part: TokenizerComponent) -> bool:
    pattern = part.get("pattern")
    if isinstance(pattern, dict) and list(pattern) == ["Regex"]:
        return isinstance(pattern["Regex"], str) and pattern["Regex"] in ALLOWED_REGEXES
    return _get_text_pattern(part) is not None


def _is_safe_strip(part: TokenizerComponent) -> bool:
    """Whether it strips at most one character at the start: tokenizers panics beyond the end."""
    return part.get("start") in (0, 1) and part.get("stop") == 0


def _is_bounded_template(part: TokenizerComponent) -> bool:
    """Whether a template inserts each text at most once, and few special tokens."""
    for key, most in (("single", 1), ("pair", 2)):
        pieces = part.get(key)
        if not isinstance(pieces, list) or len(pieces) > 2 * MAX_COMPONENTS:
            return False
        if sum(isinstance(piece, dict) and "Sequence" in piece for piece in pieces) > most:
            return False
    tokens = part.get("special_tokens")
    return isinstance(tokens, dict) and all(
        isinstance(token, dict)
        and isinstance(token.get("ids"), list)
        and isinstance(token.get("tokens"), list)
        and max(len(token["ids"]), len(token["tokens"])) <= MAX_COMPONENTS
        for token in tokens.values()
    )


_AT_MOST_ONCE = frozenset(
    {"Prepend", "ByteLevel", "Metaspace", "TemplateProcessing", "decoder Replace"}
)
"""Components that may occur once: all lengthen a text, but for the decoder's Replace, which takes a
microsecond for each character, occurrence and generated token."""
_NORMALIZERS: Mapping[str, ComponentCheck] = {
    "NFC": _allow_any,
    "Lowercase": _allow_any,
    "Strip": _allow_any,
    "Prepend": lambda part: part.get("prepend") == "\u2581",
    "Replace": _is_shortening_replacement,
}
_PRE_TOKENIZERS: Mapping[str, ComponentCheck] = {
    "ByteLevel": _allow_any,
    "Metaspace": _allow_any,
    "Whitespace": _allow_any,
    "WhitespaceSplit": _allow_any,
    "Digits": _allow_any,
    "Punctuation": _allow_any,
    "Split": _is_allowed_split,
}
_POST_PROCESSORS: Mapping[str, ComponentCheck] = {
    "ByteLevel": _allow_any,
    "BertProcessing": _allow_any,
    "RobertaProcessing": _allow_any,
    "TemplateProcessing": _is_bounded_template,
}
_DECODERS: Mapping[str, ComponentCheck] = {
    "ByteLevel": _allow_any,
    "Metaspace": _allow_any,
    "ByteFallback": _allow_any,
    "Fuse": _allow_any,
    "Replace": _is_shortening_replacement,
    "Strip": _is_safe_strip,
}


_TEMPLATE_FILE = "chat_template.jinja"


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer in `folder`; code in the folder is never run.

    Raises `ModelNotFoundError`, and `CorruptCheckpointError` for files that cannot be parsed.
    """
    check_side_files(folder)
    with convert_parse_errors(f"the tokenizer in {folder}"):
        return _load(folder)


def load_discovered_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """Load the tokenizer of an untrusted model, which the swarm announced.

    Only its `tokenizer.json` is used, if `tokenizer.py` accepts it, read by the class that
    `load_tokenizer` would choose. Raises as `load_tokenizer`, and `UnsupportedModelError`.
    """
    check_side_files(folder)
    what = f"the tokenizer in {folder}"
    try:
        content = sanitize_tokenizer((folder / "tokenizer.json").read_bytes())
    except FileNotFoundError as error:
        raise ModelNotFoundError(
            f"{what} has no tokenizer.json, which a discovered model needs; name it with --model"
        ) from error
    config = sanitize_tokenizer_config(
        _read_object(folder / "tokenizer_config.json"),
        special_tokens=_read_object(folder / "special_tokens_map.json"),
    )
    said = _read_object(folder / "config.json")
    model_type = said.get("model_type") if isinstance(said, dict) else None
    # In `folder` transformers would find other files and build other tokenizers from them.
    with convert_parse_errors(what), TemporaryDirectory(prefix="nesa-tokenizer-") as checked:
        (Path(checked) / "tokenizer.json").write_bytes(content)
        (Path(checked) / "tokenizer_config.json").write_text(json.dumps(config))
        if is_known_type(model_type):
            (Path(checked) / "config.json").write_text(json.dumps({"model_type": model_type}))
        if (template := folder / _TEMPLATE_FILE).is_file():
            (Path(checked) / _TEMPLATE_FILE).write_bytes(template.read_bytes())
        return _load(Path(checked))


def _read_object(path: Path) -> object:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}


def _load(folder: Path) -> PreTrainedTokenizerBase:
    try:
        # Unless `trust_remote_code` is given, transformers prompts on the terminal for a folder
        # with code.
        return AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError) as error:
        if "trust_remote_code" in str(error):
            raise ModelNotFoundError(
                f"the tokenizer in {folder} needs Python code of its own (auto_map), which is "
                "never run; give a copy with a tokenizer.json"
            ) from error
        reason = " ".join(str(error).split())
        raise ModelNotFoundError(f"no usable tokenizer in {folder}: {reason}") from error
