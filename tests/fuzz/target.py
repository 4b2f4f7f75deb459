"""What a fuzzer needs to know of a parser."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from nesa_node.core.errors import NesaError

Parse = Callable[[bytes], Awaitable[Any] | Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A parser of bytes that a peer, a hub or a client chose.

    `open` gives what reads one input; it is entered once, in the process that parses. The reader
    may raise `refusals` and nothing else.
    """

    open: Callable[[], AbstractContextManager[Parse]]
    seeds: Callable[[], Sequence[bytes]]
    tokens: Sequence[bytes]
    refusals: tuple[type[Exception], ...] = (NesaError,)
    weight: float = 1.0
    """How many inputs it gets beside the others: less for what is slow."""
    slow_s: float = 0.1
    """What an input may take of its thread's time: more only where no event loop waits for it."""
