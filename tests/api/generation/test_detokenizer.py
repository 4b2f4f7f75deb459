"""Streamed text is the decoded text, and no piece of it is ever changed."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from nesa_node.api.generation.tokenization import (
    MAX_LOCKED_DECODE_CHARS,
    REPLACEMENT,
    WINDOW_TOKENS,
    DetokenizerRules,
    IncrementalDetokenizer,
    TokenBytes,
    decode_unlocked_if_long,
)
from tests.api.tokenizers import byte_level_tokenizer, metaspace_tokenizer

TEXTS = [
    "the cat sat on the mat",
    "  two spaces, a tab\tand\n\n\nlines  ",
    "äöü ß 你好世界 🙂🙃 👨‍👩‍👧‍👦 e\u0301 \u200b end",
    "🏳️‍🌈" * 30,
    " ",
    "",
    'She said: "hello there"' * 40,
    "a\ufffdb\ufffd",
]
KINDS = [byte_level_tokenizer, metaspace_tokenizer]


def stream(tokenizer: PreTrainedTokenizerBase, token_ids: list[int]) -> list[str]:
    text = IncrementalDetokenizer(DetokenizerRules(tokenizer))
    return [*map(text.append, token_ids), text.finish()]


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_to_the_decoded_text(
    make: Callable[[], PreTrainedTokenizerBase], text: str
) -> None:
    tokenizer = make()
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)
    if REPLACEMENT not in text:
        assert REPLACEMENT not in "".join(pieces)


@pytest.mark.parametrize("make", KINDS)
def test_tokens_in_any_order_add_up_too(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer, rng = make(), random.Random(0)
    usual = tokenizer.encode(TEXTS[2] + TEXTS[0], add_special_tokens=False)
    for _ in range(60):
        ids = [rng.choice(usual) if rng.random() < 0.5 else rng.randrange(320) for _ in range(80)]
        assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids, skip_special_tokens=True)


class Undecoded:
    """A tokenizer whose `decode`, in which all other threads wait, takes few tokens."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def decode(self, token_ids: list[int]) -> str:
        assert len(token_ids) <= MAX_LOCKED_DECODE_CHARS
        text: str = self._tokenizer.decode(token_ids)
        return text


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize(
    "count", [5, MAX_LOCKED_DECODE_CHARS, MAX_LOCKED_DECODE_CHARS + 1, 3 * MAX_LOCKED_DECODE_CHARS]
)
def test_very_many_tokens_are_decoded_while_other_threads_go_on(
    make: Callable[[], PreTrainedTokenizerBase], count: int
) -> None:
    tokenizer, rng = make(), random.Random(0)
    # Some are special ones, and some have no text.
    ids = [rng.randrange(len(tokenizer) + 20) for _ in range(count)]
    assert decode_unlocked_if_long(Undecoded(tokenizer), ids, count) == tokenizer.decode(ids)


def test_spaces_that_the_library_cleans_up_are_cleaned_up_in_long_texts() -> None:
    vocabulary = {"a": 0, ".": 1, "[UNK]": 2}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    load: Any = PreTrainedTokenizerFast
    tokenizer = load(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = [0, 1] * MAX_LOCKED_DECODE_CHARS
    text = decode_unlocked_if_long(Undecoded(tokenizer), ids, len(ids))
    assert text == tokenizer.decode(ids)
    assert text.startswith("a. a.")


@pytest.mark.parametrize("make", KINDS)
def test_characters_of_several_tokens_come_whole(
    make: Callable[[], PreTrainedTokenizerBase],
) -> None:
    tokenizer = make()
    text = "the 🙂 cat sat on the mat"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = stream(tokenizer, ids)
    assert sum("🙂" in piece for piece in pieces) == 1
    # Long before the end.
    assert "🙂" in "".join(pieces[:-3])


@pytest.mark.parametrize("make", KINDS)
def test_text_comes_with_its_token(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer = make()
    ids = tokenizer.encode("a sat at a sat", add_special_tokens=False)
    for count in range(1, len(ids)):
        assert "".join(stream(tokenizer, ids[:count])[:-1]) == tokenizer.decode(ids[:count])


def test_special_tokens_have_no_text_and_keep_the_spaces_around_them() -> None:
    for make in KINDS:
        tokenizer = make()
        hello = tokenizer.encode(" hello", add_special_tokens=False)
        end = [tokenizer.eos_token_id]
        for ids in (end * 40 + hello, hello + end * 40 + hello, end, hello + end):
            pieces = stream(tokenizer, ids)
            assert "".join(pieces) == tokenizer.decode(ids, skip_special_tokens=True)


@pytest.mark.parametrize("make", KINDS)
def test_a_long_answer_of_the_same_token_takes_no_longer_for_each(
    make: Callable[[], PreTrainedTokenizerBase], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever it is: a space, half a character, a byte, an end token, one that is unknown."""
    tokenizer, longest = make(), [0]
    decode = DetokenizerRules.decode

    def measured(rules: DetokenizerRules, token_ids: list[int]) -> str:
        longest[0] = max(longest[0], len(token_ids))
        return decode(rules, token_ids)

    monkeypatch.setattr(DetokenizerRules, "decode", measured)
    rules = DetokenizerRules(tokenizer)
    for token_id in range(330):
        ids = [token_id] * 100
        longest[0] = 0
        text = IncrementalDetokenizer(rules)
        pieces = [*map(text.append, ids)]
        assert longest[0] <= 2 * WINDOW_TOKENS
        assert "".join([*pieces, text.finish()]) == tokenizer.decode(ids, skip_special_tokens=True)


def test_what_clean_up_joins_is_not_split() -> None:
    words = ["it", "is", ".", "n't", "'", "s", "'s", "do", "!", "n"]
    tokenizer = Tokenizer(models.WordLevel({word: at for at, word in enumerate(words)}, "it"))
    # As old WordLevel tokenizers: words are joined by spaces.
    make: Any = PreTrainedTokenizerFast
    fast = make(tokenizer_object=tokenizer, clean_up_tokenization_spaces=True)
    rng = random.Random(1)
    for _ in range(200):
        ids = [rng.randrange(len(words)) for _ in range(30)]
        assert "".join(stream(fast, ids)) == fast.decode(ids)


@pytest.mark.parametrize("make", KINDS)
def test_bytes_of_tokens_add_up_to_the_text(make: Callable[[], PreTrainedTokenizerBase]) -> None:
    tokenizer = make()
    data = TokenBytes(tokenizer)
    for text in TEXTS[:4]:
        ids = tokenizer.encode(text, add_special_tokens=False)
        joined = b"".join(map(data, ids)).decode()
        # SentencePiece puts a space before the text, which decoding strips.
        assert joined.removeprefix(" ") == text.removeprefix(" ")
    assert data(tokenizer.eos_token_id) == b"<end>"
    assert data(320) == data(10**9) == b""
