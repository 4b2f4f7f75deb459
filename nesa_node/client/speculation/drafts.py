"""Drafts of a row's next tokens, and where the row's own text has gone on like this before.

"Prompt lookup decoding" (Saxena, 2023), over the prompt and what was generated after it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol

DraftSource = Literal["lookup", "model"]


@dataclass(frozen=True, slots=True)
class DraftKind:
    """Drafted tokens that are about equally likely to be right: of one source and one level.

    Lookup: the binary logarithm of how many tokens before it match. Model: its own probability, in
    steps of 1 / `CONFIDENCE_LEVELS`.
    """

    source: DraftSource
    level: int


DraftToken = tuple[int, DraftKind]
CONFIDENCE_LEVELS = 8


class Drafter(Protocol):
    """Drafts the next tokens of one row."""

    source: DraftSource

    def append(self, tokens: Sequence[int]) -> None:
        """Append tokens to the row's text: a prompt, or what was generated."""
        ...

    def draft(self) -> Iterator[DraftToken]:
        """Tokens that may follow the text, in order; the caller ends it when it has enough."""
        ...

    def close(self) -> None:
        """Release what it holds."""
        ...


LOOKUP_NGRAMS = (6, 4, 3, 2)
"""Lengths of the last tokens that are looked for, longest first."""
MAX_LOOKUP_TOKENS = 16_384
"""Most of a prompt's last tokens that are searched: indexing takes about a microsecond for each of
four n-grams."""
_MAX_MATCH_TOKENS = 32


class LookupDrafter:
    """Goes on as the text did after the latest earlier place where its last tokens occurred."""

    source: DraftSource = "lookup"

    def __init__(self) -> None:
        self._text: list[int] = []
        self._unread: list[int] = []
        """Tokens of the text that are not indexed: that is done where a draft is asked for."""
        self._ends: tuple[dict[tuple[int, ...], int], ...] = tuple({} for _ in LOOKUP_NGRAMS)
        """By length of n-gram: where its latest occurrence ends, the last tokens' excepted."""

    def append(self, tokens: Sequence[int]) -> None:
        self._unread += tokens

    def _index(self) -> None:
        for token in self._unread[-MAX_LOOKUP_TOKENS:]:
            end = len(self._text)
            for length, ends in zip(LOOKUP_NGRAMS, self._ends, strict=True):
                if end >= length:
                    ends[tuple(self._text[end - length : end])] = end
            self._text.append(token)
        self._unread.clear()

    def draft(self) -> Iterator[DraftToken]:
        """None where the last two tokens are new. A loop of the text is gone on with for ever."""
        self._index()
        text = self._text
        at = self._find_end()
        if at is None:
            return
        matched = _common_suffix(text, at)
        drafted: list[int] = []
        while True:
            token = text[at] if at < len(text) else drafted[at - len(text)]
            yield token, DraftKind("lookup", matched.bit_length())
            drafted.append(token)
            at += 1
            matched = min(matched + 1, _MAX_MATCH_TOKENS)

    def close(self) -> None:
        self._text.clear()
        self._unread.clear()

    def _find_end(self) -> int | None:
        for length, ends in zip(LOOKUP_NGRAMS, self._ends, strict=True):
            if (end := ends.get(tuple(self._text[-length:]))) is not None:
                return end
        return None


def _common_suffix(text: Sequence[int], end: int) -> int:
    """How many tokens before `end` are those at the end of `text`, up to a bound."""
    most = min(end, _MAX_MATCH_TOKENS)
    return next((n for n in range(most) if text[end - 1 - n] != text[-1 - n]), most)
