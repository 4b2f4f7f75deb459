"""Bytes of tokens, which need not be whole characters."""

from __future__ import annotations

import re
from typing import Any

from transformers import PreTrainedTokenizerBase

from nesa_node.api.decoding.text_stream import decoder_types

_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SPACE = "\u2581"


class TokenBytes:
    """Token bytes of fast tokenizers: byte-level, SentencePiece with or without byte tokens, and
    word-level."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._added = {
            token_id: token.content.encode()
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
        }
        self._is_byte_level = "ByteLevel" in decoder_types(tokenizer)
        self._length = len(self._tokenizer)

    def __call__(self, token_id: int) -> bytes:
        """Bytes of a token; empty for ids beyond the tokenizer's vocabulary."""
        if token_id in self._added:
            return self._added[token_id]
        if not 0 <= token_id < self._length:
            return b""
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            if all(char in _BYTES for char in token):
                return bytes(_BYTES[char] for char in token)
            return token.encode()
        if (one := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(one[1])
        return token.replace(_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Bytes by character in GPT-2's byte-level alphabet: printable Latin-1 characters are their own
    bytes, and characters from 256 on are the other bytes in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_BYTES = _byte_level_alphabet()
