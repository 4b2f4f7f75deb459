"""Tokenization that neither blocks the event loop nor exhausts memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Sequence
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from nesa_node.api.generation.detokenizer import decode_unlocked_if_long
from nesa_node.api.processes.fair_threads import FairThreadPool
from nesa_node.api.processes.template_program import MAX_TEXT_CHARS
from nesa_node.web.authenticator import current_caller
from nesa_node.web.problem import HttpProblem

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

    A text is tokenized in pieces first, and refused as soon as it has far more than `most` tokens,
    since a token takes a hundred times the memory of a character. Slightly more than `most` tokens
    may be returned. Raises `HttpProblem` about `param`, the field of the text.
    """
    if len(text) > MAX_TEXT_CHARS:
        raise HttpProblem(
            400,
            f"{param}: a text of {len(text)} characters; at most {MAX_TEXT_CHARS} are split here",
            code="context_length_exceeded",
            param=param,
        )
    max_tokens = min(max_tokens, _MAX_TOKENS)
    if len(text) > max(max_tokens, _MAX_INLINE_CHARS):
        _check_token_count(tokenizer, text, max_tokens, param)
    return _tokenize(tokenizer, text, add_special_tokens)


async def decode_all(tokenizer: Any, prompts: Sequence[Sequence[int]], *, param: str) -> list[str]:
    """Texts of `prompts`; `HttpProblem` for more than `MAX_TEXT_CHARS` characters together."""
    sizes = await offload_if_large(sum(map(len, prompts)), lambda: _count_chars(tokenizer, prompts))
    if (length := sum(sizes)) > MAX_TEXT_CHARS:
        raise HttpProblem(
            400,
            f"{param}: these tokens make a text of about {length} characters; at most "
            f"{MAX_TEXT_CHARS} are joined here",
            code="invalid_value",
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
            raise HttpProblem(
                400,
                f"This model's maximum context length is {max_tokens} tokens, and this text of "
                f"{len(text)} characters has more.",
                code="context_length_exceeded",
                param=param,
            )


def _tokenize(tokenizer: Any, text: str, add_special_tokens: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)[
        "input_ids"
    ]
    return ids
