"""Answers that must follow a grammar: JSON, by masking what would break it (llguidance).

V vocabulary.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

MOST_SCHEMA_BYTES = 64 * 1024
_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""With free white space small models write nothing else, up to the last token they may."""


def _limits() -> LLParserLimits:
    """A tenth to a half of llguidance's own: a grammar is compiled within tenths of a second."""
    return LLParserLimits(
        initial_lexer_fuel=500_000,
        step_lexer_fuel=100_000,
        max_lexer_states=50_000,
        max_grammar_size=50_000,
        verbose_errors=False,
    )


def compile_json_schema(schema: Mapping[str, Any]) -> str:
    """llguidance's grammar of what fits `schema`, on one line. Takes up to a second: use a thread.

    Raises `ValueError` for what is no schema, not supported by llguidance, or too large.
    """
    try:
        text = json.dumps(schema)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from None
    if len(text) > MOST_SCHEMA_BYTES:
        raise ValueError(
            f"the JSON schema has {len(text)} characters; {MOST_SCHEMA_BYTES} are allowed"
        )
    return checked(LLMatcher.grammar_from_json_schema(text, overrides=_ONE_LINE))


def checked(grammar: str) -> str:
    """`grammar`, made of a JSON schema. Raises `ValueError` if it cannot be followed."""
    failed, messages = LLMatcher.validate_grammar_with_warnings(grammar, limits=_limits())
    if failed:
        raise ValueError(f"the JSON schema cannot be followed: {_first_line(messages)}")
    return grammar


def compile_json_object() -> str:
    """The grammar of any JSON object."""
    return compile_json_schema({"type": "object"})


class Grammars:
    """Follows grammars over one tokenizer. Safe for several threads."""

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, vocab_size: int, eos_ids: Sequence[int]
    ) -> None:
        self._hf_tokenizer = tokenizer
        self._vocab_size = max(vocab_size, len(tokenizer))
        self._eos_ids = list(eos_ids)
        self._guard = threading.Lock()
        self._tokenizer: LLTokenizer | None = None

    def follow(self, grammar: str) -> Follower:
        """Compile `grammar` for one answer. Raises `ValueError`."""
        matcher = LLMatcher(self.prepare(), grammar, log_level=0, limits=_limits())
        if matcher.is_error():
            raise ValueError(f"the grammar cannot be followed: {matcher.get_error()[:200]}")
        return Follower(matcher)

    def prepare(self) -> LLTokenizer:
        """What all answers share, made with the first call.

        It takes a second for a large vocabulary, in which no other Python code runs: call it
        before there are answers that could be held up. Raises `ValueError` for a kind of tokenizer
        that llguidance does not know.
        """
        with self._guard:
            if self._tokenizer is None:
                hf: Any = self._hf_tokenizer
                eos: Any = self._eos_ids or None
                try:
                    made = from_tokenizer(hf, n_vocab=self._vocab_size, eos_token=eos)
                except ValueError as error:
                    raise ValueError(
                        f"this model's tokenizer cannot be made to follow a grammar: {error}"
                    ) from error
                self._tokenizer = made
            return self._tokenizer


class Follower:
    """Where one answer is in its grammar."""

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher

    def copy(self) -> Follower:
        """For another answer that begins here."""
        return Follower(self._matcher.deep_copy())

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """bool [V]: which tokens may come next. Raises `ValueError` where the grammar is too hard
        to follow here."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        self._check()
        flags = np.unpackbits(bits, bitorder="little", count=vocab_size)
        return torch.from_numpy(flags.view(np.bool_)).to(device)

    def take(self, token_id: int) -> bool:
        """Go on with an allowed token; True: the answer is complete, nothing may follow.

        Raises `ValueError` as `allowed` does: a matcher that gave up also says that it has stopped.
        """
        self._matcher.consume_token(token_id)
        self._check()
        return self._matcher.is_stopped()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ValueError(f"the grammar became too complex: {self._matcher.get_error()[:200]}")


def _first_line(messages: Sequence[str]) -> str:
    text = messages[0] if messages else "unknown reason"
    return text.strip().splitlines()[0][:200]
