"""Whether a grammar can be followed, found out here or by a process of its own.

The program needs nothing but llguidance, so that it starts in a tenth of a second.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

CPU_S = 1.0
"""Of one check. What 64 KiB of schema honestly need is 0.1 s."""
MEMORY_BYTES = 1 << 30
"""Address space of the process; with nothing to do it has 30 MB."""
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
    matcher = LLMatcher(tokenizer, grammar, log_level=0, limits=limits())
    if not matcher.is_error():
        matcher.compute_bitmask()
    return _in_a_line(matcher.get_error()) if matcher.is_error() else None


def _in_a_line(message: str) -> str:
    return " ".join(message.split())[:_SHOWN_CHARS] or "unknown reason"


def prepare() -> Callable[[str], str | None]:
    """What a process answers (`child_program.py`): a grammar's refusal.

    The lexer of a grammar does not depend on the vocabulary, so the smallest one will do.
    """
    return partial(refusal, tokenizer=LLTokenizer("byte"))
