"""A stranger's tokenizer is run only where it is known to be harmless."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers
from transformers import PreTrainedTokenizerBase
from transformers.integrations.gguf import gguf_tokenizer_mapping
from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

from nesa_node.core.errors import ModelError, ModelNotFoundError, UnsupportedModelError
from nesa_node.engine.weights.tokenizer import (
    ALLOWED_REGEXES,
    load_discovered_tokenizer,
    load_tokenizer,
    sanitize_tokenizer,
    sanitize_tokenizer_config,
)
from tests.api.tokenizers import byte_level_tokenizer, metaspace_tokenizer
from tests.cli.tiny import write_tiny_model

TEXTS = (
    *("Hello there, they're 123 \u00e9  \u6c49\n\n<end> x", " the cat sat", ""),
    "<|a|>\na</s>\n<|b|>\n",
)
A_TO_AA = {"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}
ADDED = {
    "id": 9, "content": "<x>", "single_word": False, "lstrip": False, "rstrip": False,
    "normalized": False, "special": True,
}  # fmt: skip
TEMPLATE: dict[str, Any] = {
    "type": "TemplateProcessing",
    "single": [{"Sequence": {"id": "A", "type_id": 0}}],
    "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
    "special_tokens": {},
}


def tokenizer_json(**changes: Any) -> dict[str, Any]:
    model = {"type": "WordLevel", "vocab": {"a": 0, "<unk>": 1, "b": 2}, "unk_token": "<unk>"}
    nothing = dict.fromkeys(("truncation", "padding", "normalizer", "pre_tokenizer"))
    nothing |= dict.fromkeys(("post_processor", "decoder"))
    return {"version": "1.0", "added_tokens": [], "model": model, **nothing, **changes}


def split(regex: str) -> dict[str, Any]:
    return {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}


def bpe(**changes: Any) -> dict[str, Any]:
    return {"type": "BPE", "vocab": {"a": 0}, "merges": [], **changes}


REFUSED: dict[str, dict[str, Any]] = {
    "doubles": {"normalizer": A_TO_AA},
    "doubles often": {"normalizer": {"type": "Sequence", "normalizers": [A_TO_AA] * 40}},
    "doubles in a nest": {
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Sequence", "normalizers": [A_TO_AA]}],
        }
    },
    "matches nothing": {
        "normalizer": {"type": "Replace", "pattern": {"String": ""}, "content": ""}
    },
    "regex in a normalizer": {
        "normalizer": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    },
    "prepends much": {"normalizer": {"type": "Prepend", "prepend": "a" * 999}},
    "a stranger's table": {"normalizer": {"type": "Precompiled", "precompiled_charsmap": "AAAA"}},
    "bytes of bytes": {
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [{"type": "ByteLevel"}] * 2}
    },
    "slow regex": {"pre_tokenizer": split("(a+)+$")},
    "slow regex in a nest": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Sequence", "pretokenizers": [split("(a+)+$")]}],
        }
    },
    "two patterns": {"pre_tokenizer": split("x") | {"pattern": {"String": " ", "Regex": "(a+)+$"}}},
    "without a type": {"pre_tokenizer": {"pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated"}},
    "slow regex when decoding": {
        "decoder": {"type": "Replace", "pattern": {"Regex": "(a+)+$"}, "content": ""}
    },
    "replaces twice when decoding": {
        "decoder": {
            "type": "Sequence",
            "decoders": [{"type": "Replace", "pattern": {"String": "a"}, "content": "b"}] * 2,
        }
    },
    "strips what is not there": {
        "decoder": {"type": "Strip", "content": " ", "start": 0, "stop": 9}
    },
    "unknown decoder": {"decoder": {"type": "CTC"}},
    "repeats the text": {"post_processor": TEMPLATE | {"single": TEMPLATE["single"] * 9}},
    "adds many": {
        "post_processor": TEMPLATE
        | {"special_tokens": {"a": {"id": "a", "ids": [0] * 999, "tokens": ["a"] * 999}}}
    },
    "in a nest of nests": {
        "pre_tokenizer": json.loads(
            '{"type":"Sequence","pretokenizers":[' * 90 + '{"type":"Digits"}' + "]}" * 90
        )
    },
    "eight times eight": {
        "pre_tokenizer": {
            "type": "Sequence",
            "pretokenizers": [{"type": "Sequence", "pretokenizers": [{"type": "Digits"}] * 8}] * 8,
        }
    },
    "unknown model": {"model": {"type": "Unigram", "vocab": [["a", 0.0]], "unk_id": 0}},
    "many tokens": {"model": bpe(vocab={str(number): number for number in range(300_001)})},
    "many merges": {"model": bpe(merges=["a a"] * 700_001)},
    "a long token": {"model": bpe(vocab={"a" * 9999: 0})},
    "a large id": {"model": bpe(vocab={"a": 2**31})},
    "a negative id": {"model": bpe(vocab={"a": -1})},
    "many added": {"added_tokens": [ADDED] * 8193},
    "a long added one": {"added_tokens": [ADDED | {"content": "x" * 999}]},
    "an empty added one": {"added_tokens": [ADDED | {"content": ""}]},
    "an added one of a large id": {"added_tokens": [ADDED | {"id": 2**31}]},
}


@pytest.mark.parametrize("changes", REFUSED.values(), ids=list(REFUSED))
def test_what_is_not_known_to_be_harmless_is_refused(changes: dict[str, Any]) -> None:
    content = json.dumps(tokenizer_json(**changes)).encode()
    began = time.monotonic()
    with pytest.raises(UnsupportedModelError, match="--model"):
        sanitize_tokenizer(content)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"[" * 1_000_001, b"1," * 3_000_001, b'{"model": ' * 5000, b"\xff"],
    ids=["empty", "list", "no model", "brackets", "commas", "nested", "no text"],
)
def test_what_is_no_tokenizer_is_refused(content: bytes) -> None:
    with pytest.raises(UnsupportedModelError, match="--model"):
        sanitize_tokenizer(content)


@pytest.mark.parametrize("make", [byte_level_tokenizer, metaspace_tokenizer])
def test_a_usual_tokenizer_is_the_same(
    make: Callable[[], PreTrainedTokenizerBase], tmp_path: Path
) -> None:
    make().save_pretrained(tmp_path)
    require_same(load_discovered_tokenizer(tmp_path), load_tokenizer(tmp_path))


def test_the_tokenizer_of_words_is_the_same_with_its_template(tmp_path: Path) -> None:
    folder = write_tiny_model(tmp_path / "words")
    found = load_discovered_tokenizer(folder)
    require_same(found, load_tokenizer(folder))
    assert found.chat_template


@pytest.mark.parametrize(
    "name", ["LlamaTokenizer", "LlamaTokenizerFast", "PreTrainedTokenizerFast"]
)
@pytest.mark.parametrize("switches", [{}, {"legacy": False}, {"legacy": True}], ids=str)
def test_a_tokenizer_of_llama_2_is_read_by_the_class_that_its_config_names(
    name: str, switches: dict[str, bool], tmp_path: Path
) -> None:
    """transformers' class for it makes a normalizer of its own, which splits otherwise."""
    vocabulary = {"<unk>": 0, "<s>": 1, "</s>": 2, "\u2581": 3}
    vocabulary |= {f"<0x{byte:02X}>": 4 + byte for byte in range(256)}
    for piece in (*"abcdehist<>|", "\u2581a"):
        vocabulary.setdefault(piece, len(vocabulary))
    model = bpe(
        vocab=vocabulary, merges=["\u2581 a"], unk_token="<unk>", fuse_unk=True, byte_fallback=True
    )
    normalizers = [
        {"type": "Prepend", "prepend": "\u2581"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "\u2581"},
    ]
    special = [
        ADDED | {"id": at, "content": text} for at, text in enumerate(("<unk>", "<s>", "</s>"))
    ]
    written = tokenizer_json(
        model=model,
        normalizer={"type": "Sequence", "normalizers": normalizers},
        added_tokens=special,
    )
    (tmp_path / "tokenizer.json").write_text(json.dumps(written))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    tokens = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": name, **tokens, **switches})
    )
    require_same(load_discovered_tokenizer(tmp_path), load_tokenizer(tmp_path))


