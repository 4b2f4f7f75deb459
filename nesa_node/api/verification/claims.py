"""Tokens that an answer claims: listed, or all ways to split its text.

Most texts have several splits, and a sampled answer's is not always the tokenizer's. Which one it
was is found while the answer is computed again: the drawn token is taken if the text allows it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from nesa_node.api.generation.decode_loop import Vocabulary
from nesa_node.api.generation.tokenization import REPLACEMENT
from nesa_node.api.verification.saved_answer import SavedToken, UncheckableAnswerError


class Claim(Protocol):
    """The next tokens that an answer may have, given those before."""

    def is_at_end(self) -> bool:
        """Whether the answer claims no more tokens."""
        ...

    def accepts(self, token_id: int) -> bool:
        """Whether `token_id` may be next."""
        ...

    def candidates(self) -> Collection[int]:
        """Tokens that may be next, or the likely ones of them; none: the model has none such."""
        ...

    def guess(self) -> list[int]:
        """Tokens that probably follow, up to the end as far as they are known."""
        ...

    def advance(self, token_id: int) -> None:
        """Go on with `token_id`, which is accepted."""
        ...


class TokenTable:
    """A model's tokens by their bytes."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocabulary: Vocabulary, vocab_size: int
    ) -> None:
        self.vocabulary = vocabulary
        self._tokenizer = tokenizer
        self._ids: dict[bytes, list[int]] = {}
        for token_id in range(vocab_size):
            self._ids.setdefault(vocabulary.token_bytes(token_id), []).append(token_id)
        self.longest = max(map(len, self._ids))
        rules = vocabulary.detokenizer_rules
        space = next((ids[0] for data, ids in self._ids.items() if data[:1] == b" "), None)
        self.strips_space = space is not None and not rules.decode([space]).startswith(" ")
        """Whether the space before a text is not part of it."""

    def find(self, data: bytes) -> list[int]:
        """Tokens with these bytes, special ones included."""
        return self._ids.get(data, [])

    def find_text(self, data: bytes) -> list[int]:
        """Tokens that add these bytes to a text."""
        skipped = self.vocabulary.detokenizer_rules.is_skipped
        return [token_id for token_id in self.find(data) if not skipped(token_id)]

    def joins_bytes(self, text: str, token_ids: Sequence[int]) -> bool:
        """Whether the bytes of these tokens make this text, but for a space before it."""
        rules = self.vocabulary.detokenizer_rules
        if rules.merges_spaces:
            return False
        data = b"".join(map(self.vocabulary.token_bytes, token_ids))
        return data == text.encode() or (self.strips_space and data == b" " + text.encode())

    def tokenize(self, text: str) -> list[int]:
        encoded = self._tokenizer(text, add_special_tokens=False, verbose=False)
        ids: list[int] = encoded["input_ids"]
        return ids


def claim_text(
    text: str,
    table: TokenTable,
    *,
    has_stopped: bool,
    stops: Sequence[str],
    eos_ids: Collection[int],
) -> Claim:
    """Claim of a text without its tokens. `has_stopped`: it ended by itself or by one of `stops`.

    Raises `UncheckableAnswerError` for a text that does not tell its tokens.
    """
    if REPLACEMENT in text:
        raise UncheckableAnswerError(
            f"the text has a {REPLACEMENT!r}, in place of bytes that are no characters: ask for "
            "logprobs, which list the tokens"
        )
    split = table.tokenize(text)
    if table.joins_bytes(text, split):
        return TextClaim(text, split, table, has_stopped=has_stopped, stops=stops, eos_ids=eos_ids)
    if table.vocabulary.detokenizer_rules.decode(split) != text or stops:
        raise UncheckableAnswerError(
            "this model's tokenizer changes texts, so that they do not tell their tokens: ask for "
            "logprobs, which list the tokens"
        )
    listed: list[Sequence[int]] = [[token_id] for token_id in split]
    return ListedClaim([*listed, sorted(eos_ids)] if has_stopped and eos_ids else listed)


