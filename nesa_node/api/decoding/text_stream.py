"""Incremental detokenization: text of tokens as they come, which later tokens do not change.

A token's text may depend on its neighbours: characters of several tokens, and spaces that the
tokenizer strips or merges. A window of the last tokens is decoded again with each new token, and
the part of its text that is final is returned.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

MANY_CHARS = 1 << 16
"""Limit on text decoded while holding the GIL: 2 ms, or 20 ms with an unusual tokenizer."""
CONTEXT_TOKENS = 4
"""Tokens of a window that begin the next one, as context of its new tokens."""
WINDOW_TOKENS = 16
"""Tokens of a window after which the next one begins."""
REPLACEMENT = "\ufffd"
"""Character that decoders return for invalid or incomplete UTF-8."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_MERGES = re.compile(r"(?: | '| n| n'| 'v| 'r)$")
"""Ends of texts that transformers' clean-up may merge with the following text."""


class TextRules:
    """Properties of a tokenizer that detokenization needs, computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._byte_tokens = _byte_tokens(tokenizer)
        self._special = frozenset(
            token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        )
        self._length = len(self._tokenizer)
        self.merges_spaces = _merges_spaces(tokenizer)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte: a run of byte tokens is decoded as a whole."""
        return token_id in self._byte_tokens

    def is_silent(self, token_id: int) -> bool:
        """Whether the token has no text: special, or beyond the tokenizer's vocabulary."""
        return token_id in self._special or token_id >= self._length

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without special tokens and ids beyond the tokenizer's vocabulary."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class TextStream:
    """Incremental text of one answer; the returned texts are `rules.decode` of all tokens."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._window: list[int] = []
        self._said = ""
        """Beginning of the window's text that was returned already."""

    def push(self, token_id: int) -> str:
        """Add a token; return the text that is final now, which may be empty."""
        if self._rules.is_silent(token_id):
            return ""
        self._window.append(token_id)
        if self._rules.is_byte(token_id):
            return ""
        text = self._rules.decode(self._window)
        settled = text[:-1] if text.endswith(REPLACEMENT) else text
        if self._rules.merges_spaces and (loose := _MERGES.search(settled)):
            settled = settled[: loose.start()]
        new = self._say(settled)
        if len(self._window) > WINDOW_TOKENS:
            self._move_on(text)
        return new

    def finish(self) -> str:
        """Return the rest of the text. Not to be followed by `push`."""
        return self._say(self._rules.decode(self._window))

    def _say(self, text: str) -> str:
        if len(text) <= len(self._said) or not text.startswith(self._said):
            return ""
        new = text[len(self._said) :]
        self._said = text
        return new

    def _move_on(self, text: str) -> None:
        """Drop the beginning of the window if its end alone decodes to the same text."""
        window = self._window[-CONTEXT_TOKENS:]
        end = self._rules.decode(window)
        said = end[: max(len(end) - len(text) + len(self._said), 0)]
        # Tokenizers strip a leading space of each decoded text, so `said` must not be empty.
        if said and text.endswith(end.lstrip(" ")):
            self._window, self._said = window, said


def decode_whole(tokenizer: Any, token_ids: list[int], size: int) -> str:
    """`tokenizer.decode`, without holding the GIL for texts of more than `MANY_CHARS` characters.

    `size` is the text's length, about. Special tokens are decoded, too.
    """
    text: str
    if size <= MANY_CHARS:
        text = tokenizer.decode(token_ids)
        return text
    # Of the library's methods only `decode_batch` releases the GIL.
    (text,) = tokenizer.backend_tokenizer.decode_batch([token_ids], skip_special_tokens=False)
    return tokenizer.clean_up_tokenization(text) if _merges_spaces(tokenizer) else text


def _byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab()
    found = frozenset(
        token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
    )
    return found if "ByteFallback" in decoder_types(tokenizer) else frozenset()


def _merges_spaces(tokenizer: Any) -> bool:
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    model = type(getattr(tokenizer.backend_tokenizer, "model", None)).__name__
    return model != "BPE" or bool(getattr(tokenizer, forced, False))


def decoder_types(tokenizer: Any) -> frozenset[str]:
    """Types of the steps of a fast tokenizer's decoder."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(part["type"] for part in [state, *state.get("decoders", ())])