def require_same(found: Any, expected: Any) -> None:
    assert found.added_tokens_decoder == expected.added_tokens_decoder
    assert found.chat_template == expected.chat_template
    assert found.special_tokens_map == expected.special_tokens_map
    assert len(found) == len(expected)
    for text in TEXTS:
        ids = expected(text)["input_ids"]
        assert found(text)["input_ids"] == ids
        assert found.decode(ids) == expected.decode(ids)


def test_the_usual_regexes_are_known() -> None:
    """As transformers writes them for Qwen, Llama 3, GPT-4o, Mistral and Falcon 3."""
    theirs: dict[str, str] = dict(gguf_tokenizer_mapping.GGUF_PRE_TOKENIZER_SPLITS)
    wanted = {theirs[name] for name in ("llama3", "qwen2", "gpt-4o", "tekken", "falcon3")}
    assert wanted | {PRETOKENIZE_REGEX} <= ALLOWED_REGEXES
    for regex in ALLOWED_REGEXES:
        changed = tokenizer_json(
            pre_tokenizer={"type": "Sequence", "pretokenizers": [split(regex), split(regex)]}
        )
        Tokenizer.from_str(sanitize_tokenizer(json.dumps(changed).encode()).decode())


@pytest.mark.parametrize("regex", sorted(ALLOWED_REGEXES))
def test_known_regexes_take_time_in_proportion(regex: str) -> None:
    from tokenizers import Regex

    splits = pre_tokenizers.Split(Regex(regex), "isolated")

    def seconds(text: str) -> float:
        took = []
        for _ in range(3):
            began = time.process_time()
            splits.pre_tokenize_str(text)
            took.append(time.process_time() - began)
        return min(took)

    for unit in ("a", "A", "\u02b0", "\u4e2d", " ", "\n", " \n", "1", "!", "\u0301"):
        few, many = (seconds(unit * number + "b") for number in (2_000, 16_000))
        # Eight times as long, or 64 times if it grows with the square.
        assert many < 24 * few + 0.005, repr(unit)


