"""Text of tokens as they come, in pieces that later tokens do not change.

What a token's text is can depend on its neighbours: characters of several tokens, spaces that a
tokenizer strips or merges. So a window of the last tokens is decoded again with each new one, and
of its text goes out what is settled.
"""

from __future__ import annotations

import json
import re
from typing import Any

from transformers import PreTrainedTokenizerBase

MANY_CHARS = 1 << 16
"""Decoding so many takes 2 ms, and 20 with a stranger's tokenizer."""
CONTEXT_TOKENS = 4
"""So many of a window's tokens begin the next one, and only tell how new ones are to be read."""
WINDOW_TOKENS = 16
REPLACEMENT = "\ufffd"
"""What decoders give for bytes that are no character, or not yet."""
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")
_MERGES = re.compile(r"(?: | '| n| n'| 'v| 'r)$")
"""What transformers' clean-up may still join to what follows."""


class TextRules:
    """What has to be known of a tokenizer, found once."""

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
        """Whether it stands for one byte: a run of those is read as a whole."""
        return token_id in self._byte_tokens

    def is_silent(self, token_id: int) -> bool:
        """Whether texts leave it out, as if it were not there."""
        return token_id in self._special or token_id >= self._length

    def decode(self, token_ids: list[int]) -> str:
        """Without special tokens. Ids beyond the tokenizer's vocabulary have no text."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class TextStream:
    """One answer's text. All that `push` and `finish` return is `rules.decode` of all tokens."""

    def __init__(self, rules: TextRules) -> None:
        self._rules = rules
        self._window: list[int] = []
        self._said = ""
        """The beginning of the window's text that has gone out."""

    def push(self, token_id: int) -> str:
        """The text that is settled with this token; "" where none is."""
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
        """The rest. Nothing may be pushed afterwards."""
        return self._say(self._rules.decode(self._window))

    def _say(self, text: str) -> str:
        if len(text) <= len(self._said) or not text.startswith(self._said):
            return ""
        new = text[len(self._said) :]
        self._said = text
        return new

    def _move_on(self, text: str) -> None:
        """Forget the beginning of the window, if its end alone reads the same."""
        window = self._window[-CONTEXT_TOKENS:]
        end = self._rules.decode(window)
        said = end[: max(len(end) - len(text) + len(self._said), 0)]
        # A tokenizer strips a leading space of whatever it decodes: with some text that is done.
        if said and text.endswith(end.lstrip(" ")):
            self._window, self._said = window, said


def decode_whole(tokenizer: Any, token_ids: list[int], size: int) -> str:
    """`tokenizer.decode`, in which all other threads wait, but for texts of a `size`, in about
    characters, beyond `MANY_CHARS` they go on."""
    text: str
    if size <= MANY_CHARS:
        text = tokenizer.decode(token_ids)
        return text
    # Of the library's methods only that for several texts lets go of the interpreter's lock.
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
    """The names of the steps by which a fast tokenizer makes text of tokens."""
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(part["type"] for part in [state, *state.get("decoders", ())])