class ListedClaim:
    """Tokens that the answer lists, by ids or by bytes, which two tokens may share."""

    def __init__(self, tokens: Sequence[Sequence[int]]) -> None:
        self._tokens = tokens
        self._at = 0

    @classmethod
    def from_bytes(cls, tokens: Sequence[SavedToken], table: TokenTable) -> ListedClaim:
        return cls([table.find(token.data) for token in tokens])

    def is_at_end(self) -> bool:
        return self._at == len(self._tokens)

    def accepts(self, token_id: int) -> bool:
        return not self.is_at_end() and token_id in self._tokens[self._at]

    def candidates(self) -> Collection[int]:
        return self._tokens[self._at]

    def guess(self) -> list[int]:
        found = []
        for ids in self._tokens[self._at :]:
            if not ids:
                break
            found.append(ids[0])
        return found

    def advance(self, token_id: int) -> None:
        self._at += 1


@dataclass(frozen=True, slots=True)
class _Reading:
    """One reading of the text: its bytes, with a stop text if that ended it, and how far it is."""

    data: bytes
    offset: int
    may_overrun: bool
    """Whether its last token may have more bytes, of which the text has nothing."""

    def rest(self) -> bytes:
        return self.data[self.offset :]

    def advanced(self, data: bytes) -> _Reading | None:
        """The reading after a token with these bytes; None: it does not fit."""
        rest = self.rest()
        if not rest:
            return None
        if rest.startswith(data) or (self.may_overrun and data.startswith(rest)):
            end = min(self.offset + len(data), len(self.data))
            return _Reading(self.data, end, self.may_overrun)
        return None


class TextClaim:
    """A text of byte-level tokens, or of SentencePiece's: all ways to split it."""

    def __init__(
        self,
        text: str,
        split: Sequence[int],
        table: TokenTable,
        *,
        has_stopped: bool,
        stops: Sequence[str] = (),
        eos_ids: Collection[int],
    ) -> None:
        """`split` are the tokenizer's tokens of the text, whose bytes make it."""
        self._table = table
        self._eos_ids = frozenset(eos_ids) if has_stopped else frozenset()
        self._has_ended = False
        given = text.encode()
        # A limit may have cut a character, of which the text then has nothing.
        readings = [_Reading(given, 0, may_overrun=not has_stopped)]
        if has_stopped:
            readings += [_Reading(given + stop.encode(), 0, may_overrun=True) for stop in stops]
        if table.strips_space:
            readings += [
                _Reading(b" " + reading.data, 0, reading.may_overrun) for reading in readings
            ]
        self._readings = readings
        self._split = split
        self._tail_at = {0: 0}
        """Index of the tokenizer's token that begins at an offset."""
        end = 0
        for index, token_id in enumerate(self._split):
            end += len(table.vocabulary.token_bytes(token_id))
            self._tail_at[end] = index + 1

    def is_at_end(self) -> bool:
        if self._has_ended:
            return True
        return not self._eos_ids and not any(reading.rest() for reading in self._readings)

    def accepts(self, token_id: int) -> bool:
        if token_id in self._eos_ids:
            return any(not reading.rest() for reading in self._readings)
        return bool(self._is_silent(token_id) or self._advanced(token_id))

    def candidates(self) -> Collection[int]:
        found: set[int] = set()
        for reading in self._readings:
            rest = reading.rest()
            if not rest:
                found |= self._eos_ids
            for length in range(1, min(self._table.longest, len(rest)) + 1):
                found.update(self._table.find_text(rest[:length]))
        return found

    def guess(self) -> list[int]:
        found: list[int] = []
        reading = self._readings[0]
        offset = reading.offset
        while offset < len(reading.data):
            if (at := self._tail_at.get(offset)) is not None:
                found += self._split[at:]
                break
            rest = reading.data[offset : offset + self._table.longest]
            while rest and not self._table.find_text(rest):
                rest = rest[:-1]
            if not rest:
                break
            found.append(self._table.find_text(rest)[0])
            offset += len(rest)
        return [*found, *sorted(self._eos_ids)[:1]]

    def advance(self, token_id: int) -> None:
        if token_id in self._eos_ids:
            self._has_ended = True
        elif not self._is_silent(token_id):
            self._readings = self._advanced(token_id)

    def _is_silent(self, token_id: int) -> bool:
        return self._table.vocabulary.detokenizer_rules.is_skipped(token_id)

    def _advanced(self, token_id: int) -> list[_Reading]:
        data = self._table.vocabulary.token_bytes(token_id)
        advanced = (reading.advanced(data) for reading in self._readings)
        kept = [reading for reading in advanced if reading is not None]
        return kept if data else []
