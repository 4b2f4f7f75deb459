"""Answers that must follow a grammar: JSON, by masking what would break it (llguidance).

V vocabulary.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from nesa_node.api.decoding.bounded_json import bounded_json
from nesa_node.api.decoding.grammar_check import limits
from nesa_node.web.doorman import current_caller
from nesa_node.web.shares import Shares

MOST_SCHEMA_BYTES = 64 * 1024
_ONE_LINE: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""With free white space small models write nothing else, up to the last token they may."""

MAX_FOLLOWERS = 64
"""Answers that follow grammars at once in this process, beside a quarter more for keys that have
few: a hard pattern's takes up to 35 MB, `MOST_LEXER_BYTES` of them before it begins."""
STEPS_CPU_S = 2.0
"""What the masks of one answer may take, beside `STEP_CPU_S` for each of its tokens."""
STEP_CPU_S = 0.02
"""Of honest schemas: 0.1 ms, 5 at most."""
_RETRY_S = 2.0
_SHOWN_CHARS = 200

_shares = Shares(MAX_FOLLOWERS, "answers that follow a schema", retry_after_s=_RETRY_S)


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    """llguidance's grammar of what fits `schema`, on one line. Does not check it.

    Raises `ValueError` for what is no JSON, or too large.
    """
    try:
        text = bounded_json(schema, MOST_SCHEMA_BYTES)
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"the JSON schema is no JSON: {error}") from None
    if text is None:
        raise ValueError(
            f"the JSON schema has more than the {MOST_SCHEMA_BYTES} characters that are allowed"
        )
    return LLMatcher.grammar_from_json_schema(text, overrides=_ONE_LINE)


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
        self._refusal: str | None = None
        """Why there will be none: to find out takes as long as to make one."""

    def follow(self, grammar: str) -> Follower:
        """Compile `grammar`, which was checked, for one answer. Raises `ValueError`."""
        matcher = LLMatcher(self.prepare(), grammar, log_level=0, limits=limits())
        if matcher.is_error():
            raise ValueError(
                f"the grammar cannot be followed: {matcher.get_error()[:_SHOWN_CHARS]}"
            )
        return Follower(matcher)

    @contextmanager
    def followers(self, grammar: str, count: int) -> Iterator[list[Follower]]:
        """`grammar`, which was checked, compiled for so many answers.

        Raises `ValueError` as `follow`, or for more than there may be, and `Problem` as `Shares`
        do.
        """
        if count > _shares.size:
            raise ValueError(f"at most {_shares.size} answers to a request may follow a schema")
        with _shares.holding(current_caller(), count):
            first = self.follow(grammar)
            yield [first, *(first.copy() for _ in range(count - 1))]

    def prepare(self) -> LLTokenizer:
        """What all answers share, made, or refused, with the first call.

        It takes a second for a large vocabulary, in which no other Python code runs: call it
        before there are answers that could be held up. Raises `ValueError` for a kind of tokenizer
        that llguidance does not know.
        """
        with self._guard:
            if self._tokenizer is None and self._refusal is None:
                hf: Any = self._hf_tokenizer
                eos: Any = self._eos_ids or None
                try:
                    self._tokenizer = from_tokenizer(hf, n_vocab=self._vocab_size, eos_token=eos)
                except ValueError as error:
                    self._refusal = str(error)[:_SHOWN_CHARS]
            if self._tokenizer is None:
                raise ValueError(
                    f"this model's tokenizer cannot be made to follow a grammar: {self._refusal}"
                )
            return self._tokenizer


class Follower:
    """Where one answer is in its grammar. Used by one thread at a time.

    The library bounds the work of each step; `STEPS_CPU_S` and `STEP_CPU_S` bound that of all.
    """

    def __init__(self, matcher: LLMatcher) -> None:
        self._matcher = matcher
        self._left_s = STEPS_CPU_S

    def copy(self) -> Follower:
        """For another answer that begins here."""
        return Follower(self._matcher.deep_copy())

    def allowed(self, vocab_size: int, device: torch.device) -> Tensor:
        """bool [V]: which tokens may come next. Raises `ValueError` where the grammar is too hard
        to follow here."""
        with self._counted():
            mask = self._matcher.compute_bitmask()
        bits = np.frombuffer(mask, dtype=np.uint8)
        flags = np.unpackbits(bits, bitorder="little", count=vocab_size)
        return torch.from_numpy(flags.view(np.bool_)).to(device)

    def take(self, token_id: int) -> bool:
        """Go on with an allowed token; True: the answer is complete, nothing may follow.

        Raises `ValueError` as `allowed` does: a matcher that gave up also says that it has stopped.
        """
        with self._counted():
            self._matcher.consume_token(token_id)
        self._left_s = min(self._left_s + STEP_CPU_S, STEPS_CPU_S)
        return self._matcher.is_stopped()

    @contextmanager
    def _counted(self) -> Iterator[None]:
        began = time.thread_time()
        yield
        self._left_s -= time.thread_time() - began
        if self._matcher.is_error():
            raise ValueError(
                f"the grammar became too complex: {self._matcher.get_error()[:_SHOWN_CHARS]}"
            )
        if self._left_s < 0:
            raise ValueError("the grammar takes too long to follow: its patterns are too hard")
