"""Tokenization that neither blocks the event loop nor exhausts memory; detokenization."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from transformers import PreTrainedTokenizerBase

from nesa_node.api.processes.template_program import MAX_TEXT_CHARS
from nesa_node.api.processes.workers import FairThreadPool
from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import invalid_request

MAX_LOCKED_DECODE_CHARS = 1 << 16
"""Limit on text decoded while holding the GIL: 2 ms, or 20 ms with an unusual tokenizer."""
CONTEXT_TOKENS = 4
"""Tokens of a window that begin the next one, as context of its new tokens."""
WINDOW_TOKENS = 16
"""Tokens of a window after which the next one begins."""
REPLACEMENT = "\ufffd"
"""Character that decoders return for invalid or incomplete UTF-8."""
_MERGEABLE_END = re.compile(r"(?: | '| n| n'| 'v| 'r)$")
"""Ends of texts that transformers' clean-up may merge with the following text."""


class DetokenizerRules:
    """Properties of a tokenizer that detokenization needs, computed once."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._byte_tokens = _find_byte_tokens(tokenizer)
        self._special_ids = frozenset(
            token_id
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
            if token.special
        )
        self._vocab_size = len(self._tokenizer)
        self.merges_spaces = _merges_spaces(tokenizer)

    def is_byte(self, token_id: int) -> bool:
        """Whether the token is one byte: a run of byte tokens is decoded as a whole."""
        return token_id in self._byte_tokens

    def is_skipped(self, token_id: int) -> bool:
        """Whether the token has no text: special, or beyond the tokenizer's vocabulary."""
        return token_id in self._special_ids or token_id >= self._vocab_size

    def decode(self, token_ids: list[int]) -> str:
        """Text of tokens, without special tokens and ids beyond the tokenizer's vocabulary."""
        text: str = self._tokenizer.decode(token_ids, skip_special_tokens=True)
        return text


class IncrementalDetokenizer:
    """Incremental text of one answer; the returned texts are `rules.decode` of all tokens.

    A token's text may depend on its neighbours: characters of several tokens, and spaces that the
    tokenizer strips or merges. A window of the last tokens is decoded again with each new token,
    and the part of its text that is final is returned.
    """

    def __init__(self, rules: DetokenizerRules) -> None:
        self._rules = rules
        self._window: list[int] = []
        self._emitted = ""
        """Beginning of the window's text that was returned already."""

    def append(self, token_id: int) -> str:
        """Add a token; return the text that is final now, which may be empty."""
        if self._rules.is_skipped(token_id):
            return ""
        self._window.append(token_id)
        if self._rules.is_byte(token_id):
            return ""
        text = self._rules.decode(self._window)
        settled = text[:-1] if text.endswith(REPLACEMENT) else text
        if self._rules.merges_spaces and (loose := _MERGEABLE_END.search(settled)):
            settled = settled[: loose.start()]
        new = self._emit(settled)
        if len(self._window) > WINDOW_TOKENS:
            self._shift_window(text)
        return new

    def finish(self) -> str:
        """Return the rest of the text. Not to be followed by `append`."""
        return self._emit(self._rules.decode(self._window))

    def _emit(self, text: str) -> str:
        if len(text) <= len(self._emitted) or not text.startswith(self._emitted):
            return ""
        new = text[len(self._emitted) :]
        self._emitted = text
        return new

    def _shift_window(self, text: str) -> None:
        """Drop the beginning of the window if its end alone decodes to the same text."""
        window = self._window[-CONTEXT_TOKENS:]
        end = self._rules.decode(window)
        said = end[: max(len(end) - len(text) + len(self._emitted), 0)]
        # Tokenizers strip a leading space of each decoded text, so `said` must not be empty.
        if said and text.endswith(end.lstrip(" ")):
            self._window, self._emitted = window, said


def decode_unlocked_if_long(tokenizer: Any, token_ids: list[int], num_chars: int) -> str:
    """`tokenizer.decode`, special tokens included, without holding the GIL for a long text.

    `num_chars` is the text's length, about.
    """
    text: str
    if num_chars <= MAX_LOCKED_DECODE_CHARS:
        text = tokenizer.decode(token_ids)
        return text
    # Of the library's methods only `decode_batch` releases the GIL.
    (text,) = tokenizer.backend_tokenizer.decode_batch([token_ids], skip_special_tokens=False)
    return tokenizer.clean_up_tokenization(text) if _merges_spaces(tokenizer) else text


