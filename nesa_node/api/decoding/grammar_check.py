"""Whether a grammar can be followed, found out here or by a process of its own.

The program needs nothing but llguidance, so that it starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 1.0
"""Of one check. What 64 KiB of schema honestly need is 0.1 s."""
MEMORY_BYTES = 1 << 30
"""Address space of the process; with nothing to do it has 30 MB."""
MOST_LEXER_BYTES = 8 << 20
"""Of a grammar that is ready to be followed. Honest ones take up to 2 MiB, `multipleOf` 500 bytes
times its number, which no limit of llguidance's counts."""
_SHOWN_CHARS = 200


def limits() -> LLParserLimits:
    """A tenth to a half of llguidance's own.

    They bound the lexer and the parser: a grammar is made ready within 0.1 s, and no step measured
    takes longer than 0.2 s. Intersections of patterns (`allOf`, `patternProperties`) they do not
    bound: the time of these doubles with each pattern.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def refusal(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """Why llguidance cannot follow `grammar` (its own words); None: it can. May take for ever."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=limits())
    if failed:
        return _in_a_line(messages[0] if messages else "")
    before = _allocated_bytes()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    taken = _allocated_bytes() - before
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return _in_a_line(matcher.get_error())
    if taken > MOST_LEXER_BYTES:
        return (
            f"it takes {taken / 2**20:.0f} MiB to follow, {MOST_LEXER_BYTES >> 20} are allowed: "
            "give smaller numbers to multipleOf, or fewer patterns"
        )
    return None


class _Mallinfo(ctypes.Structure):
    """What glibc's `mallinfo2` returns."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)


def _allocated_bytes() -> int:
    """What malloc has given out, in which process memory that was freed does not count; 0 where
    there is no glibc."""
    if _mallinfo is None:
        return 0
    _mallinfo.restype = _Mallinfo
    found = _mallinfo()
    return int(found.uordblks + found.hblkhd)


def _in_a_line(message: str) -> str:
    return " ".join(message.split())[:_SHOWN_CHARS] or "unknown reason"


def prepare() -> Callable[[str], str | None]:
    """What a process answers (`child_program.py`): a grammar's refusal.

    The lexer of a grammar does not depend on the vocabulary, so the smallest one will do.
    """
    return partial(refusal, tokenizer=LLTokenizer("byte"))
