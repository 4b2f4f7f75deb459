"""Text into tokens, without holding up others, and without filling the memory."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextvars import copy_context
from functools import partial
from typing import Any, TypeVar

from nesa_node.api.processes.fair_threads import FairThreads
from nesa_node.web.doorman import current_caller
from nesa_node.web.problem import Problem

T = TypeVar("T")

_INLINE_CHARS = 4096
_PIECE_CHARS = 1 << 17
_TORN_TOKENS = 64
"""More that a text may have because it was cut in two: one long word, say."""
_THREADS = min(32, (os.cpu_count() or 1) + 4)
PIECES_OF_ONE = _THREADS // 2
"""Large pieces of work that are done for one key at once."""

# Not asyncio's own threads: those are held by openings of models and by downloads.
_threads = FairThreads(_THREADS, most_of_one=PIECES_OF_ONE, name="gateway-text")


async def encode(tokenizer: Any, text: str, *, special: bool, most: int, param: str) -> list[int]:
    """The tokens of `text`; `special` adds the tokenizer's own, such as a first one.

    Raises `Problem` as `split` does.
    """
    return await light(
        len(text), lambda: split(tokenizer, text, special=special, most=most, param=param)
    )


def split(tokenizer: Any, text: str, *, special: bool, most: int, param: str) -> list[int]:
    """As `encode`, here and now.

    Raises `Problem` for a text with far more than `most`, as soon as that is known: a token takes a
    hundred times the room of a character. A few more than `most` may be returned. `param` is the
    field that the text came in.
    """
    if len(text) > max(most, _INLINE_CHARS):
        _check(tokenizer, text, most, param)
    return _split(tokenizer, text, special)


async def light(size: float, work: Callable[[], T]) -> T:
    """`work()`, in a thread where it would hold up the tokens of other requests.

    There it waits for its key's turn: see `FairThreads`.
    """
    if size <= _INLINE_CHARS:
        return work()
    piece = _threads.submit(current_caller(), partial(copy_context().run, work))
    return await asyncio.wrap_future(piece)


def _check(tokenizer: Any, text: str, most: int, param: str) -> None:
    count, allowed = 0, most
    for at in range(0, len(text), _PIECE_CHARS):
        count += len(_split(tokenizer, text[at : at + _PIECE_CHARS], False))
        allowed += _TORN_TOKENS
        if count > allowed:
            raise Problem(
                400,
                f"This model's maximum context length is {most} tokens, and this text of "
                f"{len(text)} characters has more.",
                code="context_length_exceeded",
                param=param,
            )


def _split(tokenizer: Any, text: str, special: bool) -> list[int]:
    ids: list[int] = tokenizer(text, add_special_tokens=special, verbose=False)["input_ids"]
    return ids