def test_what_is_not_used_here_is_left_out() -> None:
    """Padding to a thousand million tokens, for one."""
    padding = {
        "strategy": {"Fixed": 10**9}, "direction": "Right", "pad_to_multiple_of": None,
        "pad_id": 0, "pad_type_id": 0, "pad_token": "a",
    }  # fmt: skip
    changed = tokenizer_json(padding=padding, model=bpe(dropout=0.5))
    read = json.loads(sanitize_tokenizer(json.dumps(changed).encode()))
    assert read["padding"] is None
    assert "dropout" not in read["model"]


def test_a_field_that_comes_twice_counts_once() -> None:
    """Of two, another parser might take the other one."""
    content = json.dumps(tokenizer_json()).encode()[:-1]
    twice = content + b', "normalizer": ' + json.dumps(A_TO_AA).encode() + b', "normalizer": null}'
    assert Tokenizer.from_str(sanitize_tokenizer(twice).decode()).encode("a").tokens == ["a"]


def test_no_other_file_stands_in_for_it(tmp_path: Path) -> None:
    """Nor what the config says of the class, or of where its parts are."""
    byte_level_tokenizer().save_pretrained(tmp_path)
    expected = load_tokenizer(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    evil = tmp_path / "tokenizer.9.json"
    evil.write_text(json.dumps(tokenizer_json(normalizer=A_TO_AA)))
    config |= {
        "tokenizer_class": "BertTokenizer",
        "tokenizer_file": str(evil),
        "fast_tokenizer_files": ["tokenizer.9.json"],
        "tokenizer_padding": {"length": 10**9},
        "post_processor": 5,
        "init_inputs": ["x"],
        "backend": "evil",
        "auto_map": {"AutoTokenizer": ["x.Y", None]},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    (tmp_path / "tokenizer.model").write_bytes(b"\0")
    (tmp_path / "tekken.json").write_text("{}")
    (tmp_path / "vocab.json").write_text('{"a": 0}')
    (tmp_path / "merges.txt").write_text("")
    require_same(load_discovered_tokenizer(tmp_path), expected)
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises(ModelNotFoundError, match=r"no tokenizer\.json"):
        load_discovered_tokenizer(tmp_path)


@pytest.mark.parametrize(
    "config",
    [
        [],
        {"added_tokens_decoder": {str(number): {"content": "x"} for number in range(8193)}},
        {"added_tokens_decoder": {"1": {"content": "x" * 999}}},
        {"added_tokens_decoder": {"99999999": {"content": "x"}}},
        {"added_tokens_decoder": {"x": {"content": "x"}}},
        {"added_tokens_decoder": {"1": "x"}},
        {"added_tokens_decoder": []},
        {"eos_token": "x" * 999},
        {"eos_token": 5},
        {"additional_special_tokens": ["x"] * 8193},
        {"additional_special_tokens": [5]},
        {"extra_special_tokens": {"image": "x" * 999}},
    ],
    ids=lambda config: str(config)[:40],
)
def test_tokens_of_a_config_are_bounded(config: Any, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError):
        sanitize_tokenizer_config(config, special_tokens={})
    byte_level_tokenizer().save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError):
        load_discovered_tokenizer(tmp_path)