def _find_byte_tokens(tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    vocabulary = tokenizer.get_vocab()
    found = frozenset(
        token_id for token, token_id in vocabulary.items() if _BYTE_TOKEN.fullmatch(token)
    )
    return found if "ByteFallback" in decoder_step_types(tokenizer) else frozenset()


def _merges_spaces(tokenizer: Any) -> bool:
    if not getattr(tokenizer, "clean_up_tokenization_spaces", False):
        return False
    forced = "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output"
    model = type(getattr(tokenizer.backend_tokenizer, "model", None)).__name__
    return model != "BPE" or bool(getattr(tokenizer, forced, False))


def decoder_step_types(tokenizer: Any) -> frozenset[str]:
    decoder = tokenizer.backend_tokenizer.decoder
    if decoder is None:
        return frozenset()
    state = json.loads(decoder.__getstate__())
    return frozenset(part["type"] for part in [state, *state.get("decoders", ())])


_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")
_SENTENCEPIECE_SPACE = "\u2581"


class TokenBytes:
    """Token bytes of fast tokenizers: byte-level, SentencePiece, and word-level."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer: Any = tokenizer
        self._added = {
            token_id: token.content.encode()
            for token_id, token in self._tokenizer.added_tokens_decoder.items()
        }
        self._is_byte_level = "ByteLevel" in decoder_step_types(tokenizer)
        self._vocab_size = len(self._tokenizer)

    def __call__(self, token_id: int) -> bytes:
        """Bytes of a token; empty for ids beyond the tokenizer's vocabulary."""
        if token_id in self._added:
            return self._added[token_id]
        if not 0 <= token_id < self._vocab_size:
            return b""
        token: str | None = self._tokenizer.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if self._is_byte_level:
            if all(char in _BYTE_LEVEL_VALUES for char in token):
                return bytes(_BYTE_LEVEL_VALUES[char] for char in token)
            return token.encode()
        if (one := _BYTE_TOKEN.fullmatch(token)) is not None:
            return bytes.fromhex(one[1])
        return token.replace(_SENTENCEPIECE_SPACE, " ").encode()


def _byte_level_alphabet() -> dict[str, int]:
    """Bytes by character in GPT-2's byte-level alphabet: printable Latin-1 characters are their own
    bytes, and characters from 256 on are the other bytes in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    shifted = {chr(256 + at): byte for at, byte in enumerate(others)}
    return {chr(byte): byte for byte in plain} | shifted


_BYTE_LEVEL_VALUES = _byte_level_alphabet()


class StopTextFilter:
    """Filter that passes text up to the first stop text, holding back a possible beginning."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._pending = ""
        self.has_stopped = False

    def append(self, text: str) -> str:
        """Add text; return what no stop text can include. Not to be called after `has_stopped`."""
        if not self._stops:
            return text
        text = self._pending + text
        ends = [at for at in (text.find(stop) for stop in self._stops) if at >= 0]
        if ends:
            self.has_stopped, self._pending = True, ""
            return text[: min(ends)]
        held = max(overlap_chars(text, stop) for stop in self._stops)
        self._pending = text[len(text) - held :]
        return text[: len(text) - held]

    def finish(self) -> str:
        """Return the text that was held back, at the end of the stream."""
        held, self._pending = self._pending, ""
        return held


def overlap_chars(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper prefix of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


T = TypeVar("T")

_MAX_INLINE_CHARS = 4096
"""Size of work that runs on the event loop; larger work runs in a thread."""
_PIECE_CHARS = 1 << 17
_MAX_TOKENS = 1 << 20
"""Limit on a text's tokens, whatever the model's context: each takes up to 500 bytes."""
_HUGE_CHARS = 1 << 18
"""Size from which tokenization is limited to two texts at once: a million characters that are a
token each take 400 MiB."""
_MAX_CUT_TOKENS = 64
"""Extra tokens allowed for each cut into pieces, which may split a long word."""
_THREADS = min(32, (os.cpu_count() or 1) + 4)
MAX_THREADS_PER_KEY = _THREADS // 2
"""Limit on the threads that work for one key at once."""

# Not asyncio's default executor, which downloads and the opening of models may fill.
_threads = FairThreadPool(_THREADS, max_per_caller=MAX_THREADS_PER_KEY, name="gateway-text")
_huge_threads = FairThreadPool(2, max_per_caller=1, name="gateway-huge-text")


async def encode(
    tokenizer: Any, text: str, *, add_special_tokens: bool, max_tokens: int, param: str
) -> list[int]:
    """Tokens of `text`; `add_special_tokens` adds the tokenizer's special tokens.

    Raises `HttpProblem` as `encode_blocking` does.
    """
    return await offload_if_large(
        len(text),
        lambda: encode_blocking(
            tokenizer,
            text,
            add_special_tokens=add_special_tokens,
            max_tokens=max_tokens,
            param=param,
        ),
        takes_memory=True,
    )


def encode_blocking(
    tokenizer: Any, text: str, *, add_special_tokens: bool, max_tokens: int, param: str
) -> list[int]:
    """Tokens of `text`, computed in this thread.

    A text is tokenized in pieces first, and refused as soon as it has far more than `max_tokens`,
    since a token takes a hundred times the memory of a character. Slightly more than `max_tokens`
    may be returned. Raises `HttpProblem` about `param`, the field of the text.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise invalid_request(
            f"{param}: a text of {len(text)} characters; at most {MAX_TEXT_CHARS} are split here",
            param=param,
            code="context_length_exceeded",
        )
    max_tokens = min(max_tokens, _MAX_TOKENS)
    if len(text) > max(max_tokens, _MAX_INLINE_CHARS):
        _check_token_count(tokenizer, text, max_tokens, param)
    return _tokenize(tokenizer, text, add_special_tokens)


async def decode_all(tokenizer: Any, prompts: Sequence[Sequence[int]], *, param: str) -> list[str]:
    """Texts of `prompts`; `HttpProblem` for more than `MAX_TEXT_CHARS` characters together."""
    sizes = await offload_if_large(sum(map(len, prompts)), lambda: _count_chars(tokenizer, prompts))
    if (length := sum(sizes)) > MAX_TEXT_CHARS:
        raise invalid_request(
            f"{param}: these tokens make a text of about {length} characters; at most "
            f"{MAX_TEXT_CHARS} are joined here",
            param=param,
        )

    def texts() -> list[str]:
        each = zip(prompts, sizes, strict=True)
        return [decode_unlocked_if_long(tokenizer, list(prompt), size) for prompt, size in each]

    return await offload_if_large(length, texts)


def _count_chars(tokenizer: Any, prompts: Sequence[Sequence[int]]) -> list[int]:
    """Upper bounds of the characters of each prompt: a token may have a thousand. At least one for
    each token, since tokens without text take time, too."""
    ids = list({token for prompt in prompts for token in prompt})
    tokens = tokenizer.convert_ids_to_tokens(ids)
    length = {one: max(1, len(token or "")) for one, token in zip(ids, tokens, strict=True)}
    return [sum(length[token] for token in prompt) for prompt in prompts]


async def offload_if_large(size: float, work: Callable[[], T], *, takes_memory: bool = False) -> T:
    """Result of `work`, run inline if `size` (in characters) is small, else in a thread.

    Threads are shared fairly among keys (`FairThreadPool`). With `takes_memory`, for tokenization,
    at most two works of more than `_HUGE_CHARS` characters run at once, for different keys.
    """
    if size <= _MAX_INLINE_CHARS:
        return work()
    threads = _huge_threads if takes_memory and size > _HUGE_CHARS else _threads
    piece = threads.submit(current_caller(), partial(copy_context().run, work))
    return await asyncio.wrap_future(piece)


def _check_token_count(tokenizer: Any, text: str, max_tokens: int, param: str) -> None:
    count, allowed = 0, max_tokens
    for at in range(0, len(text), _PIECE_CHARS):
        count += len(_tokenize(tokenizer, text[at : at + _PIECE_CHARS], False))
        allowed += _MAX_CUT_TOKENS
        if count > allowed:
            raise invalid_request(
                f"This model's maximum context length is {max_tokens} tokens, and this text of "
                f"{len(text)} characters has more.",
                param=param,
                code="context_length_exceeded",
            )


def _tokenize(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    made = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)
    ids: list[int] = made["input_ids"]
    return ids
