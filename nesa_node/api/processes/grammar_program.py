"""Check whether a grammar can be followed, also as the program of a child process.

It imports only llguidance, so that the process starts in a tenth of a second.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 1.0
"""CPU time limit of one check; 64 KiB of a usual schema take 0.1 s."""
MEMORY_BYTES = 1 << 30
"""Limit on the process's address space; an idle process has 30 MB."""
MAX_LEXER_BYTES = 8 << 20
"""Limit on the memory of a compiled grammar. Usual ones take up to 2 MiB; `multipleOf` takes 500
bytes times its number, which llguidance's own limits do not count."""
_MAX_REASON_CHARS = 200


def parser_limits() -> LLParserLimits:
    """Limits of llguidance's lexer and parser: a tenth to a half of its defaults.

    With them a grammar compiles within 0.1 s, and no measured step takes longer than 0.2 s. They
    do not bound intersections of patterns (`allOf`, `patternProperties`), which take twice as long
    with each pattern.
    """
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def find_grammar_error(grammar: str, tokenizer: LLTokenizer) -> str | None:
    """Reason why llguidance cannot follow `grammar`; None if it can. May never return."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=parser_limits())
    if failed:
        return _single_line(messages[0] if messages else "")
    before = _allocated_bytes()
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=parser_limits())
    taken = _allocated_bytes() - before
    if not matcher.is_error():
        matcher.compute_bitmask()
    if matcher.is_error():
        return _single_line(matcher.get_error())
    if taken > MAX_LEXER_BYTES:
        return (
            f"it takes {taken / 2**20:.0f} MiB to follow, {MAX_LEXER_BYTES >> 20} are allowed: "
            "give smaller numbers to multipleOf, or fewer patterns"
        )
    return None


class _MallocInfo(ctypes.Structure):
    """Result of glibc's `mallinfo2`."""

    _fields_ = tuple(
        (name, ctypes.c_size_t)
        for name in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


_mallinfo: Any = getattr(ctypes.CDLL(None), "mallinfo2", None)


def _allocated_bytes() -> int:
    """Bytes that malloc has allocated and not freed; 0 without glibc.

    The process's resident memory would count freed memory, too.
    """
    if _mallinfo is None:
        return 0
    _mallinfo.restype = _MallocInfo
    found = _mallinfo()
    return int(found.uordblks + found.hblkhd)


def _single_line(message: str) -> str:
    return " ".join(message.split())[:_MAX_REASON_CHARS] or "unknown reason"


def prepare() -> Callable[[str], str | None]:
    """Handler of questions for `child_program.py`: the refusal of a grammar, or None.

    A grammar's lexer does not depend on the vocabulary, so the smallest one is used.
    """
    return partial(find_grammar_error, tokenizer=LLTokenizer("byte"))
